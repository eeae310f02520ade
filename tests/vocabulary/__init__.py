"""Tests of the words that all layers share."""
