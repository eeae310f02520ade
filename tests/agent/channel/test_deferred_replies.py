"""Replies that a waiting thread met: which thread completes each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from remora.agent.channel import deferred_replies
from remora.agent.channel.deferred_replies import DeferredReplies
from remora.agent.channel.inbox import Inbox
from remora.agent.channel.pending_calls import PendingCalls
from tests.agent.channel.parts import FakePool, OutboxAlone, opener


class FakeCall:
    """A call that is answered."""

    def __init__(self, number: int, quiet: bool = True, empty: bool = False, notified: bool = False) -> None:
        self.id = number
        self.quiet = quiet
        self.has_nothing = empty
        self.notified = notified


class Here:
    """Deferred replies, and which thread completed what: this one, or the pool."""

    def __init__(self) -> None:
        self.outbox, self.pool = OutboxAlone(), FakePool()
        handlers: Any = (cast(Any, None), cast(Any, None), cast(Any, None))
        self.inbox = Inbox(self.outbox, PendingCalls(self.outbox.reader), opener(), cast(Any, self.pool), *handlers)
        self.deferred = DeferredReplies(self.inbox)
        self.mine: list[int] = []
        self.left: list[int] = []

    def share_out(self, answered: list[Any], waited_for: list[Any]) -> None:
        self.inbox.answered.extend(answered)
        self.deferred.share_out(waited_for)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    here = Here()
    monkeypatch.setattr(deferred_replies, "settle", lambda call: here.mine.append(call.id))
    monkeypatch.setattr(deferred_replies, "have_settled", lambda pool, calls: here.left.extend(call.id for call in calls))
    yield here
    assert not here.inbox.answered


def test_a_thread_completes_its_own_and_the_pool_the_others(here: Here) -> None:
    own, other = FakeCall(1), FakeCall(2)
    here.share_out([other, own], [own])
    assert (here.mine, here.left) == ([1], [2])


def test_what_has_nothing_to_unpickle_is_completed_at_once(here: Here) -> None:
    here.share_out([FakeCall(1, empty=True)], [])
    assert here.mine == [1]


def test_while_waiters_own_the_channel_others_are_deferred_for_the_threads_that_come_for_them(here: Here) -> None:
    here.outbox.reader.waiter_owned = True
    calls: list[Any] = [FakeCall(1), FakeCall(2)]
    here.share_out(calls, [])
    assert (here.mine, here.left, list(here.outbox.reader.deferred)) == ([], [], [1, 2])
    here.deferred.come_for(calls[:1])
    assert (here.mine, list(here.outbox.reader.deferred)) == ([1], [2])


@pytest.mark.parametrize("call", [FakeCall(1, notified=True), FakeCall(1, quiet=False)])
def test_but_not_those_that_run_code_of_the_program_or_that_a_thread_wants_to_hear_of(here: Here, call: Any) -> None:
    here.outbox.reader.waiter_owned = True
    here.share_out([call], [])
    assert here.left == [1]


def test_nor_any_while_a_thread_is_parked(here: Here) -> None:
    here.outbox.reader.waiter_owned = True
    here.deferred.parked.add(cast(Any, object()))
    here.share_out([FakeCall(1)], [])
    assert here.left == [1]


def test_what_no_thread_comes_for_goes_to_the_pool_after_two_looks(here: Here) -> None:
    here.outbox.reader.waiter_owned = True
    here.share_out([FakeCall(1)], [])
    here.deferred.pass_on()
    assert here.left == []
    here.deferred.pass_on()
    assert here.left == [1]


def test_a_thread_that_is_struck_leaves_what_it_met_to_the_pool(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(calls: Any) -> None:
        if calls:
            raise KeyboardInterrupt

    monkeypatch.setattr(deferred_replies, "settle", strike)
    own: Any = FakeCall(1)
    with pytest.raises(KeyboardInterrupt):
        here.share_out([own], [own])
    assert here.left == [1]
