"""What one worker promises, tried mostly on a worker that calls itself: no processes, and the whole path of a call."""
