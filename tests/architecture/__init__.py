"""Tests of how the source is put together, not of what it does."""
