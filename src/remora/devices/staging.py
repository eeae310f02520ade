"""Copies between devices and the host piece by piece, so that pieces are sent while more is copied. Does no I/O.

A device copies by itself, if the memory on the host is pinned. So what is sent is written to a connection while the device
still copies the rest of it (`Download`), and what is received is copied to the device while the rest is still to come
(`Upload`). Both use streams of their own: a copy that waited behind the work of other threads would delay every message on
the same connection.

Pinned memory is scarce. It is torch's, which keeps it for the next time; of a large message only some pieces are pinned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from remora.devices import copies, registry, streams
from remora.errors import SerializationError

PINNED_UP_TO = 1 << 28  # what is sent in a larger message is pinned piece by piece, and copied once more
AHEAD = 4  # pieces that the device may be busy with at a time, then

Range = tuple[int, slice]  # bytes of one of several parts


class _Piece(NamedTuple):
    ranges: list[Range]
    chunks: list[torch.Tensor]  # where they are copied to
    done: Any  # an event; None if they are there


def begin(device: torch.device, stream: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Start the copy of each second tensor to the first. Return the event of its end; None if it has ended."""
    with streams.on(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        return streams.mark(device)


class Download:
    """Parts of device memory on their way to the host: `memory`, where each is when its pieces are there.

    What is done to the parts on the current stream from now on does not show, and the first piece is there: what the
    others wait for is nothing but the device's copying.
    """

    __slots__ = ("_aside", "_parts", "_pinned", "_plan", "_under_way", "memory")

    def __init__(
        self, parts: Sequence[torch.Tensor], pageable: Callable[[int], torch.Tensor] = copies.pageable
    ) -> None:
        nbytes = sum(part.nbytes for part in parts)
        self._parts = parts
        self._pinned = nbytes <= PINNED_UP_TO
        self._plan = _pieces(parts)
        self._under_way: deque[_Piece] = deque()
        with plainly():
            make = copies.pinned if self._pinned else pageable
            self.memory = [make(part.nbytes) for part in parts]
            beside = nbytes > copies.CHUNK  # else there is nothing to wait for in the midst of it
            self._aside = {
                device: streams.aside(device) if beside else None for device in {part.device for part in parts}
            }
            self._go_on()
            if self._pinned and beside:
                # The current streams wait for the copies. (The caller waits for those that are not under way yet.)
                last = {parts[piece.ranges[0][0]].device: piece.done for piece in self._under_way}
                for device, done in last.items():
                    streams.follow(device, done)
            if self._under_way:
                _await(self._under_way[0].done)

    def _go_on(self) -> None:
        """Start the copies of more pieces."""
        while (self._pinned or len(self._under_way) < AHEAD) and (ranges := next(self._plan, None)):
            sources = [self._parts[index][piece] for index, piece in ranges]
            if self._pinned:
                chunks = [self.memory[index][piece] for index, piece in ranges]
            else:
                chunks = [copies.pinned(source.nbytes) for source in sources]
            device = sources[0].device
            done = begin(device, self._aside[device], list(zip(chunks, sources, strict=True)))
            self._under_way.append(_Piece(ranges, chunks, done))

    @property
    def small(self) -> bool:
        """Return True if there is not enough of it to send some while the rest is copied."""
        return sum(part.nbytes for part in self._parts) <= copies.CHUNK

    def pieces(self, targets: Sequence[torch.Tensor] | None = None) -> Iterator[list[Range]]:
        """Wait for one piece after the other, in order; yield its bytes of `memory`, or of `targets` in its place."""
        while self._under_way:
            try:
                with plainly():
                    ranges = self._take(self._under_way[0], targets or self.memory)
                    self._under_way.popleft()
                    self._go_on()
            except Exception as error:
                devices = " and ".join(sorted(str(device) for device in self._aside))
                raise SerializationError(f"tensors could not be copied from {devices} to the host: {error}") from error
            yield ranges

    def _take(self, piece: _Piece, memory: Sequence[torch.Tensor]) -> list[Range]:
        _await(piece.done)
        if memory is not self.memory or not self._pinned:
            for (index, place), chunk in zip(piece.ranges, piece.chunks, strict=True):
                memory[index][place].copy_(chunk)
        return piece.ranges


class Upload:
    """Memory on a device that is filled as its bytes come in: into `space`, then `filled`, until there is no more space."""

    __slots__ = ("_at", "_chunk", "_done", "_failure", "_stream", "_under_way", "_whole", "device")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._stream = streams.for_arrivals(device)
        with plainly(), streams.on(self._stream):
            self._whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._at = 0
        self._chunk: torch.Tensor | None = None
        self._under_way: deque[Any] = deque()
        self._done: Any = None
        self._failure: Exception | None = None

    def space(self) -> torch.Tensor | None:
        """Return memory of the host for the bytes that come next; None if all have come."""
        size = min(copies.CHUNK, self._whole.nbytes - self._at)
        if not size:
            return None
        if self._failure is None or self._chunk is None or self._chunk.nbytes != size:
            with plainly():
                self._chunk = copies.pinned(size)
        return self._chunk

    def filled(self) -> None:
        """Copy the full space to the device. `storage` raises an error of the device; the reader of the link goes on."""
        chunk = self._chunk
        assert chunk is not None, "there was space"
        place = slice(self._at, self._at + chunk.nbytes)
        self._at = place.stop
        if self._failure is None:
            try:
                self._start(place, chunk)
            except Exception as error:
                self._failure = error
        if self._at == self._whole.nbytes:
            self._chunk = None
            self._under_way.clear()

    def _start(self, place: slice, chunk: torch.Tensor) -> None:
        with plainly():
            self._done = begin(self.device, self._stream, [(self._whole[place], chunk)])
        self._under_way.append(self._done)
        if len(self._under_way) > AHEAD:
            _await(self._under_way.popleft())

    def storage(self) -> torch.UntypedStorage:
        """Return the memory, ready on the current stream."""
        if self._failure is not None:
            reason = f"received tensors could not be copied to {self.device}: {self._failure}"
            raise SerializationError(reason) from self._failure
        streams.hand_over(self._whole, self._done)
        return self._whole.untyped_storage()


def upload(nbytes: int, device: torch.device) -> Upload | None:
    """Return an `Upload` that copies what arrives to a device as it comes. None if all is to be received first: it is small,
    or stays on the host, or the device is not in use yet, or has no room (the receiver gets that error when it unpacks)."""
    if nbytes < copies.CHUNK // 8 or not worthwhile(device):
        return None
    try:
        return Upload(nbytes, device)
    except Exception:
        return None


def worthwhile(device: torch.device) -> bool:
    """Return True if the device has memory of its own and is started: to start a device takes seconds, in which no thread
    would read the link."""
    return device.type not in registry.UNNUMBERED and registry.started(device.type)


def _pieces(parts: Sequence[torch.Tensor]) -> Iterator[list[Range]]:
    """Yield all bytes of all parts in order, a chunk at a time: small parts together, if they are on one device."""
    ranges: list[Range] = []
    room = copies.CHUNK
    for index, part in enumerate(parts):
        if ranges and part.device != parts[ranges[0][0]].device:
            yield ranges
            ranges, room = [], copies.CHUNK
        start = 0
        while start < part.nbytes:
            stop = min(start + room, part.nbytes)
            ranges.append((index, slice(start, stop)))
            room -= stop - start
            start = stop
            if not room:
                yield ranges
                ranges, room = [], copies.CHUNK
    if ranges:
        yield ranges


def _await(done: Any) -> None:
    if done is not None:
        done.synchronize()


@contextmanager
def plainly() -> Iterator[None]:
    """Leave the modes of the thread, which may be the program's: the copies are of bytes."""
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        yield
