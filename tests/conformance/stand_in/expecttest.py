"""Stands in for the package `expecttest` where it is not installed: what PyTorch's test classes are built on, and no more.

They derive from its TestCase. None of the tests that are run here compares with expected text, so there is nothing to it.
"""

from __future__ import annotations

import unittest

ACCEPT = False  # never rewrite what a test expects


class TestCase(unittest.TestCase):
    """A test case without expected text."""

    longMessage = True  # as there: a message of its own is shown beside unittest's
