"""Tests of Remora: a mirror of src/remora, and folders for what crosses its layers."""
