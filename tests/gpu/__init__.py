"""Tests that need a GPU. Each is skipped, and says so, where there is none."""
