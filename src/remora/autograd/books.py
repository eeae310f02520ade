"""What one worker has to run in one pass: gradients go in, and what can be run with them comes out. Runs nothing.

Most workers have one source in a pass, and what that reaches can be run when it comes (`Whole`). Where several sources
come at different times, the graph is divided among them (`Divided`). The pass guards its book with its lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge

from remora.autograd.graph import Reach, Segment, divide
from remora.autograd.ledger import Ledger
from remora.autograd.nodes import Incoming

Ready = list[tuple[int, Segment | Reach, Incoming]]  # segments by label, with the gradients that came into them

_ONLY = 1  # the label of a segment that is alone


class Whole:
    """One source, one segment."""

    __slots__ = ("_reach", "_source", "arrived", "done")

    leaves: Sequence[torch.Tensor] | None = None

    def __init__(self, source: int, reach: Reach) -> None:
        self._source = source
        self._reach = reach  # what the source reaches
        self.arrived = 0  # how many sources have come
        self.done = False  # everything has come and has been run

    def arrive(self, sources: Iterable[int], incoming: Incoming) -> Ready:
        """These sources have come, with these gradients. What can be run now, for whoever asks to run."""
        if self.arrived:
            raise ValueError(f"source {self._source} is not expected (any more)")
        self.arrived = 1
        return [(_ONLY, self._reach, incoming)]

    def ran(self, label: int, leaving: Incoming) -> Ready:
        """A segment has been run, and these gradients leave it. What can be run now."""
        self.done = True
        return []

    @property
    def owed(self) -> list[int]:
        """The sources that have not come."""
        return [] if self.arrived else [self._source]


class Divided:
    """Any number of sources, and the segments that they make. The methods are those of `Whole`."""

    __slots__ = ("_bits", "_labels", "_ledger", "_segments", "_waiting", "leaves")

    def __init__(self, sources: Mapping[int, Iterable[GradientEdge]]) -> None:
        self._bits = {source: bit for bit, source in enumerate(sources)}
        self._segments, self._labels = divide(sources.values())
        self._ledger = Ledger(len(sources), {label: each.after for label, each in self._segments.items()})
        self._waiting: dict[int, Incoming] = {}  # gradients that came in, by the label of their segment
        # What any run may touch: DistributedDataParallel writes to all its parameters when the last has its gradient.
        self.leaves: Sequence[torch.Tensor] | None = None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.leaves = [leaf for segment in self._segments.values() for leaf in segment.leaves]

    def arrive(self, sources: Iterable[int], incoming: Incoming) -> Ready:
        self._put(incoming)
        return self._handed_out(self._ledger.arrive([self._bits[source] for source in sources]))

    def ran(self, label: int, leaving: Incoming) -> Ready:
        self._put(leaving)
        return self._handed_out(self._ledger.ran(label))

    def _put(self, incoming: Incoming) -> None:
        for edge, gradient in incoming:
            self._waiting.setdefault(self._labels[edge.node], []).append((edge, gradient))

    def _handed_out(self, labels: list[int]) -> Ready:
        return [(label, self._segments[label], self._waiting.pop(label, [])) for label in labels]

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
