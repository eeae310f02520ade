"""A device that is not there: its streams are lists of what they were told. And a CPU that passes for a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from remora.devices import registry, streams

PRETENDED = torch.device("cuda:0")
CPU = torch.device("cpu")
PLACE = torch.device("cpu", 0)  # torch takes it for the CPU; to a map it is another device


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.after = stream, len(stream.told)

    def synchronize(self) -> None:
        self.stream.told.append("synchronized")


class Stream:
    device = PRETENDED

    def __init__(self, name: object) -> None:
        self.name = f"another on {name}" if isinstance(name, torch.device) else str(name)
        self.told: list[Any] = []  # the streams it waited for, and what it was given to do

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.told.append(event.stream.name)

    def __repr__(self) -> str:
        return self.name


class Module:
    """What `torch.cuda` would be."""

    Stream = Stream

    def __init__(self) -> None:
        self.current = Stream("default")
        self.index = 0
        self.started = True

    def device_count(self) -> int:
        return 1

    def is_initialized(self) -> bool:
        return self.started

    def current_device(self) -> int:
        return self.index

    def set_device(self, index: int) -> None:
        self.index = index

    def current_stream(self, device: object = None) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """A watched device."""
    made = Module()
    monkeypatch.setattr(registry, "module", lambda kind: made)
    monkeypatch.setattr(streams, "watched", (PRETENDED,))
    return made
