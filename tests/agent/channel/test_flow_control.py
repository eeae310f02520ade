"""Which requests may begin: room for answers, and how many asynchronous functions are under way. See
`agent/channel/flow_control.py`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.channel.flow_control import OUTBOX_LIMIT, UNANSWERED_LIMIT, VANGUARD, WINDOW, FlowControl
from tests.agent.alone import wait_until

FULL = OUTBOX_LIMIT + 1


class FakeChannel:
    """A channel whose peer reads when the test says so."""

    def __init__(self) -> None:
        self.closed = False
        self.unsent = 0
        self.pings = 0
        self.looks = 0
        self.flow_control = FlowControl(self)

    def unsent_bytes(self) -> int:
        return self.unsent

    def ask_to_read(self) -> None:
        self.pings += 1

    def reconsider_reading(self) -> None:
        self.looks += 1


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel()


# Room for answers.


def test_with_room_nobody_waits(channel: FakeChannel) -> None:
    assert channel.flow_control.room_for(pytest.fail)
    assert not channel.flow_control.parked


def test_without_room_requests_wait_until_half_of_it_is_written(channel: FakeChannel) -> None:
    resumed: list[int] = []
    channel.unsent = FULL
    assert not channel.flow_control.room_for(partial(resumed.append, 1))
    channel.unsent = OUTBOX_LIMIT // 2 + 1
    channel.flow_control.go_on()
    assert not resumed
    channel.unsent = OUTBOX_LIMIT // 2
    channel.flow_control.go_on()
    assert resumed == [1]


def test_those_who_waited_for_room_come_a_few_at_a_time_and_all_in_the_end(channel: FakeChannel) -> None:
    waiting, begun = [], []

    def request(i: int) -> None:
        if channel.flow_control.room_for(partial(waiting.append, i)):
            begun.append(i)

    channel.unsent = FULL
    for i in range(100):
        request(i)
    channel.unsent = 0
    channel.flow_control.go_on()
    assert waiting == list(range(VANGUARD))
    while waiting:
        request(waiting.pop(0))
        assert len(waiting) <= VANGUARD
    assert begun == list(range(100))
    assert not channel.flow_control.parked


def test_a_closed_channel_holds_nobody_up(channel: FakeChannel) -> None:
    resumed: list[int] = []
    channel.unsent = FULL
    channel.flow_control.room_for(partial(resumed.append, 1))
    for i in range(WINDOW + 2):
        channel.flow_control.admit(partial(resumed.append, i))
    channel.closed = True
    channel.flow_control.go_on()
    assert resumed == [1, WINDOW, WINDOW + 1]
    assert channel.flow_control.room_for(pytest.fail)


# Asynchronous functions.


class Begun:
    """Asynchronous functions that were let begin."""

    def __init__(self, channel: FakeChannel, n: int) -> None:
        self.flow_control = channel.flow_control
        self.count = sum(self.flow_control.admit(self.one_more) for _ in range(n))

    def one_more(self) -> None:
        self.count += 1

    def end(self, n: int) -> None:
        for _ in range(n):
            self.flow_control.ended()


def test_a_few_begin_at_once_and_the_rest_as_they_end(channel: FakeChannel) -> None:
    begun = Begun(channel, WINDOW + 10)
    assert begun.count == WINDOW
    begun.end(3)
    assert begun.count == WINDOW + 3
    begun.end(WINDOW)
    assert begun.count == WINDOW + 10


def test_more_begin_when_the_caller_reads_and_none_ends(channel: FakeChannel) -> None:
    n = 1000 * WINDOW
    begun = Begun(channel, n)
    for round_trip in range(1, 11):
        assert channel.pings == round_trip
        channel.flow_control.answered()
        assert begun.count == min(WINDOW << round_trip, n)
    assert channel.pings == 10, "nothing waits, nothing is asked"


def test_no_more_begin_when_the_caller_does_not_read(channel: FakeChannel) -> None:
    begun = Begun(channel, 1000)
    channel.flow_control.go_on()
    assert (begun.count, channel.pings) == (WINDOW, 1)


def test_no_more_begin_while_some_end(channel: FakeChannel) -> None:
    """They do not wait for each other, so there is no need; and their answers take memory."""
    begun = Begun(channel, 1000)
    for _ in range(5):
        begun.end(1)
        channel.flow_control.answered()
    assert begun.count == WINDOW + 5


def test_no_more_begin_while_there_is_no_room(channel: FakeChannel) -> None:
    begun = Begun(channel, 1000)
    channel.unsent = FULL
    channel.flow_control.answered()
    begun.end(10)
    assert begun.count == WINDOW
    channel.unsent = 0
    channel.flow_control.go_on()
    assert begun.count == WINDOW + 10


def test_a_ping_that_was_lost_with_its_link_is_said_again(channel: FakeChannel) -> None:
    begun = Begun(channel, 2 * WINDOW)
    channel.flow_control.connected_again()
    assert channel.pings == 2
    channel.flow_control.answered()
    assert begun.count == 2 * WINDOW


def test_the_window_is_small_again_when_all_have_ended(channel: FakeChannel) -> None:
    begun = Begun(channel, 4 * WINDOW)
    channel.flow_control.answered()
    channel.flow_control.answered()
    begun.end(4 * WINDOW)
    assert Begun(channel, 2 * WINDOW).count == WINDOW


# Unanswered requests.


def test_nothing_is_read_while_too_many_requests_are_unanswered(channel: FakeChannel) -> None:
    flow_control = channel.flow_control
    flow_control.took(UNANSWERED_LIMIT)
    assert not flow_control.paused
    flow_control.took(1)
    assert (flow_control.paused, channel.looks) == (True, 1)
    flow_control.done()
    assert (flow_control.paused, channel.looks) == (False, 2)


# On a worker: functions that wait for each other.

_meeting = threading.Lock()
_there: list[Any] = []


@pytest.fixture(autouse=True)
def nobody_there() -> Iterator[None]:
    yield
    _there.clear()


@rpc.functions.async_execution
def meet(n: int) -> torch.futures.Future[int]:
    """A future that is done when `n` are there."""
    future: torch.futures.Future[int] = torch.futures.Future()
    with _meeting:
        _there.append(future)
        complete = list(_there) if len(_there) == n else []
    for each in complete:
        each.set_result(n)
    return future


async def meet_in_coroutine(n: int) -> int:
    arrived = asyncio.get_running_loop().create_future()
    _there.append(arrived)
    if len(_there) == n:
        for each in _there:
            each.set_result(n)
    return int(await arrived)


@pytest.mark.parametrize("function", [meet, meet_in_coroutine])
@pytest.mark.parametrize("n", [WINDOW + 1, 3000])
def test_functions_that_wait_for_each_other_all_begin(narrow: str, function: Any, n: int) -> None:
    futures = [rpc.rpc_async(narrow, function, args=(n,), timeout=20) for _ in range(n)]
    assert torch.futures.wait_all(futures) == [n] * n
    incoming = rpc._get_current_rpc_agent().agent.peers.me.incoming
    assert incoming is not None
    assert not incoming.flow_control.held


def test_what_was_held_back_and_cancelled_never_begins(narrow: str) -> None:
    rpc.rpc_sync(narrow, abs, args=(1,))
    agent = rpc._get_current_rpc_agent().agent
    channel = agent.peers.me.outgoing
    with channel.reading:  # nobody reads the answers
        futures = [rpc.rpc_async(narrow, meet_in_coroutine, args=(-1,)) for _ in range(2 * WINDOW)]
        wait_until(lambda: len(_there) == WINDOW and agent.dispatch.counts() == 2 * WINDOW)
        assert all(future.cancel() for future in reversed(futures))  # first those that have not begun
        wait_until(lambda: agent.dispatch.counts() == 0)
    channel.watch()
    assert len(_there) == WINDOW


def test_what_is_given_up_while_it_is_being_called_is_cancelled(narrow: str) -> None:
    future = rpc.rpc_async(narrow, begin_when_cancelled, args=(narrow,))
    wait_until(lambda: _there)
    assert future.cancel()
    agent = rpc._get_current_rpc_agent().agent
    wait_until(lambda: agent.dispatch.counts() == 0)
    assert _there[0].cancelled


def begin_when_cancelled(me: str) -> Any:
    """Returns a coroutine that never ends, after the caller has given it up."""
    agent = rpc._get_current_rpc_agent().agent
    (request,) = agent.dispatch.serving.values()
    _there.append(request)
    wait_until(lambda: request.cancelled)
    return asyncio.sleep(1000)
