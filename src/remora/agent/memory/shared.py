"""Passes large tensors between workers of one host through shared memory, if both can. Messages take the usual way.

(Tensors on devices: `remora.agent.memory.device`.)

A message whose tensors are in shared memory has SHARED among its flags and says at the end of its body where they are.
The receiver returns the memory, when it is done with it, in the next message of this kind that it sends itself, or in a
control frame (GIVE_BACK) that shares the next write. """

from __future__ import annotations

import errno
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

from remora.agent.memory.device import DEVICE, DeviceExchange
from remora.agent.memory.late_fill import LateMemory, LateMessages
from remora.agent.runtime.try_lock import may_be_struck
from remora.transport.shm.arena import LATER, Placement
from remora.transport.shm.borrower import Borrower, Loan
from remora.transport.shm.lender import PAUSE, Lender
from remora.transport.shm.loan_reference import SHORT, UNUSABLE, bytes_in, loans_in
from remora.transport.shm.sealed_memory import identity
from remora.vocabulary.ids import WorkerKey
from remora.wire.buffer_pool import spare_buffers
from remora.wire.enclosed import Enclosed, Missing, Reason
from remora.wire.frames import Frame
from remora.wire.message_codec import read_numbers, write_numbers
from remora.wire.packed import Packed

log = logging.getLogger("remora")

SHARED_FROM = 1 << 16  # bytes of tensors in a message; below, the kernel copies them faster than we can arrange this

ATTEMPTS = 100  # to copy something, if we are interrupted each time
GRACE = 0.5  # seconds after which a copy that was to be made later is made by another thread

_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}  # it passes

_TAIL = struct.Struct("<II")  # bytes before it: of the reference; and of what is given back, behind that


def credentials() -> dict[str, object]:
    """Return what other processes must know of this one to share memory with it."""
    return {"memory": identity()}


def lent_bytes(body: bytes | bytearray | memoryview) -> int:
    """Return the number of bytes that a message of ours has lent, by its body."""
    end = len(body) - _TAIL.size
    reference, returned = _TAIL.unpack_from(body, end)
    return bytes_in(body, end - returned - reference)


def _parted(body: memoryview) -> tuple[memoryview, memoryview, memoryview]:
    """Split the body of a message with shared memory: the pickle, the reference to the memory, and the returned segments.
    ValueError if it has no such parts."""
    end = len(body) - _TAIL.size
    reference, returned = _TAIL.unpack_from(body, end) if end >= 0 else (0, 0)
    if end < 0 or reference + returned > end or returned % 8:
        raise ValueError("a message with shared memory has no reference to it")
    start = end - returned - reference
    return body[:start], body[start : end - returned], body[end - returned : end]


class Lent(NamedTuple):
    """A message whose tensors are in shared memory."""

    body: bytes
    fill: Callable[[], None] | None  # copies the tensors after the message was sent, if that is still to be done
    placement: Placement
    returned: list[Loan | int]  # what it gives back


@dataclass(eq=False, slots=True, repr=False)
class PeerSharedMemory:
    """The memory that this worker and one peer share: segments that either lends, and device memory (`device_exchange`)."""

    _lender: Lender
    _key: WorkerKey
    name: str
    device_memory: InitVar[int]
    now: Callable[[], float]
    _messages: LateMessages  # those that came before their memory was filled
    ended: bool = False  # the peer is gone, or we are
    refused: bool = False  # it lent something that cannot be used, and was told so
    willing: bool = False  # the peer can use what we lend,
    _again_at: float = 0.0  # but not before this time
    _late: dict[int, Copying] = field(default_factory=dict)  # what is still to be copied for messages that are sent first
    _borrower: Borrower = field(default_factory=Borrower)
    unused: deque[Loan | int] = field(init=False)  # what has to be given back
    device_exchange: DeviceExchange = field(init=False)

    def __post_init__(self, device_memory: int) -> None:
        self.unused = self._borrower.unused
        self.device_exchange = DeviceExchange(self.name, device_memory, self.unused.append)

    def lend(self, packed: Packed) -> Lent | None:
        """Put the tensors of a message into shared memory. None if they have to go another way. A caller that does not send
        the message retracts it."""
        now = self.now()
        if not self.willing or now < self._again_at:
            return None
        placement = self._lender.lend(packed.buffers, self._key, now)
        if placement is None:
            return None
        returned: list[Loan | int] = []
        try:
            return self._lent(placement, packed, now, returned)
        except BaseException:  # a device failed, or Ctrl-C: the message is not sent
            self._retract(placement, returned)
            raise

    def _lent(self, placement: Placement, packed: Packed, now: float, returned: list[Loan | int]) -> Lent:
        fill: Callable[[], None] | None = None
        if packed.loading is None and placement.bytes <= LATER:
            placement.fill_later()
            fill = self._late[id(placement)] = Copying(self, placement, packed, now)
        else:
            if packed.loading is None:
                placement.fill(packed.buffers)
            else:  # some of the tensors come from devices, which can fail
                numbers = packed.loading.numbers
                placement.fill(packed.buffers, numbers)
                packed.complete(placement.memory(numbers))
            self._lender.filled(placement, self.now())
            packed.let_go()  # which may be all that kept what the peer lent us: so it goes back with this very message
        reference, returns = placement.refer(), b""
        if self.unused:
            returned += self.unused
            returns = write_numbers(self._borrower.ended(returned))
            self._borrower.note_returned(returned)
        body = packed.body + reference + returns + _TAIL.pack(len(reference), len(returns))
        return Lent(body, fill, placement, returned)

    def retract(self, lent: Lent) -> None:
        """Take back the memory of a message that is not sent, and keep what it was to give back."""
        self._retract(lent.placement, lent.returned)

    def _retract(self, placement: Placement, returned: list[Loan | int]) -> None:
        self.unused.extend(returned)
        placement.returned.extend(number for number, _ in placement.loans)
        if id(placement) not in self._late:  # else the thread that makes the copy ends the loans then
            self._lender.retract(placement, self.now())

    def copied(self, copying: Copying) -> None:
        self._late.pop(id(copying.placement), None)
        self._lender.filled(copying.placement, self.now())

    def set_process(self, process: int) -> None:
        """Set the id of the peer's process, as the kernel tells it: memory of no other process is accepted. -1: the process
        cannot be seen from here."""
        self._borrower.process = self.device_exchange.process = process

    def learn_process(self, process: object) -> None:
        """Set the same from the peer's record, where the kernel does not tell it (TCP)."""
        if not self._borrower.process and isinstance(process, int) and process > 0:
            self.set_process(process)

    def borrow(self, frame: Frame, borrowed: dict[int, Any]) -> Frame:
        """Return a message with the memory it refers to; its size counts the bytes lent. If the memory cannot be mapped, its
        buffers are `Missing`. A thread that an exception interrupts here leaves what it has borrowed in `borrowed`, and
        another thread can repeat it with that."""
        reference = memoryview(b"")
        try:
            rest, reference, returned = _parted(memoryview(frame.body))
            if returned:
                self._take_back(returned)
            storages, filling = self._borrower.take(reference, self.now(), borrowed)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is None and may_be_struck():
                raise  # a signal handler's TimeoutError: another thread does it again
            self.unused.extend(loans_in(reference))
            if isinstance(error, OSError) and error.errno in _SHORTAGE:
                missing = Missing(Reason.NO_MEMORY)  # it is as if it had come over the connection
                self.unused.append(SHORT)
                log.warning("no descriptors or memory to map the shared memory of %s: %s", self.name, str(error))
            else:
                missing = Missing(Reason.NOT_MAPPED)
                self.refuse(str(error))
            return frame.opened(frame.body, frame.size, Enclosed(missing))
        late = None if filling is None else LateMemory(filling, self, self._messages)
        size = frame.size + sum(storage.nbytes() for storage in storages)
        return frame.opened(bytes(rest), size, Enclosed(storages, late=late))

    def refuse(self, why: str) -> None:
        """Tell the peer that its memory cannot be used, so that it sends its tensors over the connection from now on."""
        self.unused.append(UNUSABLE)
        if not self.refused:
            self.refused = True
            log.error("cannot use the shared memory of %s, so its tensors now go over the connection: %s", self.name, why)

    def lent_bytes(self) -> int:
        """Return the number of bytes of our memory that the peer has."""
        return self._lender.lent_to(self._key)

    def borrowed_bytes(self) -> int:
        """Return the number of bytes of the peer's memory that tensors here use."""
        return self._borrower.borrowed_bytes()

    def give_back(self, send: Callable[[bytes], None]) -> None:
        """Have the segments that are not used any more sent to their lender, as the body of a control frame."""
        unused = list(self.unused)
        if unused:  # else they have just gone with another message
            send(write_numbers(self._borrower.ended(unused)))
            self._borrower.note_returned(unused)

    def take_back(self, body: bytes | bytearray | memoryview) -> None:
        try:
            self._take_back(body)
        except ValueError as error:
            raise ValueError(f"a GIVE_BACK from {self.name} makes no sense: {error}") from None

    def _take_back(self, body: bytes | bytearray | memoryview) -> None:
        numbers = read_numbers(body)
        if SHORT in numbers:
            self._again_at = self.now() + PAUSE
        if UNUSABLE in numbers:
            self.willing = False
        self._lender.take_back(numbers, self._key, self.now())
        on_devices = [number for number in numbers if number & DEVICE]
        if on_devices:
            self.device_exchange.take_back(on_devices)

    def trim(self, now: float) -> None:
        """Unmap what has not been used for a while. Make the copies that a sender did not make (an exception in a signal
        handler interrupted it), because the peer waits for them."""
        self._borrower.trim(now)
        for copying in list(self._late.values()):
            if now - copying.since > GRACE:
                copying()

    def forget(self) -> None:
        """Free everything: the peer or this worker is gone."""
        self.ended = True
        self._lender.forget(self._key)
        self._borrower.close()
        self._late.clear()
        self.device_exchange.forget()


@dataclass(eq=False, slots=True)
class Copying:
    """Copies the tensors of a message to shared memory after the message was sent, in any case: the peer waits for them. It
    copies once, because the peer may change them afterwards. The first thread to begin does it, and repeats it if it is
    interrupted. If the sender never begins, the tick does (`PeerSharedMemory.trim`)."""

    _shared_memory: PeerSharedMemory
    placement: Placement
    _packed: Packed
    since: float
    _thread: dict[str, int] = field(default_factory=dict)  # the thread that copies; `setdefault` decides

    def __call__(self) -> None:
        placement, me = self.placement, threading.get_ident()
        interruption: BaseException | None = None
        for _ in range(ATTEMPTS):
            try:
                if self._thread.setdefault("", me) != me or not placement.filling:
                    break
                if not placement.told:
                    placement.fill(self._packed.buffers)
                    placement.tell()
                self._shared_memory.copied(self)
            except BaseException as error:  # Ctrl-C, and the like
                interruption = error
        if interruption is not None:
            raise interruption


class SharedMemory:
    """The shared memory of one worker."""

    def __init__(
        self, limit: int, device_memory: int, now: Callable[[], float], serve: Callable[[Callable[[], None]], None]
    ) -> None:
        self._now = now
        self._messages = LateMessages(serve)
        self.lender = Lender(limit)
        self._device_memory = device_memory
        self._memory = identity() if limit else ""

    def with_peer(self, key: WorkerKey, name: str) -> PeerSharedMemory:
        """Return the memory shared with a peer. This worker can borrow at once; `learn` says if the peer can, too."""
        return PeerSharedMemory(self.lender, key, name, self._device_memory, self._now, self._messages)

    def learn(self, with_peer: PeerSharedMemory, extra: dict[str, object]) -> None:
        """Read from a peer's record if it can use what this worker lends."""
        with_peer.willing = bool(self._memory) and extra.get("memory") == self._memory
        with_peer.device_exchange.learn(extra.get("devices"))
        with_peer.learn_process(extra.get("pid"))

    def counters(self, with_peers: Iterable[PeerSharedMemory]) -> dict[str, int | float]:
        """Return the bytes of memory that this worker has for large messages, beside the program's own objects."""
        return {
            "agent.shared_memory_bytes": self.lender.counts()[0],  # ours: lent, or kept for the next messages
            "agent.shared_memory_lent_bytes": self.lender.lent_bytes(),  # the part of it that others have
            "agent.shared_memory_borrowed_bytes": sum(each.borrowed_bytes() for each in with_peers),  # in use here
            "agent.warm_memory_bytes": spare_buffers.kept_bytes,  # of the process, and private: kept for the next messages
        }

    def tick(self, now: float, with_peers: Iterable[PeerSharedMemory]) -> None:
        """Return to the system what has not been used for a while."""
        self.lender.trim(now)
        spare_buffers.trim()
        for each in with_peers:
            each.trim(now)
