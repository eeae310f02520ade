"""Gives a received message what its body refers to: shared memory, memory on devices, references."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from remora.agent.memory.shared import PeerSharedMemory
from remora.agent.runtime.try_lock import may_be_struck
from remora.errors import ProtocolError
from remora.wire.enclosed import Arrival, Enclosed, Missing, Reason
from remora.wire.frames import DEVICE_BUFFERS, REFERENCES, Body, Frame

log = logging.getLogger("remora")


class Opener:
    """Opens the messages of one channel, in the order of arrival. All of it runs under the turn `Inbox.sorting`."""

    __slots__ = ("_arrived", "_borrowed", "_peer", "_shared_memory")

    def __init__(
        self, peer: str, shared_memory: PeerSharedMemory | None, arrived: Callable[[Body], tuple[Body, Arrival]]
    ) -> None:
        self._peer = peer
        self._shared_memory = shared_memory  # memory that the peer and we share
        self._arrived = arrived  # takes note of the references in a body
        # Keeps the shared memory of the next message from before it is on loan until `kept`: a thread that an exception
        # strikes in between leaves it here, and the next thread goes on with it.
        self._borrowed: dict[int, Any] = {}

    def borrow(self, frame: Frame) -> Frame:
        """Return a message with the shared memory that it refers to. To do it again, before `kept`, does no harm."""
        if self._shared_memory is None:
            return frame.opened(frame.body, frame.size, Enclosed(Missing(Reason.NOT_MAPPED)))
        try:
            return self._shared_memory.borrow(frame, self._borrowed)
        except (ProtocolError, MemoryError):
            raise
        except Exception as error:
            if may_be_struck():
                raise
            return frame.opened(frame.body, frame.size, Enclosed(self._damaged("shared memory", error)))

    def kept(self) -> None:
        """The message that was made by `borrow` is kept: it holds its memory itself."""
        self._borrowed.clear()

    def open(self, frame: Frame) -> Frame:
        """Return a message with its device memory and its references. They are taken note of, which is never done twice for
        one message. Device memory is fetched later, by the thread that unpacks the message."""
        body = frame.body
        buffers, uploads, landing, arrival, late = frame.enclosed
        if frame.flags & DEVICE_BUFFERS and self._shared_memory is not None and not isinstance(buffers, Missing):
            try:
                body, landing = self._shared_memory.device_exchange.land(frame)
            except Exception as error:
                buffers = self._damaged("device memory", error)
        if frame.flags & REFERENCES:
            try:
                body, arrival = self._arrived(body)
            except Exception as error:
                buffers = self._damaged("references", error)
        return frame.opened(body, frame.size, Enclosed(buffers, uploads, landing, arrival, late))

    def _damaged(self, what: str, error: Exception) -> Missing:
        """The message is here, but cannot be unpacked: its call fails, and no other."""
        log.warning("what a message from %s says of its %s cannot be read: %r", self._peer, what, error)
        why = f"what a message from {self._peer} says of its {what} makes no sense: {error!r}"
        return Missing(Reason.DAMAGED, why)
