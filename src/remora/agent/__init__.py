"""Drives the protocol: owns the threads, the locks and the tables of calls under way."""
