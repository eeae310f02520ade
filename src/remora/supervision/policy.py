"""Decides when a process that ended is restarted: never, on failure, or always; how soon, and how often. No I/O, no
clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

When = Literal["never", "on-failure", "always"]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A process is restarted after `delay` seconds, the next time after `factor` times that, and so on up to
    `longest_delay`; at most `limit` times in a row (None: any number of times). If a process ran for `steady_after` seconds
    before it ended, the count and the delay start again."""

    when: When = "on-failure"
    limit: int | None = 3
    delay: float = 0.5
    factor: float = 2.0
    longest_delay: float = 30.0
    steady_after: float = 60.0

    def __post_init__(self) -> None:
        if self.when not in get_args(When):
            raise ValueError(f"when must be one of {', '.join(get_args(When))}, got {self.when!r}")
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"limit must not be negative, got {self.limit}")
        for name, least in (("delay", 0.0), ("factor", 1.0), ("longest_delay", 0.0), ("steady_after", 0.0)):
            if not (getattr(self, name) >= least and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be at least {least:g}, got {getattr(self, name)}")


class Restarts:
    """Counts the restarts of one process, and decides on the next."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.made = 0  # in all
        self.in_a_row = 0

    def after(self, code: int, ran_for: float) -> float | None:
        """Return the seconds after which to restart a process that ended with this exit code; None: not at all."""
        policy = self._policy
        if policy.when == "never" or (policy.when == "on-failure" and code == 0):
            return None
        if ran_for >= policy.steady_after:
            self.in_a_row = 0
        if policy.limit is not None and self.in_a_row >= policy.limit:
            return None
        delay = min(policy.delay * policy.factor ** min(self.in_a_row, 64), policy.longest_delay)
        self.made += 1
        self.in_a_row += 1
        return delay

    def __repr__(self) -> str:
        return f"<Restarts {self.made}, {self.in_a_row} in a row, {self._policy.when}>"
