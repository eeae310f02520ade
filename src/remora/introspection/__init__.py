"""The look of a worker at itself: its snapshot, and the thread that answers observers."""
