"""Calls under way, as their caller sees them: calls, futures, and what a call carries along."""
