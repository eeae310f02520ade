"""Lets the workers of a group find each other, on a c10d store."""

