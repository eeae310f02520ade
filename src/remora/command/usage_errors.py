"""Errors that end the command with one line and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """The command cannot do what it was told. The text says why, and what to do."""


@contextmanager
def extra(name: str, verb: str) -> Iterator[None]:
    """Say what to install if a library that is imported inside is missing. `name` is an extra of the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "remora":
            raise
        raise UsageError(
            f"`remora {verb}` needs {error.name}, which is not installed: pip install 'remora[{name}]'"
        ) from error
