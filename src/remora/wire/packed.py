"""One packed value: its pickle, and the memory of its tensors. Data only; `pickler` makes it, frames carry it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from remora.devices.staging import Download
from remora.vocabulary.messages import Flag
from remora.wire.undo import Undo

DEVICE_BUFFERS = int(Flag.DEVICE_BUFFERS)


class Loading(NamedTuple):
    """Data on its way from devices to buffers of a message."""

    download: Download
    numbers: range  # of the buffers


class Packed:
    """A value as bytes: `body` is the pickle, `buffers` the raw bytes it refers to, in the order the receiver needs.

    The buffers are the sender's own memory: nothing was copied. What is too small to be worth a buffer is in the body.
    What comes from devices is copied to the host, and some of it may still be on its way there.
    """

    __slots__ = (
        "body", "buffers", "context", "flags", "keepalive", "lent", "loading", "tensors", "undo", "untracked",
    )  # fmt: skip

    def __init__(
        self,
        body: bytes,
        buffers: list[memoryview],
        keepalive: list[object],
        tensors: list[torch.Tensor],
        untracked: bool = False,
    ) -> None:
        self.body = body
        self.buffers = buffers
        self.keepalive = keepalive  # owns the memory of `buffers`
        self.tensors = tensors  # referenced in place: a change to one of them changes what is sent
        self.untracked = untracked  # some buffer is memory whose changes are not counted (not a tensor's)
        self.undo: Undo | None = None  # undoes what the reducers did, if this is never sent
        self.context: Any = None  # what the message belongs to, if anything: its reply belongs to the same
        self.flags = 0  # of the message, set by its sender
        self.lent: Sequence[bytes] = ()  # references to device memory that goes with it
        self.loading: Loading | None = None  # what is not there yet

    def complete(self, targets: Sequence[torch.Tensor] | None = None) -> None:
        """Wait for the data on its way from devices; copy it into `targets` in the place of the buffers, if given."""
        if self.loading is not None:
            for _ in self.loading.download.pieces(targets):
                pass
            self.loading = None

    def let_go(self) -> None:
        """Drop the references to its memory: all of it was copied."""
        self.buffers.clear()
        self.keepalive.clear()
        self.tensors.clear()

    def pieces(self, head: bytes) -> Iterator[list[bytes | memoryview]]:
        """Yield the message, with `head` before its buffers, in lists of what is there: as it comes from devices."""
        assert self.loading is not None, "something is on its way"
        download, numbers = self.loading
        ready: list[bytes | memoryview] = [head, *self.buffers[: numbers.start]]
        for ranges in download.pieces():
            yield ready + [self.buffers[numbers[index]][place] for index, place in ranges]
            ready = []
        self.loading = None
        ready += self.buffers[numbers.stop :]
        if ready:
            yield ready

    def __repr__(self) -> str:
        sizes = [buffer.nbytes for buffer in self.buffers]
        return f"Packed(body={len(self.body)} bytes, buffers={sizes}, tensors={len(self.tensors)})"
