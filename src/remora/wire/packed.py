"""One packed value: its pickle, and the memory its tensors lie in. Data only; `pickling` makes it, frames carry it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

CARGO = 32  # a flag of frames: the body ends with a manifest of device memory; see `remora.wire.cargo`


class Packed:
    """A value as bytes: `body` is the pickle, `buffers` the raw bytes it refers to, in the order the receiver needs.

    The buffers are the sender's own memory: nothing was copied. What is too small to be worth a buffer is in the body.
    """

    __slots__ = ("body", "buffers", "flags", "keepalive", "lent", "recording", "tensors", "undo", "untracked")

    body: bytes
    buffers: list[memoryview]
    keepalive: list[object]  # owns the memory of `buffers`
    tensors: list[torch.Tensor]  # referenced in place: a change to one of them changes what is sent
    undo: list[Callable[[], None]] | None  # takes back what the reducers did, if this is never sent
    recording: Any  # what the message belongs to, if anything: its reply belongs to the same
    flags: int  # what whoever sends it says of it
    lent: Sequence[bytes]  # references to device memory that goes with it
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

    def __repr__(self) -> str:
        sizes = [buffer.nbytes for buffer in self.buffers]
        return f"Packed(body={len(self.body)} bytes, buffers={sizes}, tensors={len(self.tensors)})"
