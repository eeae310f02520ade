"""Bytes between workers: sockets, and threads that wait for them. The only package that opens sockets."""
