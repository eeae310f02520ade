"""The parts of a channel without the rest: an outbox over a link that takes as much as the test says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

from remora.agent.channel.flow_control import FlowControl
from remora.agent.channel.opener import Opener
from remora.agent.channel.outbox import Outbox
from remora.protocol.reader import Reader
from remora.protocol.session import Session
from remora.transport.link import StreamLink
from remora.wire.frames import GUARD, HEADER, HEADER_SIZE

CALL, REPLY = 0x102, 0x203


class FakeLink:
    """A link that notes what was written, or, when it is full, what would have to be kept."""

    now = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.failed = False
        self.full = False
        self.severed = False
        self.unread = False
        self.writes: list[list[Any]] = []
        self.outbox: list[Any] = []

    @property
    def outbox_bytes(self) -> int:
        return sum(map(len, self.outbox))

    def fileno(self) -> int:
        return -1

    def sever(self) -> None:
        self.severed = True

    def write(self, parts: Any, patience: float, until: float) -> bool:
        (self.outbox.extend if self.full else self.writes.append)(list(parts))
        return not self.full

    def kinds(self) -> list[list[int]]:
        """The types of the messages of each write."""
        return [[header[2] for header in headers(b"".join(parts))] for parts in self.writes]

    def headers(self) -> list[tuple[Any, ...]]:
        """Those of all messages."""
        return list(headers(b"".join(part for parts in self.writes for part in parts)))


def headers(data: bytes) -> Iterator[tuple[Any, ...]]:
    while data:
        header = HEADER.unpack_from(data)
        yield header
        data = data[HEADER_SIZE + header[1] // GUARD :]


class FakePool:
    """Notes what it is to do."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []

    def call_soon(self, task: Any) -> None:
        self.tasks.append(task)

    submit_final = submit_system = call_soon


class OutboxAlone(Outbox):
    """An outbox that belongs to no channel. It notes what its owner would be told."""

    def __init__(self) -> None:
        self.wire = FakeLink()
        self.told: list[str] = []
        super().__init__("worker1", Session(), Reader(), FlowControl(cast(Any, self)), self)
        self.link = cast(StreamLink, self.wire)

    def want_link(self) -> None:
        self.told.append("want_link")

    def want_flush(self) -> None:
        self.told.append("want_flush")

    def reconsider_reading(self) -> None:
        self.told.append("reconsider_reading")

    def link_failed(self, link: StreamLink, error: BaseException) -> None:
        self.told.append("link_failed")


def opener() -> Opener:
    """For messages that refer to nothing."""
    return Opener("peer", None, cast(Any, None))
