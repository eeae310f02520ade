"""Large tensors between workers of one host: through shared memory, if both can. The messages go the usual way.

(Tensors on devices: `remora.agent.handover`.)

A message whose tensors are in shared memory has SHARED among its flags and says at the end of its body where they are. The
receiver gives the memory back, when it is done with it, by a word (GIVE_BACK) that goes along with whatever is sent next.
"""

from __future__ import annotations

import errno
import logging
import struct
from collections.abc import Callable, Iterable

from remora.agent.handover import DEVICE, Handover
from remora.transport import shm
from remora.vocabulary.ids import WorkerKey
from remora.wire.frames import SHARED, Frame
from remora.wire.packed import Packed
from remora.wire.warm import warm

log = logging.getLogger("remora")

SHARED_FROM = 1 << 16  # bytes of tensors in a message; below, the kernel copies them faster than we can arrange this

_LENGTH = struct.Struct("<I")


def credentials() -> dict[str, object]:
    """What others must know of this process to share memory with it."""
    return {"memory": shm.identity()}


def lent_bytes(body: bytes | bytearray | memoryview) -> int:
    """How much memory a message has lent, by its body."""
    start = len(body) - _LENGTH.size - _LENGTH.unpack_from(body, len(body) - _LENGTH.size)[0]
    return shm.size_of(body, start)


class Sharing:
    """What two workers share: the segments we lend one, and those it lends us; and in `handover`, memory of devices."""

    __slots__ = ("_borrower", "_key", "_lender", "_now", "handover", "name", "unused", "willing")

    def __init__(
        self, lender: shm.Lender, key: WorkerKey, name: str, device_memory: int, now: Callable[[], float]
    ) -> None:
        self._lender = lender
        self._key = key
        self._now = now
        self.name = name
        self.willing = False  # the peer can use what we lend
        self._borrower = shm.Borrower()
        self.unused = self._borrower.unused  # what has to be given back
        self.handover = Handover(name, device_memory, self.unused)

    def lend(self, packed: Packed) -> bytes | None:
        """The body of a message whose tensors are in shared memory now; None if they have to go another way."""
        if not self.willing:
            return None
        segment = self._lender.lend(shm.room_for(packed.buffers), self._key)
        if segment is None:
            return None
        try:
            if packed.loading is None:
                reference = segment.fill(packed.buffers)
            else:
                reference = segment.fill(packed.buffers, packed.loading.numbers)
                packed.complete(segment.places(reference, packed.loading.numbers))
        except BaseException:
            self._lender.take_back([segment.number], self._key, self._now())
            raise
        return packed.body + reference + _LENGTH.pack(len(reference))

    def borrow(self, frame: Frame) -> bool:
        """Give a message the memory it refers to. False if that cannot be had."""
        view = memoryview(frame.body)
        end = len(view) - _LENGTH.size
        start = end - _LENGTH.unpack_from(view, end)[0]
        try:
            frame.buffers = self._borrower.take(view[start:end], self._now())
        except (OSError, ValueError) as error:
            frame.buffers = None
            self._borrower.unused.append(shm.number_of(view, start))
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                frame.flags &= ~SHARED  # it is as if it had come over the connection, and there were no room for it
                return True
            log.error("memory that %s shares cannot be used, so it will not share any more: %s", self.name, error)
            return False
        frame.size += sum(storage.nbytes() for storage in frame.buffers)
        frame.body = bytes(view[:start])
        return True

    def returns(self) -> bytes:
        """The same, as the body of a word."""
        numbers = self._borrower.given_back()
        return struct.pack(f"<{len(numbers)}Q", *numbers)

    def take_back(self, body: bytes | bytearray | memoryview) -> None:
        """The peer gives segments back; none at all means that it cannot use any."""
        numbers = struct.unpack(f"<{len(body) // 8}Q", body)
        self.willing = self.willing and bool(numbers)
        self._lender.take_back(numbers, self._key, self._now())
        self.handover.take_back(number for number in numbers if number & DEVICE)

    def trim(self, now: float) -> None:
        """Unmap what has not been used for a while."""
        self._borrower.trim(now)

    def forget(self) -> None:
        """The peer is gone, or we are."""
        self._lender.forget(self._key)
        self._borrower.close()
        self.handover.forget()


class Bulk:
    """The shared memory of one worker."""

    def __init__(self, limit: int, device_memory: int, now: Callable[[], float]) -> None:
        self._now = now
        self.lender = shm.Lender(limit)
        self._device_memory = device_memory
        self._memory = shm.identity() if limit else ""

    def with_peer(self, key: WorkerKey, name: str) -> Sharing:
        """What we share with a peer. We can take what it lends; what it can take is to be learned."""
        return Sharing(self.lender, key, name, self._device_memory, self._now)

    def learn(self, sharing: Sharing, extra: dict[str, object]) -> None:
        """By what a peer says of itself: can it use what we lend?"""
        sharing.willing = bool(self._memory) and extra.get("memory") == self._memory
        sharing.handover.learn(extra.get("devices"))

    def tick(self, now: float, sharing: Iterable[Sharing]) -> None:
        """Return to the system what has not been used for a while."""
        self.lender.trim(now)
        warm.trim()
        for each in sharing:
            each.trim(now)
