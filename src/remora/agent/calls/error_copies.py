"""Copies errors that are kept, so that each may be raised many times, and walks their chains of causes."""

from __future__ import annotations

import copy


def fresh(error: BaseException) -> BaseException:
    """A copy of an error that is kept, to be raised: the one that is kept collects no traceback, and so keeps
    nothing."""
    try:
        twin = _copied(error)
        if type(twin) is not type(error) or twin.args != error.args:
            return error
    except Exception:  # (tensors, for example, cannot be compared like that)
        return error
    chain(twin, error.__cause__, error.__context__, error.__suppress_context__)
    return twin


def _copied(error: BaseException) -> BaseException:
    try:
        return copy.copy(error)
    except Exception:  # its constructor wants other arguments than it passed on, or it cannot be changed
        if any(vars(cls).get("__slots__") for cls in type(error).__mro__):
            raise
        twin = type(error).__new__(type(error), *error.args)
        vars(twin).update(vars(error))
        return twin


def chained(error: BaseException) -> list[BaseException]:
    """An error, and those that it came from."""
    found = [error]
    for each in found:  # which grows
        for origin in (each.__cause__, each.__context__):
            if origin is not None and all(origin is not known for known in found):
                found.append(origin)
    return found


def chain(
    error: BaseException, cause: BaseException | None, context: BaseException | None, suppress_context: bool
) -> None:
    """Say what an error came from. (It may be a frozen dataclass.)"""
    for name, value in ("__cause__", cause), ("__context__", context), ("__suppress_context__", suppress_context):
        object.__setattr__(error, name, value)
