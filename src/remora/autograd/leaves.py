"""The gradients of leaves are added up in a context, and `.grad` is the program's.

The engine gives us the gradient of a leaf right before the leaf's accumulator would add it to `.grad` (`segments.py`), and
it is added here instead, by torch's rules: a first gradient is taken over rather than copied if nothing else has its memory,
a later one is added in place, and sparse and dense ones mix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch

from remora.devices import streams

_STRIDED = torch.strided
_storage_holders: Callable[[int], int] = torch._C._storage_Use_Count

# By the id of a leaf, the leaf and its gradient. Not by the leaf itself, which torch hashes in Python; and while the leaf is
# in there, nothing else has its id.
ByLeaf = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


class Gathered(dict[int, tuple[torch.Tensor, torch.Tensor]]):
    """The gradients of a context (see `ByLeaf`)."""

    __slots__ = ("_locks", "_order", "_touched")

    def __init__(self) -> None:
        super().__init__()
        # Several threads run parts of a pass at once, and a sum is read, changed and written. Without a lock two of them
        # that bring the first gradients of a leaf would lose one. One for each leaf: to add a large gradient takes long,
        # and other threads add to other leaves meanwhile. They are reentrant: the collector may run a destructor of the
        # program while one is held, and a thread must not wait for itself. A thread holds one of them at a time.
        self._locks: dict[int, threading.RLock] = {}  # by the id of the leaf, like the sums
        self._order = threading.RLock()  # guards: the order of streams that add; taken before the lock of a leaf
        self._touched: dict[object, streams.StreamPoint] = {}  # when the sums are there, on devices: by the streams that add

    def add(self, leaves: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
        """Add a gradient to the sum of each leaf. Both lists are empty afterwards: a gradient that the caller still had
        could not be taken over, and would not be freed before all are added. One for several leaves is copied for each."""
        seen: set[int] = set()
        shared = [each for each in gradients if id(each) in seen or seen.add(id(each))]  # type: ignore[func-returns-value]
        with self._order if streams.watched else nullcontext():
            if streams.watched:
                self._join([gradient for _, gradient in self.values()])
            while leaves:
                leaf, gradient = leaves.pop(), gradients.pop()
                if gradient is None:
                    continue
                with self._locks.setdefault(id(leaf), threading.RLock()):
                    known = self.get(id(leaf))
                    if known is not None:
                        self._add_to(leaf, known[1], gradient)
                        continue
                    # What the engine gives us is often a view of something that nothing else has: that goes with the view.
                    gradient = gradient.detach()
                    self[id(leaf)] = leaf, gradient if _may_be_taken(gradient, leaf) else _copy(gradient, leaf)
            if streams.watched:
                self.touch()
        del shared  # until here, so that none of those was taken

    def _add_to(self, leaf: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor) -> None:
        if total.shape != gradient.shape:  # or torch would broadcast one of them, if it can
            raise RuntimeError(
                f"a gradient of shape {list(gradient.shape)} cannot be added to that of shape {list(total.shape)} which the "
                f"context has: the leaf has changed its shape. Use another context."
            )
        with torch.no_grad():
            if total.layout is not torch.strided and gradient.layout is torch.strided:
                self[id(leaf)] = leaf, _copy(gradient, leaf).add_(total)  # a sparse sum cannot become dense in place
            else:
                total.add_(gradient)

    def touch(self) -> None:
        """This thread has had sums computed."""
        point = streams.stream_point() if streams.watched else None
        if point is not None:
            self._touched[point.key] = point

    def ready(self) -> ByLeaf:
        """The gradients, ready to be used on the current streams."""
        gradients = self.copy()
        if self._touched:
            self._join([gradient for _, gradient in gradients.values()])
        return gradients

    def _join(self, gradients: list[torch.Tensor]) -> None:
        for point in list(self._touched.values()):
            point.join(gradients)


def _may_be_taken(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """True if a gradient can be the sum itself: nothing else has its memory, which later gradients are added to, and it is
    laid out like the leaf."""
    layout = gradient.layout
    if layout is _STRIDED and leaf.layout is _STRIDED:
        strides = gradient.stride()
        if not (strides == leaf.stride() and gradient.is_contiguous()) and strides != torch.empty_like(leaf).stride():
            return False
        return _holders(gradient) == _ALONE
    # The parts of a sparse one may be used elsewhere, too: torch never adds to the memory of a sparse sum.
    return layout is torch.sparse_coo and gradient._indices().is_contiguous() and gradient._values().is_contiguous()


def _holders(tensor: torch.Tensor) -> int:
    """The number of tensors and storage objects that have this memory; one of them is made to ask."""
    return _storage_holders(tensor.untyped_storage()._cdata)


_ALONE = _holders(torch.empty(1))


def _copy(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """A copy that is laid out like the leaf if that is dense, else in rows."""
    with torch.no_grad():
        if gradient.layout is not torch.strided or leaf.layout is not torch.strided or gradient.shape != leaf.shape:
            return gradient.clone()
        copy = torch.empty_like(leaf, dtype=gradient.dtype, device=gradient.device)
        if copy.stride() != leaf.stride():
            return gradient.clone(memory_format=torch.contiguous_format)
        return copy.copy_(gradient)
