"""A link in the poller: when the poller is asked again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from remora.agent.channel.registration import UNDECIDED, Registration
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


def ask(registration: Registration, events: int, armed: int) -> list[object]:
    poller = Asked()
    registration.ask(cast(Any, poller), events, armed)
    return poller.events


def test_a_poller_that_watches_for_the_same_is_not_asked(registration: Registration) -> None:
    assert ask(registration, READ, READ) == []


def test_to_read_is_asked_for_once_and_for_all(registration: Registration) -> None:
    assert ask(registration, READ, 0) == ["to last"]
    assert ask(registration, READ | WRITE, 0) == [READ | WRITE]


def test_an_answer_that_was_not_made_use_of_is_asked_for_again_once(registration: Registration) -> None:
    registration.again = True
    assert ask(registration, READ, READ) == ["to last"]
    assert ask(registration, READ, READ) == []


def test_so_is_a_link_that_may_hold_more(registration: Registration) -> None:
    cast(Any, registration.link).unread = True
    assert ask(registration, READ, READ) == ["to last"]


def test_while_a_thread_decides_it_is_undecided(registration: Registration) -> None:
    registration.armed = READ
    assert registration.decide() == READ
    assert registration.armed == UNDECIDED


def test_the_poller_tells_which_link_it_is() -> None:
    told: list[tuple[Registration, int]] = []
    registration = Registration(cast(Any, FakeLink()), lambda registration, events: told.append((registration, events)))
    registration.ready(READ)
    assert told == [(registration, READ)]
