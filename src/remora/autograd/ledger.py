"""The sources and segments of one worker in one pass: decides when a segment can be run. No tensors, no threads, no I/O.

The worker waits for its *sources* (the roots, and each message it sent that takes part) and runs its *segments*, each of
which needs some of the sources and may come after other segments. Two promises:

  L1  A segment is handed out once, and only when all its sources have come and all segments before it have been run.
  L2  When all sources have come and all segments handed out have been run, none is left.

The thread that reports the last thing a segment needs (a source that comes, a segment that has been run) is handed the
segment, and is answerable for it. A gradient is acknowledged when every segment that it was handed has been run, and
every message that was sent because of it has been acknowledged. So the roots' worker knows that the pass has ended
everywhere when its own gradients are acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set


class Ledger:
    """Names each segment by its label: the set of its sources, one bit each."""

    __slots__ = ("_after", "_expected", "arrived", "handed_out", "run")

    def __init__(self, sources: int, after: Mapping[int, Set[int]]) -> None:
        self._expected = (1 << sources) - 1
        self._after = {label: frozenset(before) for label, before in after.items()}
        self.arrived = 0  # the sources that have come
        self.handed_out: set[int] = set()
        self.run: set[int] = set()
        for label, before in self._after.items():
            if not label or label & ~self._expected or not before <= self._after.keys():
                raise ValueError(f"a segment of {label:b} after {sorted(before)} makes no sense with {sources} sources")

    def arrive(self, sources: Iterable[int]) -> list[int]:
        """These sources have come. Returns the segments that can be run now; the caller runs them."""
        came = 0
        for source in sources:
            bit = 1 << source
            if not bit & self._expected or bit & (self.arrived | came):
                raise ValueError(f"source {source} is not expected (any more)")
            came |= bit
        self.arrived |= came
        return self._hand_out()

    def ran(self, label: int) -> list[int]:
        """A segment that was handed out has been run. Returns the segments that can be run now."""
        if label not in self.handed_out or label in self.run:
            raise ValueError(f"segment {label:b} was not being run")
        self.run.add(label)
        return self._hand_out()

    def _hand_out(self) -> list[int]:
        ready = []
        for label, before in self._after.items():
            if label not in self.handed_out and not label & ~self.arrived and before <= self.run:
                ready.append(label)
        self.handed_out.update(ready)
        return ready

    @property
    def owed(self) -> list[int]:
        """The sources that have not come."""
        missing = self._expected & ~self.arrived
        return [source for source in range(missing.bit_length()) if missing >> source & 1]

    @property
    def done(self) -> bool:
        """True if everything has come and has been run."""
        return self.arrived == self._expected and len(self.run) == len(self._after)

    def check(self) -> None:
        """Assert the promises."""
        for label in self.handed_out:
            assert not label & ~self.arrived, "L1: handed out before its sources came"
            assert self._after[label] <= self.run, "L1: handed out before what comes before it"
        assert self.run <= self.handed_out
        if self.arrived == self._expected and self.run == self.handed_out:
            assert self.done, "L2: a segment is left that no thread will run"

    def __repr__(self) -> str:
        return f"<Ledger owed={self.owed} run={len(self.run)}/{len(self._after)}>"
