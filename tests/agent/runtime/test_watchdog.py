"""Followers look after the leader: how often, what they find, and what they do about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from remora.agent.runtime.watchdog import Watchdog
from remora.protocol.leader import (
    ANSWERING,
    HELP,
    IDLE,
    NONE,
    OPEN,
    READING,
    RUNNING,
    SHUT,
    WAITING,
    Alarm,
    Effects,
    Leadership,
    Thresholds,
)  # fmt: skip
from remora.transport.gate import AT_ONCE
from tests.agent.runtime.conftest import HOUR, Peer, Start
from tests.eventually import eventually

USUAL = Thresholds()
ME = 7


def leading(limits: Thresholds = USUAL, now: float = 0.0) -> Leadership:
    """A leader with events in its hands, and the alarm set."""
    state = Leadership(limits)
    state.take_over(ME, NONE, now)
    state.idle(ME)
    state.busy(ME, now)
    state.alarm_due(now)
    return state


def look(state: Leadership, now: float, queued: bool = False) -> Effects:
    return state.decide(now, state.rang(), queued)


# What is found at a look.


def test_a_leader_with_one_task_for_long_has_the_gate_opened_at_the_second_look() -> None:
    state = leading()
    state.begin_task(0.0, 0)
    assert look(state, 0.0011) == (Alarm(USUAL.look_every),)
    assert look(state, 0.0021) == (OPEN, HELP)
    assert state.open
    assert not state.alarm_set


def test_not_if_it_has_begun_another_task() -> None:
    state = leading()
    state.begin_task(0.0, 0)
    look(state, 0.0011)
    state.begin_task(0.0012, 0)
    assert OPEN not in look(state, 0.0023)
    assert OPEN in look(state, 0.0033)


def test_a_leader_that_reads_is_given_more_time() -> None:
    state = leading()
    for ms in range(2, 50, 8):
        assert look(state, ms / 1000) == (Alarm(USUAL.relaxed * USUAL.look_every),)
    assert look(state, USUAL.long + USUAL.reading + 0.0001) == (OPEN, HELP)


def test_a_leader_that_answers_is_given_some_more() -> None:
    state = leading()
    state.begin_task(0.0, 0)
    state.answer(0.0)
    assert OPEN not in look(state, 0.003)
    assert OPEN not in look(state, 0.0045, queued=True)
    assert OPEN not in look(state, 0.0055)
    assert OPEN in look(state, 0.0065)


def test_a_leader_that_is_behind_is_helped_at_the_third_look() -> None:
    state = leading()
    found = []
    for ms in range(1, 5):
        state.begin_task(ms / 1000 - 0.0005, 0)  # a few, and none of them takes long
        found.append(OPEN in look(state, ms / 1000, queued=True))
    assert found == [False, False, True, True]
    assert state.open_until == 0.004 + USUAL.relief


def test_in_a_row() -> None:
    state = leading()
    for ms in range(1, 10):
        state.begin_task(ms / 1000 - 0.0005, 0)
        assert OPEN not in look(state, ms / 1000, queued=ms % 3 > 0)


def test_an_idle_leader_is_left_alone_and_no_alarm_is_set() -> None:
    state = leading()
    state.idle(ME)
    assert look(state, 5.0, queued=True) == ()
    state.call_helper()
    assert look(state, 5.0) == (HELP,), "but a follower that was called comes"
    assert not state.alarm_set


def test_a_leader_that_came_back_while_the_gate_was_opened_has_it_shut() -> None:
    state = leading()
    state.begin_task(0.0, 0)
    look(state, 0.0011)
    state.idle(ME)
    state.doing = RUNNING  # the follower decides before the leader says so
    assert look(state, 0.0021) == (OPEN, HELP)
    state.idle(ME)
    assert state.opened(0.0022) == (SHUT,)
    assert not state.open


@pytest.mark.parametrize(
    ("behind", "doing", "busy", "helps"),
    [
        (True, RUNNING, 0.5, True), (True, RUNNING, 0.0, False), (True, ANSWERING, 0.5, False), (False, RUNNING, 0.5, False),
        (False, WAITING, 0.0, True), (True, IDLE, 0.5, False), (False, READING, 60.0, True),
    ],
)  # fmt: skip
def test_what_a_follower_takes_and_what_it_leaves_to_the_leader(
    behind: bool, doing: object, busy: float, helps: bool
) -> None:
    state = leading(Thresholds(long=50.0), now=100.0)
    state.doing = doing  # type: ignore[assignment]
    state.open_until = 200.0 if behind else 0.0
    assert state.may_help(100.0 + busy) is helps


def test_the_gate_stays_open_for_a_while_after_help_and_not_after_a_wait() -> None:
    state = leading()
    state.begin_task(0.0, 0)
    assert state.block() == (OPEN,)
    assert state.may_help(0.0005)
    state.idle(ME)
    assert state.shut_due(0.0006) == (SHUT,)
    state.busy(ME, 0.001)
    state.begin_task(0.001, 0)
    state.open = True
    assert state.may_help(0.003)
    state.idle(ME)
    assert state.shut_due(0.004) == ()
    assert state.shut_due(0.0031 + USUAL.relief) == (SHUT,)


def test_a_destructor_that_waits_on_an_idle_leader_calls_for_help() -> None:
    state = leading()
    state.idle(ME)
    assert state.block() == (OPEN, HELP)
    assert state.doing is WAITING
    assert state.called


# How often a follower looks.


def test_a_leader_that_is_well_is_looked_after_less_and_less() -> None:
    state = leading()
    paces = []
    for ms in range(1, 8):
        state.begin_task(ms / 1000, 0)
        (alarm,) = look(state, ms / 1000)
        assert isinstance(alarm, Alarm)
        paces.append(round(alarm.seconds / USUAL.look_every))
    assert paces == [2, 4, 8, 8, 8, 8, 8]


def test_but_not_for_a_while_after_it_was_found_stuck() -> None:
    state = leading()
    state.begin_task(0.0, 0)
    look(state, 0.002)
    look(state, 0.003)
    state.begin_task(0.01, 0)
    assert look(state, 0.0105) == (Alarm(USUAL.look_every),)
    state.begin_task(0.2, 0)
    assert look(state, 0.2005) == (Alarm(2 * USUAL.look_every),)


def test_a_leader_that_does_many_short_things_puts_the_alarm_off() -> None:
    state = leading()
    effects: list[Effects] = [state.begin_task(us / 1e6, 0) for us in range(0, 1000, 30)]
    assert [each for each in effects if each] == [(Alarm(USUAL.relaxed * USUAL.look_every),)]


def test_a_leader_that_does_few_things_does_not() -> None:
    state = leading()
    assert [state.begin_task(us / 1e6, 0) for us in range(300, 1000, 300)] == [()] * 3


def test_an_alarm_that_puts_off_a_call_for_help_is_taken_back() -> None:
    poller = ContextRegistry()
    state = leading()
    watchdog = Watchdog(state, cast(Any, poller), lambda: 0)
    watchdog.request_helper()
    watchdog.apply((Alarm(0.008),))
    assert poller.alarms == [AT_ONCE, 0.008, AT_ONCE]
    assert state.rang()
    watchdog.apply((Alarm(0.008),))
    assert poller.alarms[3:] == [0.008]


class ContextRegistry:
    """A poller and its gate."""

    def __init__(self) -> None:
        self.gate = self
        self.alarms: list[float] = []

    def alarm(self, seconds: float) -> None:
        self.alarms.append(seconds)


def test_a_leader_that_finds_tasks_queued_behind_one_that_was_not_short_is_looked_after_soon() -> None:
    state = leading()
    state.pace = USUAL.relaxed
    state.begin_task(0.0, 1)
    assert state.begin_task(0.0002, 1) == (Alarm(USUAL.look_every),)
    assert state.begin_task(0.0004, 1) == (), "that is set"
    assert state.begin_task(0.0020, 1) == (HELP,), "the last one took long"


# With real threads.


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Peer], list[float]]:
    """When a follower looked after the leader."""

    def count(peer: Peer) -> list[float]:
        found: list[float] = []
        look = peer.pool.leader.watchdog.look
        monkeypatch.setattr(peer.pool.leader.watchdog, "look", lambda: (found.append(time.monotonic()), look())[1])
        return found

    return count


def for_a_while(seconds: float, work: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()


class Times:
    """When short things were done. A follower looks only if the leader did fewer than it should, in the second half of
    `look_every`: the system did not run it."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def note(self, _: object = None) -> None:
        self._times.append(time.monotonic())

    def unexcused(self, looks: list[float]) -> list[int]:
        """How many things were done before each look at a leader that did many."""
        done = [sum(look - 0.05 < each < look for each in self._times) for look in looks]
        return [number for number in done if number > 2 * USUAL.few_steps]


Looks = Callable[[Peer], list[float]]


def test_calls_one_after_the_other_are_not_disturbed(start: Start, looks: Looks) -> None:
    peer = start(look_every=0.1)
    for_a_while(0.2, peer.call)  # there may be an alarm from before
    found, times = looks(peer), Times()
    for_a_while(0.6, lambda: times.note(peer.call()))
    assert not times.unexcused(found)


def test_nor_is_a_long_list_of_short_tasks(start: Start, looks: Looks) -> None:
    peer = start(look_every=0.1)
    for_a_while(0.2, peer.call)
    begun, ended, times = time.monotonic(), 0.0, Times()

    def short() -> None:
        nonlocal ended
        times.note()
        ended = time.monotonic()
        if ended < begun + 0.6:
            peer.pool.user_tasks.append(short)  # the leader does not come back in between

    peer.work[1] = short
    found = looks(peer)
    peer.call(1)
    eventually(lambda: ended > begun + 0.6)
    assert not times.unexcused(found)


def test_a_leader_that_gets_stuck_after_that_is_found_out(start: Start) -> None:
    peer = start(look_every=0.1)
    for_a_while(0.3, peer.call)
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.work[2] = released.set
    peer.ask(1)
    peer.ask(2)
    assert peer.answers(2) == b"\1\2"
    assert peer.ran_by[-2] != peer.ran_by[-1]


def test_long_tasks_that_pile_up_are_run_by_several(start: Start) -> None:
    peer = start(look_every=0.1, long=0.05)
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.02)
    peer.ask(*[1] * 40)
    peer.answers(40)
    assert len(set(peer.ran_by)) > 1


def test_and_so_they_are_if_they_have_not_been_read(start: Start) -> None:
    """Two callers, each of which waits for its answer: there is never anything queued."""
    peer = start(look_every=0.1, long=HOUR)  # it is never found stuck: it is helped since it is behind
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.02)
    other = Peer(peer.pool, peer.poller)
    other.work = peer.work

    def helped() -> bool:
        return len(set(peer.ran_by + other.ran_by)) > 1

    def call_on(by: Peer) -> None:
        end = time.monotonic() + 10.0
        while not helped() and time.monotonic() < end:
            by.call(1)

    caller = threading.Thread(target=call_on, args=(other,))
    caller.start()
    call_on(peer)
    caller.join()
    other.close()
    assert helped()


def test_a_leader_that_is_about_to_answer_is_left_to_it(start: Start) -> None:
    """It has lost its processor, most likely: another thread would have to wait for one, too."""
    peer = start(long_answer=HOUR)
    lead = peer.leader()

    def answer() -> None:
        peer.pool.nearly_done()
        threading.Event().wait(0.05)

    peer.work[1] = answer
    peer.ask(1)
    eventually(lambda: len(peer.ran_by) == 2)
    peer.ask(0)
    assert peer.answers(2) == b"\0\1"
    assert set(peer.ran_by) == {lead}


def test_taking_in_what_came_is_left_to_the_leader(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: it does not block, and a helper would only fight with it for the interpreter."""
    peer = start(reading=HOUR)
    peer.leader()
    read, decide = peer.ready, Leadership.decide
    found: list[Effects] = []  # by followers that looked while it read

    def read_slowly(events: int) -> None:
        read(events)
        seen = len(found)
        eventually(lambda: len(found) > seen + 1)

    def decide_and_note(state: Leadership, now: float, called: bool, queued: bool) -> Effects:
        reads = state.doing is READING
        effects = decide(state, now, called, queued)
        if reads and state.doing is READING and not called:
            found.append(effects)
        return effects

    monkeypatch.setattr(peer, "ready", read_slowly)
    monkeypatch.setattr(Leadership, "decide", decide_and_note)
    for _ in range(5):
        peer.ask(*[0] * 50)
        peer.answers(50)
    assert not any(OPEN in effects or HELP in effects for effects in found)


def test_but_not_for_ever(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = start(reading=0.01)
    peer.leader()
    other = Peer(peer.pool, peer.poller)
    begun, stuck = threading.Event(), threading.Event()
    monkeypatch.setattr(other, "ready", lambda events: (begun.set(), stuck.wait(10.0)))
    other.ask(0)
    assert begun.wait(10.0)
    try:
        for _ in range(3):
            peer.call()
    finally:
        stuck.set()
        other.close()


def test_an_idle_worker_sets_no_alarm(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = start(long=HOUR, long_answer=HOUR)  # no thread helps the leader: that sets alarms too
    peer.leader()
    alarms: list[float] = []
    gate = peer.poller.gate
    assert gate is not None
    set_alarm = gate.alarm
    monkeypatch.setattr(gate, "alarm", lambda seconds: (alarms.append(seconds), set_alarm(seconds)))
    eventually(lambda: not peer.state.alarm_set and rests(alarms))  # one that was set before it was idle may ring
    assert rests(alarms)


def rests(alarms: list[float]) -> bool:
    before = len(alarms)
    threading.Event().wait(0.05)
    return len(alarms) == before
