"""The schedule of one worker in one pass: gradients go in, segments that can be run with them come out. Runs nothing.

Most workers have one source in a pass, and what that reaches can be run when it comes (`Whole`). Where several sources
come at different times, the graph is divided among them (`Divided`). The lock of the pass guards its schedule.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch

from remora.autograd.graph import Division, Reach, Segment, grouped
from remora.autograd.ledger import Ledger
from remora.autograd.nodes import Incoming, Start

Ready = list[tuple[int, Segment | Reach, Incoming]]  # segments by label, with the gradients that came into them

_ONLY = 1  # the label of a segment that is alone


class Whole:
    """One source, one segment."""

    __slots__ = ("_reach", "_source", "arrived", "done")

    borrowed: Sequence[torch.Tensor] | None = None

    def __init__(self, source: int, reach: Reach) -> None:
        self._source = source
        self._reach = reach  # what the source reaches
        self.arrived = 0  # how many sources have come
        self.done = False  # everything has come and has been run

    def arrive(self, came: Mapping[int, Incoming]) -> Ready:
        """These sources have come, with these gradients. Returns the segments that can be run now; the caller runs them."""
        if self.arrived or self._source not in came:
            raise ValueError(f"source {self._source} is not expected (any more)")
        self.arrived = 1
        return [(_ONLY, self._reach, came[self._source])]

    def ran(self, label: int, leaving: Incoming) -> Ready:
        """A segment has been run, and these gradients leave it. Returns the segments that can be run now."""
        self.done = True
        return []

    @property
    def owed(self) -> list[int]:
        """The sources that have not come."""
        return [] if self.arrived else [self._source]


class Divided:
    """Any number of sources, and the segments that they make. The methods are those of `Whole`."""

    __slots__ = ("_bits", "_division", "_ledger", "_waiting", "borrowed")

    def __init__(self, sources: Mapping[int, Iterable[Start]], held: Container[int] = ()) -> None:
        self._bits = {source: bit for bit, source in enumerate(sources)}
        self._division = Division(sources.values(), held)
        segments = self._division.segments
        self._ledger = Ledger(len(sources), {label: each.after for label, each in segments.items()})
        self._waiting: dict[int, Incoming] = {}  # gradients that came in, by the label of their segment
        # The leaves whose `.grad` any accumulator may look at: DistributedDataParallel writes to all its parameters when the
        # last one has its gradient.
        self.borrowed: Sequence[torch.Tensor] | None = None
        if grouped():
            self.borrowed = [leaf for segment in segments.values() for leaf in segment.native.values()]

    def arrive(self, came: Mapping[int, Incoming]) -> Ready:
        ready = self._ledger.arrive([self._bits[source] for source in came])
        for source, incoming in came.items():
            self._put(incoming, 1 << self._bits[source])
        return self._handed_out(ready)

    def ran(self, label: int, leaving: Incoming) -> Ready:
        self._put(leaving, label)
        return self._handed_out(self._ledger.ran(label))

    def _put(self, incoming: Incoming, label: int) -> None:
        for start, gradient in incoming:
            self._waiting.setdefault(self._division.label_of(start, label), []).append((start, gradient))

    def _handed_out(self, labels: list[int]) -> Ready:
        segments = self._division.segments
        return [(label, segments[label], self._waiting.pop(label, [])) for label in labels]

    @property
    def arrived(self) -> int:
        return self._ledger.arrived.bit_count()

    @property
    def done(self) -> bool:
        return self._ledger.done

    @property
    def owed(self) -> list[int]:
        sources = list(self._bits)
        return [sources[bit] for bit in self._ledger.owed]
