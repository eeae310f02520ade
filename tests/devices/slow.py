"""A device whose copies to the host are done when the test says so, or go wrong. The CPU passes for it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from remora.devices import copies, staging, streams
from remora.wire.frames import FrameReader
from remora.wire.tensors.storages import Outgoing

CHUNK = 1 << 20
PATIENCE = 20.0  # seconds until a test fails that waits in vain


class Copy:
    """Some bytes on their way to the host: an event that is waited for."""

    def __init__(self, device: SlowDevice, number: int, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._device, self._number, self._pairs = device, number, pairs

    def synchronize(self) -> None:
        self._device.await_turn(self._number)
        if self._number == self._device.fails_at:
            raise RuntimeError("the device is gone")
        for target, source in self._pairs:
            target.copy_(source)
        self._pairs = []


class SlowDevice:
    """`allowed` copies are done when somebody waits for them; the rest when there are more."""

    def __init__(self) -> None:
        self.allowed = 1
        self.begun = 0
        self.finished = 0
        self.fails_at = -1
        self.uploads_fail = False
        self.uploaded = 0  # pieces that were copied to it
        self.received = 0  # bytes that came in at any worker
        self.pinned: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most_pinned = 0  # bytes at a time
        self._changed = threading.Condition()

    def begin(self, device: torch.device, stream: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Copy | None:
        if stream is not None:
            self.begun += 1
            return Copy(self, self.begun - 1, pairs)
        if self.uploads_fail and pairs[0][0].nbytes == CHUNK:
            raise RuntimeError("the device is gone")
        for target, source in pairs:
            target.copy_(source)
        with self._changed:
            self.uploaded += 1
            self._changed.notify_all()
        return None

    def allow(self, more: int) -> None:
        with self._changed:
            self.allowed += more
            self._changed.notify_all()

    def await_turn(self, number: int) -> None:
        self.until(lambda: self.allowed > number)
        self.finished = max(self.finished, number + 1)

    def took(self, n: int) -> None:
        with self._changed:
            self.received += n
            self._changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), vars(self)

    def pin(self, nbytes: int) -> torch.Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8)
        self.pinned.add(made)
        self.most_pinned = max(self.most_pinned, sum(each.nbytes for each in list(self.pinned)))
        return made

    def nothing_is_pinned(self) -> bool:
        """Wait until all pinned memory was let go."""
        end = time.monotonic() + PATIENCE
        while len(self.pinned) and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
        return not len(self.pinned)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDevice]:
    """All large tensors are on a slow device, and arrive on one."""
    made = SlowDevice()
    received = FrameReader.received

    def note(reader: FrameReader, n: int) -> Any:
        found = received(reader, n)
        made.took(n)
        return found

    monkeypatch.setattr(Outgoing, "place", Outgoing.load)
    monkeypatch.setattr(copies, "CHUNK", CHUNK)
    monkeypatch.setattr(copies, "pinned", made.pin)
    monkeypatch.setattr(streams, "aside", lambda device: "another stream")
    monkeypatch.setattr(streams, "follow", lambda device, event: None)
    monkeypatch.setattr(staging, "worthwhile", lambda device: True)
    monkeypatch.setattr(staging, "begin", made.begin)
    monkeypatch.setattr(FrameReader, "received", note)
    yield made
    made.allow(1 << 30)
