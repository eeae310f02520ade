"""Requests that arrive: which handler takes them, and the run of the function."""
