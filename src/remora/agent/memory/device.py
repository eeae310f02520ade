"""Lends device memory to one peer where possible, takes it back, and copies what the peer lends. Maps no devices.

Each message takes one of three ways. Within a process the receiver gets the memory itself. Between processes of a host the
receiver gets a reference to the memory and makes one copy (`remora.transport.cuda_ipc`). Everything else goes over the
host, in buffers of the message. Arguments are values: the sender lends a copy, made in the order of its current stream. If
the caller waits for the answer, it lends the memory itself, and its stream waits for the copy of the peer before it goes on.

A process must try to open the memory of another to know that it can. So the first tensors go over the host, together with a
*probe*. When the peer confirms that it opened the probe, memory is lent. The peer confirms, and returns what it never
fetched, among the numbers of shared memory (`remora.agent.memory.shared`); a mark tells the two apart.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remora.devices import copies, streams
from remora.errors import SerializationError
from remora.transport import cuda_ipc
from remora.wire.device_buffers import Landing, Region, split
from remora.wire.frames import SHARED, Frame

log = logging.getLogger("remora")

HERE, THERE = b"h", b"t"  # what a reference begins with: memory of this process, or of another one
DEVICE = 1 << 63  # marks a number of lent device memory
REFUSED = 1 << 62  # … that cannot be opened, and neither can other memory
OPENED = 1 << 61  # … that was a probe, and can be

_NUMBER = struct.Struct("<Q")
_token = secrets.token_hex(8)
_numbers = itertools.count().__next__
# lent within this process, by lender
_here: dict[int, tuple[list[torch.UntypedStorage], streams.StreamPoint | None, object]] = {}


def identity() -> dict[str, object]:
    """Return what other processes must know of this one to exchange device memory with it."""
    return {"process": _process(), "ipc": cuda_ipc.identity()}


def _process() -> str:
    return f"{_token}-{os.getpid()}"  # a forked child has the same token


@dataclass(eq=False, slots=True, repr=False)
class DeviceExchange:
    """The device memory that this worker and one peer lend each other."""

    name: str
    _limit: int  # bytes lent at a time
    _return: Callable[[int], None]  # has a number given back to the peer
    _peer: dict[str, Any] = field(default_factory=dict)  # its identity
    process: int = 0  # its process, as far as known; -1: none that we can see
    _exporter: cuda_ipc.Exporter | None = None
    _importer: cuda_ipc.Importer | None = None
    _state: str = "unknown"  # can it open our memory? then: tried, proven or refused
    _probe: int = -1
    _reasons: dict[torch.device, str] = field(default_factory=dict)  # why memory of a device cannot be lent; empty: it can
    _said: bool = False  # and whether we have said so

    def learn(self, identity: object) -> None:
        """Take the peer's identity, from its record."""
        self._peer = identity if isinstance(identity, dict) else {}
        self._reasons.clear()

    # Sending.

    def lend(self, regions: Sequence[Region], target: torch.device, in_place: bool = False) -> bytes | None:
        """Return a reference to a copy of these regions, which are all on one device; None if they have to go over the host.
        With `in_place` the reference names the memory itself, where another process can copy it; the caller then calls
        `fence` before it goes on."""
        device = regions[0][0].device
        streams.watch((device,))
        if target.type == "cpu":
            return None
        here = self._peer.get("process") == _process()
        if not here and (self._state != "proven" or self._why_not(device)):
            return None
        try:
            return self._lend_here(regions) if here else self._lend_there(regions, in_place)
        except RuntimeError as error:  # there is not enough memory for a copy
            self._explain(device, str(error))
            return None

    def _lend_here(self, regions: Sequence[Region]) -> bytes:
        number = _numbers()
        taken = [copies.snapshot(*region) for region in regions]
        _here[number] = (taken, streams.stream_point(), self)
        return HERE + _NUMBER.pack(number)

    def _lend_there(self, regions: Sequence[Region], in_place: bool) -> bytes | None:
        if not in_place:
            regions = [(copies.snapshot(*region), 0, region[2]) for region in regions]
        reference = self._exporting().export(regions)
        return None if reference is None else THERE + reference

    def lent_bytes(self) -> int:
        """Return the bytes of devices that the peer has of ours."""
        return 0 if self._exporter is None else self._exporter.lent_bytes

    def _exporting(self) -> cuda_ipc.Exporter:
        if self._exporter is None:
            self._exporter = cuda_ipc.Exporter(self._limit)
        return self._exporter

    def probe(self, device: torch.device) -> bytes | None:
        """Return a reference for the peer to try, once; None if it has had one."""
        if self._state != "unknown" or not self._limit or self._peer.get("process") == _process():
            return None
        if self._why_not(device):
            return None
        try:
            piece = torch.zeros(64, dtype=torch.uint8, device=device).untyped_storage()
            reference = self._exporting().export([(piece, 0, 64)])
        except RuntimeError:  # no memory: the next message may have better luck
            return None
        if reference is None:
            return None
        self._state, self._probe = "tried", cuda_ipc.number_of(reference)
        return THERE + reference

    def fence(self, references: Iterable[bytes]) -> None:
        """Make the current stream wait for the peer's copies. The message has been answered, so the peer has begun them, and
        it does not see later changes of the memory."""
        for reference in references:
            if reference[:1] == THERE and self._exporter is not None:
                self._exporter.fence(cuda_ipc.number_of(reference[1:]))

    def retract(self, reference: bytes) -> None:
        """Take back what was lent with a message that is never sent."""
        if reference[:1] == HERE:
            _here.pop(_NUMBER.unpack_from(reference, 1)[0], None)
        elif self._exporter is not None:
            number = cuda_ipc.number_of(reference[1:])
            self._exporter.give_back([number])
            if number == self._probe:
                self._state = "unknown"

    def _why_not(self, device: torch.device) -> str:
        reason = self._reasons.get(device)
        if reason is None:
            reason = self._reasons[device] = cuda_ipc.available(device) or cuda_ipc.reachable(str(self._peer.get("ipc", "")))
        if reason:
            self._explain(device, reason)
        return reason

    def _explain(self, device: torch.device, reason: str) -> None:
        if not self._said:
            self._said = True
            log.info("tensors on %s go to %s over the host: %s", device, self.name, reason)

    # Receiving.

    def land(self, frame: Frame) -> tuple[bytes, Landing]:
        """Return the body of a message without its manifest, and the device memory that it refers to."""
        sizes = 0 if frame.flags & SHARED else len(frame.enclosed.buffers)  # they come behind the manifest
        body, manifest = split(frame.body, sizes)
        return body, Landing(manifest, self, frame.enclosed.uploads)

    def fetch(self, reference: bytes, device: torch.device) -> list[torch.UntypedStorage]:
        streams.watch((device,))
        if reference[:1] == HERE:
            return _taken_over(_NUMBER.unpack_from(reference, 1)[0], device)
        if self._importer is None:
            self._importer = cuda_ipc.Importer(process=self.process)
        try:
            return self._importer.fetch(reference[1:], device)
        except OSError as error:
            self._return(DEVICE | REFUSED | cuda_ipc.number_of(reference[1:]))
            log.warning("cannot open device memory of %s, so its tensors now go over the host: %s", self.name, error)
            raise SerializationError(
                f"could not open the device memory of {self.name} ({error}). Tensors from there now go over the host: retry "
                "the call"
            ) from error
        except BaseException:  # there is not enough memory for a copy, most likely
            self.give_back(reference)
            raise

    def give_back(self, reference: bytes) -> None:
        """Return memory that was never fetched. A destructor calls this: it takes no lock."""
        if reference[:1] == HERE:
            _here.pop(_NUMBER.unpack_from(reference, 1)[0], None)
        else:
            self._return(DEVICE | cuda_ipc.number_of(reference[1:]))

    def try_out(self, reference: bytes, device: torch.device) -> None:
        """Try to open memory of the peer, and tell the peer if it worked."""
        self.fetch(reference, device)
        self._return(DEVICE | OPENED | cuda_ipc.number_of(reference[1:]))

    # Memory that comes back.

    def take_back(self, numbers: Iterable[int]) -> None:
        """Take back what the peer has copied, or cannot open."""
        for marked in numbers:
            number = marked & ~(DEVICE | REFUSED | OPENED)
            if marked & REFUSED:
                self._state = "refused"
                self._said = True
                log.warning("%s cannot open device memory of this worker: tensors go there over the host", self.name)
            elif number == self._probe and self._state == "tried":
                self._state = "proven" if marked & OPENED else "unknown"  # (it was dropped: try again)
            if self._exporter is not None:
                self._exporter.give_back([number])

    def trim(self, now: float) -> None:
        """Free what the peer has copied, and what has not been used for a while."""
        if self._exporter is not None:
            self._exporter.collect()
        if self._importer is not None:
            self._importer.trim(now)

    def forget(self) -> None:
        """Free everything: the peer or this worker is gone."""
        for number in [number for number, lent in list(_here.items()) if lent[2] is self]:
            _here.pop(number, None)
        if self._exporter is not None:
            self._exporter.forget()
        if self._importer is not None:
            self._importer.close()


def tidy(exchanges: Iterable[DeviceExchange], now: float) -> None:
    """Free device memory that is not used any more. May wait for a device."""
    for each in exchanges:
        each.trim(now)
    cuda_ipc.sweep()


def _taken_over(number: int, device: torch.device) -> list[torch.UntypedStorage]:
    """Return memory that was lent within this process: the same memory, or a copy on another device."""
    storages, point, _ = _here.pop(number)
    if point is not None:
        point.join([copies.span(each, 0, each.nbytes()) for each in storages])
    return [each if each.device == device else copies.to_device(each, device) for each in storages]
