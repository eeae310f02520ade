"""A link in the poller: how the poller is asked. (When: `tests/protocol/test_reader.py`.)"""

from __future__ import annotations

from typing import Any, cast

import pytest

from remora.agent.channel.registration import Registration
from remora.transport.poller import READ, WRITE
from tests.agent.channel.parts import FakeLink


class Asked:
    """In the place of a poller."""

    lasts = True

    def __init__(self) -> None:
        self.events: list[object] = []

    def arm(self, source: object, events: int) -> None:
        self.events.append(events)

    def arm_to_last(self, source: object) -> None:
        self.events.append("to last")


@pytest.fixture
def registration() -> Registration:
    return Registration(cast(Any, FakeLink()), lambda registration, events: None)


def test_to_read_is_asked_for_once_and_for_all(registration: Registration) -> None:
    poller = Asked()
    registration.ask(cast(Any, poller), READ)
    registration.ask(cast(Any, poller), READ | WRITE)
    assert poller.events == ["to last", READ | WRITE]


def test_the_poller_tells_which_link_it_is() -> None:
    told: list[tuple[Registration, int]] = []
    registration = Registration(cast(Any, FakeLink()), lambda registration, events: told.append((registration, events)))
    registration.ready(READ)
    assert told == [(registration, READ)]
