"""The threads of a worker."""
