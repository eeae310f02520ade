"""A CUDA driver of a few lines, whose devices are the host: streams are lists of work, run when a test says so."""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from remora.transport.cuda_ipc.driver import DriverError

DEVICE = torch.device("cpu")
UUID = b"the only device."

Work = Callable[[], bool]  # False: not yet


class FakeDriver:
    """Both processes in one: what a test exports here it fetches here."""

    def __init__(self) -> None:
        self.current = 0
        self.streams: dict[int, deque[Work]] = defaultdict(deque)
        self.allocations: dict[int, int] = {}  # base -> size
        self.open_count: Counter[int] = Counter()
        self.times_opened = 0
        self.registered: set[int] = set()
        self.refuses = False
        self._kept: list[torch.UntypedStorage] = []  # torch's allocator, too, waits for streams before memory is used again

    def allocate(self, size: int) -> torch.UntypedStorage:
        """What torch's allocator would give."""
        storage = torch.UntypedStorage(size)
        self.allocations[storage.data_ptr()] = size
        self._kept.append(storage)
        return storage

    def run(self, stream: int) -> None:
        """As far as the stream gets."""
        work = self.streams[stream]
        while work and work[0]():
            work.popleft()

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def uuid(self, device: torch.device) -> bytes:
        return UUID

    def find(self, uuid: bytes) -> torch.device | None:
        return DEVICE if uuid == UUID else None

    def stream(self, device: torch.device) -> int:
        return self.current

    def new_storage(self, size: int, device: torch.device) -> torch.UntypedStorage:
        self._kept.append(torch.UntypedStorage(size))
        return self._kept[-1]

    def allocation(self, pointer: int) -> tuple[int, int, int]:
        for base, size in self.allocations.items():
            if base <= pointer < base + size:
                return base, size, base
        raise DriverError("no such memory")

    def handle(self, base: int) -> bytes:
        if self.refuses:
            raise DriverError("expandable")
        return base.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        base = int.from_bytes(handle, "little")
        self.open_count[base] += 1
        self.times_opened += 1
        return base

    def close(self, pointer: int) -> None:
        self.open_count[pointer] -= 1

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        def work() -> bool:
            assert any(self.open_count[base] for base in self.allocations if base <= source < base + self.allocations[base])
            ctypes.memmove(target, source, size)
            return True

        self.streams[stream].append(work)

    def is_idle(self, stream: int) -> bool:
        return not self.streams[stream]

    def register(self, address: int, size: int) -> int:
        self.registered.add(address)
        return address

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def write(self, stream: int, pointer: int, value: int) -> None:
        def work() -> bool:
            _word(pointer).value = value
            return True

        self.streams[stream].append(work)

    def wait(self, stream: int, pointer: int, value: int) -> None:
        self.streams[stream].append(lambda: (_word(pointer).value - value) % 2**32 < 2**31)


def _word(pointer: int) -> Any:
    return ctypes.c_uint32.from_address(pointer)
