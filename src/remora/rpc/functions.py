"""Decorators for functions that are called from other workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MARK = "_wrapped_async_rpc_function"


def async_execution(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that returns a `torch.futures.Future`: its callers get the future's value when it is there.

    No thread of the callee waits meanwhile. Put it under `@staticmethod` and `@classmethod`, and over `@torch.jit.script`.
    An `async def` function needs no mark.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    setattr(wrapper, MARK, fn)
    return wrapper
