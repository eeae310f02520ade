"""Bytes between workers: sockets, and who waits for them. The only package that opens sockets."""
