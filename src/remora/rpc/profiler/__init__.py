"""Calls in a profile: the spans that a caller records, and the events that a callee sends back."""
