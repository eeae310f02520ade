"""Carries a trace along with calls: a text that names the distributed trace of a call, as W3C's `traceparent` does.

The agent knows no more of it than this file says. `remora.observe.opentelemetry` installs a tracer; without one, calls
carry nothing.
"""

from __future__ import annotations

from typing import Protocol

LONGEST = 512  # characters of a text that is believed


class Tracer(Protocol):
    """Knows the traces of this process."""

    def outgoing(self) -> str | None:
        """A call is about to be made on this thread: what it carries along, if it is part of a trace."""

    def arrived(self, caller: str, call: int, trace: str) -> None:
        """A call that carries this is about to be served, in the context (of `contextvars`) in which this is called."""


class Tracing:
    """The tracer of this process: there is one at most, as there is one OpenTelemetry."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None  # (read at each call, without a lock: an assignment is atomic)


tracing = Tracing()
