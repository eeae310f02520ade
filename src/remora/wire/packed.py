"""One packed value: its pickle, and the memory its tensors lie in. Data only; `pickling` makes it, frames carry it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from remora.devices.transit import Download

CARGO = 32  # a flag of frames: the body ends with a manifest of device memory; see `remora.wire.cargo`


class Packed:
    """A value as bytes: `body` is the pickle, `buffers` the raw bytes it refers to, in the order the receiver needs.

    The buffers are the sender's own memory: nothing was copied. What is too small to be worth a buffer is in the body.
    What comes from devices is copied to the host, and some of it may still be on its way there.
    """

    __slots__ = (
        "body", "buffers", "download", "first_loaded", "flags", "keepalive", "lent", "recording", "tensors", "undo",
        "untracked",
    )  # fmt: skip

    body: bytes
    buffers: list[memoryview]
    keepalive: list[object]  # owns the memory of `buffers`
    tensors: list[torch.Tensor]  # referenced in place: a change to one of them changes what is sent
    undo: list[Callable[[], None]] | None  # takes back what the reducers did, if this is never sent
    recording: Any  # what the message belongs to, if anything: its reply belongs to the same
    flags: int  # what whoever sends it says of it
    lent: Sequence[bytes]  # references to device memory that goes with it
    download: Download | None  # what is on its way from devices, to the buffers from number `first_loaded` on
    first_loaded: int
    untracked: bool  # some buffer is memory whose changes nobody counts (not a tensor's)

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
        self.keepalive = keepalive
        self.tensors = tensors
        self.untracked = untracked
        self.undo = None
        self.recording = None
        self.flags = 0
        self.lent = ()
        self.download = None
        self.first_loaded = 0

    def loading(self) -> range:
        """The numbers of the buffers that are on their way from devices."""
        if self.download is None:
            return range(0)
        return range(self.first_loaded, self.first_loaded + len(self.download.memory))

    def complete(self, targets: Sequence[torch.Tensor] | None = None) -> None:
        """Wait for what is on its way from devices; have it put into `targets` in the place of the buffers, if given."""
        if self.download is not None:
            for _ in self.download.pieces(targets):
                pass
            self.download = None

    def pieces(self, head: bytes) -> Iterator[list[bytes | memoryview]]:
        """The message, with this before its buffers, in lists of what is there: as it comes from devices."""
        assert self.download is not None, "something is on its way"
        loading = self.loading()
        ready: list[bytes | memoryview] = [head, *self.buffers[: loading.start]]
        for ranges in self.download.pieces():
            yield ready + [self.buffers[loading[index]][place] for index, place in ranges]
            ready = []
        ready += self.buffers[loading.stop :]
        if ready:
            yield ready

    def __repr__(self) -> str:
        sizes = [buffer.nbytes for buffer in self.buffers]
        return f"Packed(body={len(self.body)} bytes, buffers={sizes}, tensors={len(self.tensors)})"
