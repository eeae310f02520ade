"""Waiting in tests: for a condition, by looking again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT = 20.0  # real seconds: what a test waits for comes in milliseconds; a machine under load may take long to get there


def eventually(condition: Callable[[], object], timeout: float = TIMEOUT, what: object = "") -> bool:
    """Return True when the condition is true; fail if it does not become true in time. `what` describes it, or is a function
    that does."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            described = what() if callable(what) else what
            raise AssertionError(f"not true within {timeout:g} s: {described or condition}")
        time.sleep(0.002)
    return True
