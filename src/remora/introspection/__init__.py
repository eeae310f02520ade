"""What a worker knows of itself: its snapshot, and the thread that answers observers."""
