"""Calls in one direction between two workers: what goes out, what comes in, and the thread that reads."""
