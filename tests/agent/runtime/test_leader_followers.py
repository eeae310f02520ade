"""One thread leads, the others follow, and nothing waits for a leader that is busy for long."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

import remora.agent
from remora.agent.runtime import leader_followers as runtime
from remora.agent.runtime.current import blocking_region
from remora.agent.runtime.leader_followers import LeaderFollowers
from remora.protocol.leader import (
    HELP,
    IDLE,
    NONE,
    OPEN,
    RUNNING,
    SHUT,
    WAITING,
    Alarm,
    Effect,
    Effects,
    Leadership,
    Thresholds,
)
from remora.transport.gate import AT_ONCE
from remora.transport.poller import EpollPoller, Event, Seen, SelectPoller
from tests.agent.runtime.conftest import HOUR, Peer, Start, thresholds
from tests.eventually import eventually

USUAL = Thresholds()

# Who runs what.


def test_one_thread_runs_everything_and_one_follows(start: Start, patient: dict[str, float]) -> None:
    peer = start(**patient)
    other = Peer(peer.pool, peer.poller)
    try:
        for _ in range(200):
            peer.ask(0)  # comes while the leader is busy with the next one, or the other way round
            other.call()
            peer.answers(1)
    finally:
        other.close()
    assert set(peer.ran_by + other.ran_by) == {peer.state.thread}
    eventually(lambda: peer.pool.counts()[:2] == (2, 2))


def test_a_function_that_blocks_does_not_hold_up_the_next(start: Start) -> None:
    peer = start()
    peer.leader()
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.work[2] = released.set
    peer.ask(1)
    peer.ask(2)
    assert peer.answers(2) == b"\1\2"
    assert peer.ran_by[-2] != peer.ran_by[-1]


def test_functions_that_wait_for_each_other_all_run(start: Start) -> None:
    peer = start()
    meeting = threading.Barrier(8)
    peer.work[1] = lambda: meeting.wait(10.0)
    peer.ask(*[1] * 8)
    assert peer.answers(8) == b"\1" * 8
    assert not meeting.broken


def test_a_leader_that_took_long_calls_for_help_with_the_rest(start: Start) -> None:
    peer = start(look_every=HOUR)
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.02)
    peer.ask(*[1] * 6)
    peer.answers(6)
    assert len(set(peer.ran_by)) > 1


# A leader that waits for something remote.


def test_a_leader_that_waits_hands_over_at_once(start: Start, patient: dict[str, float]) -> None:
    peer = start(**patient)
    lead = peer.leader()
    released = threading.Event()

    def wait() -> None:
        with blocking_region():
            assert released.wait(10.0)

    peer.work[1], peer.work[2] = wait, released.set
    peer.ask(1)
    peer.ask(2)
    assert peer.answers(2) == b"\1\2"
    assert peer.ran_by[-2] == lead != peer.ran_by[-1]


def test_a_leader_that_comes_back_leads_again(start: Start, patient: dict[str, float]) -> None:
    peer = start(**patient)
    lead = peer.leader()

    def wait() -> None:
        with blocking_region():
            pass

    peer.work[1] = wait
    for _ in range(20):
        peer.call(1)
        eventually(lambda: peer.state.doing is IDLE)
        peer.call(0)
    assert set(peer.ran_by) == {lead}


def test_a_leader_that_waits_in_a_service_hands_over_at_once(start: Start, patient: dict[str, float]) -> None:
    peer = start(**patient)
    peer.leader()
    released = threading.Event()

    def wait() -> None:
        with blocking_region():
            assert released.wait(10.0)

    peer.work[2] = released.set
    peer.pool.submit_system(wait)
    eventually(lambda: peer.state.doing is WAITING)
    peer.call(2)


def test_a_leader_that_stays_away_is_replaced(start: Start) -> None:
    peer = start()
    lead = peer.leader()
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.ask(1)

    def replaced() -> bool:
        peer.call()
        return peer.state.thread != lead

    eventually(replaced)
    second = peer.state.thread
    released.set()
    peer.answers(1)
    eventually(lambda: peer.pool.counts()[2] == 0 and peer.state.doing is IDLE)
    del peer.ran_by[:]
    for _ in range(20):
        peer.call()
    assert second in peer.ran_by
    assert peer.state.thread == second


def test_a_leader_that_waits_at_the_poller_is_not_replaced() -> None:
    """It would come back with events, and two threads would say what the leader does."""
    state = Leadership(USUAL)
    assert state.take_over(1, NONE, 0.0) is not None
    assert state.idle(1)
    assert state.take_over(2, 1, 0.0) is None
    state.busy(1, 0.0)
    assert state.take_over(2, 1, 0.0) is not None
    assert not state.idle(1)
    assert (state.thread, state.doing) == (2, RUNNING)


def leading_thread(peer: Peer) -> threading.Thread | None:
    """Not by its number, which another thread may have when it has ended."""
    return next((thread for thread in threading.enumerate() if thread.ident == peer.state.thread), None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_leader_that_fails_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = start()
    peer.leader()
    first = leading_thread(peer)
    fired = peer.poller.fired

    def fail(seen: Seen) -> list[Event]:
        monkeypatch.setattr(peer.poller, "fired", fired)
        fired(seen)
        raise RuntimeError("this is a test: the leader fails")

    monkeypatch.setattr(peer.poller, "fired", fail)
    peer.poller.wake()
    eventually(lambda: leading_thread(peer) not in (first, None))
    for _ in range(3):
        peer.call()
    assert set(peer.ran_by[1:]) == {peer.state.thread}


def test_a_thread_that_replaces_a_leader_is_looked_after_too(start: Start) -> None:
    """Each of these blocks, and there is never more than one to do."""
    peer = start()
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    for number in range(USUAL.helped + 6):
        peer.ask(1)
        eventually(lambda number=number: len(peer.ran_by) == number + 1)  # type: ignore[misc]
    released.set()
    peer.answers(USUAL.helped + 6)


# Threads that helped.


def test_a_helper_ends_after_a_while(start: Start) -> None:
    """And with it what libraries keep for each thread that computed something."""
    peer = start(term=0.01)
    lead = peer.leader()
    meeting = threading.Barrier(4)
    peer.work[1] = lambda: meeting.wait(10.0)
    peer.ask(*[1] * 4)
    peer.answers(4)
    helpers = set(peer.ran_by) - {lead}
    assert len(helpers) == 3
    eventually(lambda: not helpers & {thread.ident for thread in threading.enumerate()})
    eventually(lambda: peer.pool.counts()[:2] == (2, 2))


def test_only_a_few_helpers_are_kept(start: Start) -> None:
    peer = start(term=HOUR)
    meeting = threading.Barrier(12)
    peer.work[1] = lambda: meeting.wait(10.0)
    peer.ask(*[1] * 12)
    peer.answers(12)
    eventually(lambda: peer.pool.counts()[0] <= USUAL.spare + 1)
    peer.call()


# Spinning.


class Glances:
    """A poller to which something comes when its user has yielded the processor three times."""

    gate = None

    def __init__(self) -> None:
        self.yielded = 0

    def make_way(self) -> None:
        self.yielded += 1

    def glance(self) -> Seen:
        return [(1, 1)] if self.yielded >= 3 else []

    def wait(self) -> list[Event]:
        return []

    def fired(self, seen: Seen) -> list[Event]:
        return cast(Any, seen)


def spinning(poller: Glances, now: list[float]) -> tuple[LeaderFollowers, list[Event] | None]:
    """What a leader with a long streak gets, if the clock shows these."""
    times = iter(now)
    group = LeaderFollowers(
        cast(Any, poller), lambda: None, lambda: 0, Thresholds(spin=0.005), lambda: next(times, now[-1])
    )
    group.add_idle()
    group.state.thread, group.state.alarm_set = threading.get_ident(), True
    group.state.streak = USUAL.streak
    return group, group.events()


def test_a_leader_that_spins_yields_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    poller = Glances()
    monkeypatch.setattr(runtime, "make_way", poller.make_way)
    _, events = spinning(poller, [0.0, 0.001])
    assert events == [(1, 1)]
    assert poller.yielded == 3, "what comes is seen at once"
    poller.yielded = -1000
    _, events = spinning(poller, [0.0, 0.0, 0.001, 0.006])
    assert events == [], "the time is over"


@pytest.mark.parametrize("comes", [True, False])
def test_a_leader_that_lost_its_processor_does_not_spin_for_a_while(comes: bool) -> None:
    poller = Glances()
    poller.yielded = 3 if comes else 0
    group, events = spinning(poller, [0.0, 0.01, 0.02, 0.03])
    assert bool(events) is comes
    assert group.state.streak == -USUAL.rests


def test_a_leader_spins_while_it_pays_and_then_sleeps(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = start(spin=0.05)
    looks: list[int] = []
    glance = peer.poller.glance
    peer.poller.glance = lambda: (looks.append(1), glance())[1]  # type: ignore[method-assign,assignment]

    def brisk() -> bool:
        peer.call()
        return peer.state.streak >= USUAL.streak

    eventually(brisk)
    eventually(lambda: looks)
    eventually(lambda: peer.state.doing is IDLE and not peer.state.alarm_set)
    eventually(lambda: stays(looks, 0.1))


def stays(looks: list[int], seconds: float) -> bool:
    before = len(looks)
    threading.Event().wait(seconds)
    return len(looks) == before


# Our own work.


def test_system_tasks_run_while_the_leader_is_stuck(start: Start) -> None:
    peer = start()
    released, served = threading.Event(), threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.ask(1)
    eventually(lambda: peer.pool.counts()[2] == 1)
    peer.pool.submit_system(served.set)
    assert served.wait(10.0)
    peer.pool.call_soon(served.clear)
    eventually(lambda: not served.is_set())
    released.set()
    assert peer.theirs.recv(1) == b"\1"


def test_system_tasks_do_not_wait_until_the_leader_is_found_stuck(start: Start, patient: dict[str, float]) -> None:
    peer = start(**patient)
    released, served = threading.Event(), threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.ask(1)
    eventually(lambda: peer.state.doing is RUNNING)
    peer.pool.submit_system(served.set)
    assert served.wait(10.0)
    released.set()
    assert peer.theirs.recv(1) == b"\1"


def test_what_the_leader_itself_leaves_to_be_done_is_done_if_it_blocks(start: Start) -> None:
    peer = start()
    served = threading.Event()

    def leave_and_block() -> None:
        peer.pool.submit_system(served.set)
        assert served.wait(10.0)

    peer.work[1] = leave_and_block
    peer.call(1)


# Without a gate, and the end.


def test_where_there_is_no_gate_no_thread_leads(start: Start) -> None:
    peer = start(SelectPoller())
    for _ in range(32):
        peer.call()
        assert peer.state.thread == NONE


def test_a_pool_stops_whatever_its_threads_do(start: Start) -> None:
    peer = start()
    meeting = threading.Barrier(8)
    peer.work[1] = lambda: meeting.wait(10.0)
    peer.ask(*[1] * 8)
    assert peer.answers(8) == b"\1" * 8


def test_it_starts_no_thread_where_one_follows() -> None:
    started: list[int] = []
    poller = EpollPoller()
    group = LeaderFollowers(poller, lambda: started.append(1), lambda: 0)
    group.ensure_follower()
    group.ensure_follower()
    assert group.idle == len(started) == 1
    group.add_idle(-1)
    group.before_task()
    assert len(started) == 2
    poller.close()


# The inlined steps of the leader decide what the machine decides.


class ContextRegistry:
    """A poller and its gate, which note what is asked of them."""

    def __init__(self) -> None:
        self.gate = self
        self.asked: list[Effect | Alarm] = []

    def open(self) -> None:
        self.asked.append(OPEN)

    def shut(self) -> None:
        self.asked.append(SHUT)

    def alarm(self, seconds: float) -> None:
        self.asked.append(HELP if seconds == AT_ONCE else Alarm(seconds))

    def wait(self) -> list[Event]:
        return []

    def glance(self) -> Seen:
        return []


class Twins:
    """The runtime, and the machine alone, at the same moments."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 1.0
        self.queued = 0
        self.times: list[float] = []
        limits = thresholds(spin=300e-6, streak=10**9)  # (spinning asks the clock as often as it likes)
        self.poller = ContextRegistry()
        self.group = LeaderFollowers(
            cast(Any, self.poller), lambda: None, lambda: self.queued, limits, lambda: self.times.pop(0)
        )
        self.machine = Leadership(limits)
        self.expected: list[Effect | Alarm] = []
        self.me = threading.get_ident()
        for state in (self.group.state, self.machine):
            state.thread, state.followers = self.me, 1

    def pass_time(self) -> float:
        self.now += self.random.choice([0.0, 1e-5, 1e-4, 2e-4, 6e-4, 2e-3, 9e-3])
        return self.now

    def expect(self, effects: Effects, called: bool) -> None:
        """`called`: a follower was, before. An alarm that puts that off is taken back."""
        for effect in effects:
            self.expected += [effect, HELP] if isinstance(effect, Alarm) and called else [effect]

    def come_back(self) -> None:
        begun, now = self.pass_time(), self.pass_time()
        self.times = [begun, now]
        self.group.events()
        assert self.machine.idle(self.me)
        self.expected += self.machine.shut_due(begun)
        self.machine.busy(self.me, now, begun)
        self.expect(self.machine.alarm_due(now), self.machine.called)

    def begin_task(self) -> None:
        self.times = [self.pass_time()]
        self.queued = self.random.choice([0, 0, 1])
        self.group.before_task()
        called = self.machine.called
        self.expect(self.machine.begin_task(self.now, self.queued), called)

    def answer(self) -> None:
        self.times = [self.pass_time()]
        self.group.nearly_done()
        self.machine.answer(self.now)

    def block(self) -> None:
        self.times = [] if self.machine.open else [self.pass_time()]
        self.group.leader_blocks()
        effects = self.machine.block()
        self.expected += effects
        if OPEN in effects:
            assert self.machine.opened(self.now) == ()

    def look(self) -> None:
        """A follower does what both have in common."""
        now, queued = self.pass_time(), self.random.choice([True, False])
        for state in (self.group.state, self.machine):
            state.decide(now, state.rang(), queued)
            state.may_help(now)

    def compare(self) -> None:
        for name in Leadership.__slots__:
            assert getattr(self.group.state, name) == getattr(self.machine, name), name
        assert self.poller.asked == self.expected
        self.machine.check()
        assert not self.times


class SlowGate:
    """A poller and its gate. While one thread opens it, or shuts it, another one does `meanwhile`."""

    group: LeaderFollowers

    def __init__(self) -> None:
        self.gate = self
        self.is_open = False
        self.meanwhile: list[Callable[[], None]] = []

    def open(self) -> None:
        self._set(True)

    def shut(self) -> None:
        self._set(False)

    def _set(self, is_open: bool) -> None:
        if self.meanwhile:
            self.meanwhile.pop()()
        self.is_open = is_open

    def alarm(self, seconds: float) -> None:
        pass

    def wait(self, seconds: float = -1.0) -> tuple[bool, bool]:
        self.group.stop()
        return False, False

    def wake(self) -> None:
        pass

    def crowded(self) -> bool:
        return False


@pytest.fixture
def slow() -> tuple[LeaderFollowers, SlowGate]:
    gate = SlowGate()
    gate.group = LeaderFollowers(cast(Any, gate), lambda: None, lambda: 0, thresholds(relief=0.0))
    state = gate.group.state
    state.thread, state.followers, state.doing = OTHER, 2, RUNNING
    return gate.group, gate


OTHER = -1  # a thread that leads


def comes_back(group: LeaderFollowers) -> None:
    """What the leader does, up to the poller."""
    group.state.idle(OTHER)
    group.watchdog.apply(group.state.shut_due(time.monotonic()))


def goes_to_sleep(group: LeaderFollowers) -> None:
    group.wait()


def finds_the_leader_stuck(group: LeaderFollowers) -> None:
    group.state.open = False
    group.state.steps = group.state.stuck_steps = 7
    assert group.watchdog.look()


def begins_to_help(group: LeaderFollowers) -> None:
    group.before_task()


def begins_to_help_for_long(group: LeaderFollowers) -> None:
    """It would lead, and finds that another thread leads by now."""
    group.state.helped = 10**6
    group._take_over = lambda leader: False  # type: ignore[method-assign]
    group.before_task()


Follower = Callable[[LeaderFollowers], None]


@pytest.mark.parametrize("opens", [goes_to_sleep, finds_the_leader_stuck, begins_to_help, begins_to_help_for_long])
def test_a_follower_that_opens_the_gate_while_the_leader_shuts_it_shuts_it_again(
    slow: tuple[LeaderFollowers, SlowGate], opens: Follower
) -> None:
    group, gate = slow
    group.state.open = True
    gate.meanwhile = [lambda: comes_back(group)]
    opens(group)
    assert not gate.meanwhile
    assert group.state.open is gate.is_open is False


def test_a_leader_that_shuts_the_gate_while_another_thread_opens_it_opens_it_again(
    slow: tuple[LeaderFollowers, SlowGate],
) -> None:
    group, gate = slow
    group.state.open = True

    def waits() -> None:  # a destructor, on the leader
        group.watchdog.apply(group.state.block())

    gate.meanwhile = [waits]
    comes_back(group)
    assert group.state.open is gate.is_open is True


def test_the_watchdog_alone_opens_and_shuts_the_gate() -> None:
    """It looks afterwards whether the gate is still to be so."""
    users = [
        path.name
        for path in Path(remora.agent.__file__).parent.rglob("*.py")
        if re.search(r"gate\.(open|shut)\(", path.read_text())
    ]
    assert users == ["watchdog.py"]


@pytest.mark.parametrize("seed", range(20))
def test_the_inlined_steps_decide_what_the_machine_decides(seed: int) -> None:
    twins = Twins(Random(seed))
    twins.come_back()
    for _ in range(2000):
        steps = [twins.come_back, twins.begin_task, twins.begin_task, twins.answer, twins.block, twins.look]
        twins.random.choice(steps)()
        twins.compare()
    assert set(map(type, twins.expected)) == {Effect, Alarm}


def test_a_leader_that_does_nothing_of_the_kind_is_seen_to_differ() -> None:
    twins = Twins(Random(0))
    twins.come_back()
    twins.machine.answer(twins.now)
    with pytest.raises(AssertionError):
        twins.compare()


def test_time_is_the_real_one_by_default() -> None:
    poller = EpollPoller()
    group = LeaderFollowers(poller, lambda: None, lambda: 0)
    group.state.thread = threading.get_ident()
    group.nearly_done()
    assert 0 < group.state.long_at - time.monotonic() <= USUAL.long_answer
    poller.close()
