"""Faults on purpose: plans as values, what they do to messages and links, and the part of each worker in them."""
