"""The rules two workers keep, without I/O, threads, clock or torch."""
