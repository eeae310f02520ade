"""One thread leads, the others stand at the gate, and nothing waits for a leader that is busy for long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from remora.agent import patrol, processor
from remora.agent import watch as watching
from remora.agent.crew import Crew, waiting
from remora.agent.watch import NOBODY, STREAK, Watch
from remora.transport.eagerness import MOST_RESTS
from remora.transport.gate import Gate
from remora.transport.poller import EpollPoller, Event, Seen, SelectPoller
from tests.agent.alone import wait_until

Work = Callable[[], object]


class Peer:
    """The other end of a link on which each byte asks the crew to run something."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.settimeout(10.0)
        self.work: dict[int, Work] = {0: lambda: None}
        self.ran_by: list[int] = []
        crew._poller.add(self)
        crew._poller.arm(self)

    def fileno(self) -> int:
        return self.ours.fileno()

    def ready(self, events: int) -> None:
        for number in self.ours.recv(100):
            self.crew.backlog.append(lambda number=number: self._run(number))  # type: ignore[misc]
        self.crew._poller.arm(self)

    def _run(self, number: int) -> None:
        self.ran_by.append(threading.get_ident())
        self.work[number]()
        self.ours.send(bytes([number]))

    def ask(self, *numbers: int) -> None:
        self.theirs.send(bytes(numbers))

    def call(self, number: int = 0) -> None:
        """Ask and wait for the answer."""
        self.ask(number)
        assert self.theirs.recv(1) == bytes([number])

    def answers(self, n: int) -> bytes:
        """The next ones, in the order of their numbers."""
        answers = b""
        while len(answers) < n:
            answers += self.theirs.recv(n)
        return bytes(sorted(answers))

    def close(self) -> None:
        self.crew._poller.remove(self, self.fileno())
        self.ours.close()
        self.theirs.close()


def a_crew(poller: EpollPoller | SelectPoller, limit: int = 16) -> Crew:
    crew = Crew("test", limit, poller)
    crew.start()
    return crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = a_crew(EpollPoller())
    if crew._poller.gate is None:
        pytest.skip("this system has no gate")
    yield crew
    assert crew.stop(5.0) == 0


@pytest.fixture
def peer(crew: Crew) -> Iterator[Peer]:
    peer = Peer(crew)
    yield peer
    peer.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes anything from the leader however long it takes, as on a machine that gives it no time."""
    for name in ("PATROL", "LONG", "WRAP_UP"):
        monkeypatch.setattr(patrol, name, 3600.0)


def leader(crew: Crew) -> int:
    return crew._watch._leader


def led(crew: Crew, peer: Peer) -> int:
    """Which thread leads, when it is back from what it did."""
    peer.call()
    wait_until(lambda: crew._watch._idle)
    return leader(crew)


# Who runs what.


def test_one_thread_runs_everything_and_one_stands_by(patient: None, crew: Crew, peer: Peer) -> None:
    other = Peer(crew)
    try:
        for _ in range(200):
            peer.ask(0)  # comes while the leader is busy with the next one, or the other way round
            other.call()
            peer.answers(1)
    finally:
        other.close()
    assert set(peer.ran_by + other.ran_by) == {leader(crew)}
    wait_until(lambda: crew.counts()[:2] == (2, 2))


def test_a_function_that_blocks_does_not_hold_up_the_next(crew: Crew, peer: Peer) -> None:
    led(crew, peer)
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.work[2] = released.set
    peer.ask(1)
    peer.ask(2)
    assert peer.answers(2) == b"\1\2"
    assert peer.ran_by[-2] != peer.ran_by[-1]


def test_functions_that_wait_for_each_other_all_run(crew: Crew, peer: Peer) -> None:
    meeting = threading.Barrier(8)
    peer.work[1] = lambda: meeting.wait(10.0)
    peer.ask(*[1] * 8)
    assert peer.answers(8) == b"\1" * 8
    assert not meeting.broken


@pytest.fixture
def brisk(crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events follow upon each other, and the leader is never found stuck: what it does takes a fifth of a patrol."""
    monkeypatch.setattr(watching, "MOMENT", 2.0)
    monkeypatch.setattr(patrol, "PATROL", 0.1)
    monkeypatch.setattr(patrol, "LONG", 0.05)
    while crew._watch._streak < STREAK:
        peer.call()
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.02)


def test_who_took_long_calls_for_help_with_the_rest(crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patrol, "PATROL", 3600.0)
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.02)
    peer.ask(*[1] * 6)
    peer.answers(6)
    assert len(set(peer.ran_by)) > 1


def test_long_functions_that_pile_up_are_run_by_several(brisk: None, crew: Crew, peer: Peer) -> None:
    del peer.ran_by[:]
    peer.ask(*[1] * 40)
    peer.answers(40)
    assert len(set(peer.ran_by)) > 1


def test_and_so_they_are_if_they_have_not_been_read(
    brisk: None, crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two callers, each of which waits for its answer: there is never anything in the backlog."""
    monkeypatch.setattr(processor, "waited", lambda thread: 0.0)  # nothing keeps the leader from its processor
    monkeypatch.setattr(patrol, "LONG", 3600.0)  # and it is never found stuck: it is helped since it is behind
    del peer.ran_by[:]
    other = Peer(crew)
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


@pytest.mark.parametrize(
    ("behind", "wrapping_up", "busy", "helps"),
    [(True, False, 0.5, True), (True, False, 0.0, False), (True, True, 0.5, False), (False, False, 0.5, False)],
)
def test_a_leader_that_is_behind_is_helped_sooner(behind: bool, wrapping_up: bool, busy: float, helps: bool) -> None:
    watch = Watch(EpollPoller(), lambda: None, lambda: 0)
    now = time.monotonic()
    watch._open_until = now + 60.0 if behind else 0.0
    watch._wrapping_up = wrapping_up
    watch._began, watch._long_at = now + 60.0 if not busy else now - busy, now + 60.0
    assert watch._may_help() is helps
    watch._poller.close()


def test_who_is_about_to_answer_is_left_to_it(crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lost its processor, most likely: another thread would have to wait for one, too."""
    monkeypatch.setattr(patrol, "WRAP_UP", 3600.0)
    lead = led(crew, peer)

    def answer() -> None:
        crew.nearly_done()
        threading.Event().wait(0.05)

    peer.work[1] = answer
    peer.ask(1)
    wait_until(lambda: len(peer.ran_by) == 2)
    peer.ask(0)
    assert peer.answers(2) == b"\0\1"
    assert set(peer.ran_by) == {lead}


def test_taking_in_what_came_is_left_to_the_leader(crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: it does not block, and whoever came to help would only fight with it for the interpreter."""
    monkeypatch.setattr(patrol, "PATIENCE", 3600.0)
    led(crew, peer)
    read = peer.ready
    run_meanwhile: list[int] = []

    def read_slowly(events: int) -> None:
        before = len(peer.ran_by)
        read(events)
        time.sleep(20 * patrol.LONG)
        run_meanwhile.append(len(peer.ran_by) - before)

    monkeypatch.setattr(peer, "ready", read_slowly)
    for _ in range(5):
        peer.ask(*[0] * 50)
        peer.answers(50)
    assert set(run_meanwhile) == {0}


def test_but_not_for_ever(crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patrol, "PATIENCE", 0.01)
    led(crew, peer)
    other = Peer(crew)
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


@pytest.mark.parametrize("robbed", [True, False])
def test_a_leader_that_others_keep_from_the_processor_is_not_helped(
    crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch, robbed: bool
) -> None:
    monkeypatch.setattr(patrol, "PATIENCE", 3600.0)
    monkeypatch.setattr(processor, "waited", lambda thread: time.monotonic() if robbed else 0.0)
    lead = led(crew, peer)
    del peer.ran_by[:]
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.05)
    peer.ask(1)
    wait_until(lambda: len(peer.ran_by) == 1)
    peer.ask(0)
    peer.answers(2)
    assert (peer.ran_by == [lead, lead]) is robbed


def test_how_long_a_thread_has_waited_for_a_processor() -> None:
    me = threading.get_native_id()
    before = processor.waited(me)
    assert before >= 0.0
    assert processor.waited(me) >= before
    assert processor.waited(2**22 + 1) == 0.0  # there is no such thread


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_it_grows_while_others_have_it() -> None:
    """Two processes on one processor: each waits for half of the time."""
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    rival = subprocess.Popen(
        [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{one}])\nprint(flush=True)\nwhile True: pass"],
        stdout=subprocess.PIPE,
    )
    os.sched_setaffinity(0, [one])
    try:
        assert rival.stdout is not None
        rival.stdout.readline()
        me = threading.get_native_id()
        before = processor.waited(me)
        if not os.path.exists(f"/proc/self/task/{me}/schedstat"):
            pytest.skip("this system does not tell")
        wait_until(lambda: processor.waited(me) - before > 0.01 or not sum(range(100_000)), 20.0)
    finally:
        os.sched_setaffinity(0, allowed)
        rival.kill()
        rival.wait()
        rival.stdout.close()


# A leader that waits for something remote.


def test_a_leader_that_waits_hands_over_at_once(patient: None, crew: Crew, peer: Peer) -> None:
    lead = led(crew, peer)
    released = threading.Event()

    def wait() -> None:
        with waiting():
            assert released.wait(10.0)

    peer.work[1], peer.work[2] = wait, released.set
    peer.ask(1)
    peer.ask(2)
    assert peer.answers(2) == b"\1\2"
    assert peer.ran_by[-2] == lead != peer.ran_by[-1]


def test_a_leader_that_comes_back_leads_again(patient: None, crew: Crew, peer: Peer) -> None:
    lead = led(crew, peer)

    def wait() -> None:
        with waiting():
            pass

    peer.work[1] = wait
    for _ in range(20):
        peer.call(1)
        wait_until(lambda: crew._watch._idle)
        peer.call(0)
    assert set(peer.ran_by) == {lead}


def test_a_leader_that_stays_away_is_replaced(crew: Crew, peer: Peer) -> None:
    lead = led(crew, peer)
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.ask(1)

    def replaced() -> bool:
        peer.call()
        return leader(crew) != lead

    wait_until(replaced)
    second = leader(crew)
    released.set()
    peer.answers(1)
    wait_until(lambda: crew.counts()[2] == 0 and crew._watch._idle)
    del peer.ran_by[:]
    for _ in range(20):
        peer.call()
    assert set(peer.ran_by) == {second}


def leading_thread(crew: Crew) -> threading.Thread | None:
    """Not by its number, which another thread may have when it has ended."""
    return next((thread for thread in threading.enumerate() if thread.ident == leader(crew)), None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_leader_that_fails_is_replaced(crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    led(crew, peer)
    first = leading_thread(crew)
    fired = crew._poller.fired

    def fail(seen: Seen) -> list[Event]:
        monkeypatch.setattr(crew._poller, "fired", fired)
        fired(seen)
        raise RuntimeError("this is a test: the leader fails")

    monkeypatch.setattr(crew._poller, "fired", fail)
    crew._poller.wake()
    wait_until(lambda: leading_thread(crew) not in (first, None))
    for _ in range(3):
        peer.call()
    assert set(peer.ran_by[1:]) == {leader(crew)}


def test_who_replaces_a_leader_is_looked_after_too(crew: Crew, peer: Peer) -> None:
    """Each of these blocks, and there is never more than one to do."""
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    for number in range(STREAK + 6):
        peer.ask(1)
        wait_until(lambda number=number: len(peer.ran_by) == number + 1)  # type: ignore[misc]
    released.set()
    peer.answers(STREAK + 6)


def test_a_leader_that_waits_in_a_service_hands_over_at_once(patient: None, crew: Crew, peer: Peer) -> None:
    led(crew, peer)
    released = threading.Event()

    def wait() -> None:
        with waiting():
            assert released.wait(10.0)

    peer.work[2] = released.set
    crew.serve(wait)
    wait_until(lambda: crew._watch._waiting)
    peer.call(2)


# Threads that helped.


def test_who_helped_goes_home_after_a_while(crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it what libraries keep for each thread that computed something."""
    monkeypatch.setattr(watching, "TERM", 0.01)
    lead = led(crew, peer)
    meeting = threading.Barrier(4)
    peer.work[1] = lambda: meeting.wait(10.0)
    peer.ask(*[1] * 4)
    peer.answers(4)
    helpers = set(peer.ran_by) - {lead}
    assert len(helpers) == 3

    def gone() -> bool:
        alive = {thread.ident for thread in list(crew._threads)}
        return not helpers & alive and len(alive) == 2

    wait_until(gone)
    wait_until(lambda: crew.counts()[1] == 2)


# At rest.


class Glances:
    """A poller to which something comes when its user has made way for others three times."""

    def __init__(self) -> None:
        self.made_way = 0

    def make_way(self) -> None:
        self.made_way += 1

    def glance(self) -> Seen:
        return [(1, 1)] if self.made_way >= 3 else []


def test_a_leader_that_looks_makes_way_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    poller = Glances()
    monkeypatch.setattr(watching, "make_way", poller.make_way)
    watch = Watch.__new__(Watch)
    watch._poller = cast(Any, poller)
    assert watch._look(time.monotonic() + 10.0) == [(1, 1)]
    assert poller.made_way == 3, "what comes is seen at once"
    poller.made_way = -1000
    assert watch._look(time.monotonic()) is None, "the moment is over"


@pytest.mark.parametrize("comes", [True, False])
def test_nobody_looks_for_a_while_if_somebody_else_had_the_processor_for_long(
    monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    now = iter([0.0, 0.01, 0.02, 0.03])
    monkeypatch.setattr(watching, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(now))}))
    poller = Glances()
    poller.made_way = 3 if comes else 0
    watch = Watch.__new__(Watch)
    watch._poller, watch._streak = cast(Any, poller), STREAK
    assert bool(watch._look(0.005)) is comes
    assert watch._streak == -MOST_RESTS


def test_a_leader_looks_while_it_pays_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOMENT", 0.05)
    crew = a_crew(EpollPoller())
    peer = Peer(crew)

    def brisk() -> bool:
        peer.call()
        return crew._watch._streak >= STREAK

    wait_until(brisk)
    wait_until(lambda: crew._watch._idle and not crew._watch._set)
    steps = crew._watch._steps
    monkeypatch.setattr(crew._watch, "_look", None)  # whoever looked again would fail
    assert not threading.Event().wait(0.1)
    assert crew._watch._steps == steps
    peer.close()
    assert crew.stop(5.0) == 0


@pytest.fixture
def patrols(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When somebody came to look after the leader: every tenth of a second, unless all is well, or it says so."""
    found: list[float] = []
    look = crew._watch._patrol
    monkeypatch.setattr(crew._watch, "_patrol", lambda gate: (found.append(time.monotonic()), look(gate))[1])
    monkeypatch.setattr(patrol, "PATROL", 0.1)
    return found


def for_a_while(seconds: float, work: Work) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()


def test_a_leader_that_does_many_short_things_is_left_alone(crew: Crew, peer: Peer, patrols: list[float]) -> None:
    for_a_while(0.2, peer.call)  # there may be an alarm from before
    del patrols[:]
    for_a_while(1.0, peer.call)
    assert len(patrols) < 4  # and not 10: none, but this process may lose its processor


def test_so_is_one_with_a_long_list_of_short_things(crew: Crew, peer: Peer, patrols: list[float]) -> None:
    for_a_while(0.2, peer.call)
    begun, ended = time.monotonic(), 0.0

    def short() -> None:
        nonlocal ended
        ended = time.monotonic()
        if ended < begun + 1.0:
            crew.backlog.append(short)  # the leader does not come back in between

    peer.work[1] = short
    del patrols[:]
    peer.call(1)
    wait_until(lambda: ended > begun + 1.0)
    assert len(patrols) < 4


def test_who_was_called_comes_though_the_alarm_was_set_again(
    crew: Crew, peer: Peer, patrols: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patrol, "LONG", 3600.0)  # nobody is called for another reason
    for_a_while(0.2, peer.call)
    served, over = threading.Event(), threading.Event()

    def short() -> None:
        if not over.is_set():
            crew.backlog.append(short)

    peer.work[1] = short
    peer.call(1)
    try:
        crew._services.append(served.set)
        crew._watch._summoned = True  # and the leader has set the alarm again, before anybody heard it
        assert served.wait(2.0)
    finally:
        over.set()


def test_one_that_gets_stuck_after_that_is_found_out(crew: Crew, peer: Peer, patrols: list[float]) -> None:
    for_a_while(0.3, peer.call)
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.work[2] = released.set
    began = time.monotonic()
    peer.ask(1)
    peer.ask(2)
    assert peer.answers(2) == b"\1\2"
    assert time.monotonic() - began < 5.0
    assert peer.ran_by[-2] != peer.ran_by[-1]


def test_one_that_does_few_things_is_looked_after(crew: Crew, peer: Peer, patrols: list[float]) -> None:
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.03)
    for_a_while(0.2, lambda: peer.call(1))
    del patrols[:]
    for_a_while(0.6, lambda: peer.call(1))
    assert patrols


def test_if_all_is_well_it_is_looked_after_less_often(
    crew: Crew, peer: Peer, patrols: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patrol, "LONG", 3600.0)
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.05)
    for_a_while(1.0, lambda: peer.call(1))
    del patrols[:]
    for_a_while(2.4, lambda: peer.call(1))
    assert 1 <= len(patrols) < 8  # and not 24


def test_but_not_if_others_wait(crew: Crew, peer: Peer, patrols: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it read at once is queued behind what it does: it knows that itself, and does not wait to be asked."""
    monkeypatch.setattr(patrol, "LONG", 3600.0)
    crew._watch._pace = patrol.RELAXED
    crew._watch._set_alarm()
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.05)
    began = time.monotonic()
    peer.ask(*[1] * 20)
    peer.answers(20)
    assert patrols
    assert patrols[0] - began < 0.5  # and not 0.8


def test_nor_after_it_was_found_stuck(
    crew: Crew, peer: Peer, patrols: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patrol, "WARY", 3600.0)
    for_a_while(1.0, peer.call)
    assert crew._watch._pace > 1
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.work[2] = released.set
    peer.ask(1)
    peer.ask(2)
    assert peer.answers(2) == b"\1\2"
    for_a_while(0.5, peer.call)
    assert crew._watch._pace == 1
    crew._watch._wary_until = 0.0  # nothing of that kind for long
    wait_until(lambda: (peer.call(), crew._watch._pace > 1)[1])


def test_an_idle_crew_sets_no_alarm(crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LONG", "WRAP_UP"):
        monkeypatch.setattr(patrol, name, 3600.0)  # no thread helps the leader: that sets alarms too
    watch, looking, alarms = crew._watch, [0], list[float]()
    look = watch._patrol

    def look_after(gate: Gate) -> bool:
        looking[0] += 1
        try:
            return look(gate)
        finally:
            looking[0] -= 1

    monkeypatch.setattr(watch, "_patrol", look_after)
    led(crew, peer)
    # A look that began before the leader was back may set the alarm again: it is over when none is set after it.
    wait_until(lambda: not watch._set and not looking[0] and not watch._set)
    gate = crew._poller.gate
    assert gate is not None
    monkeypatch.setattr(gate, "alarm", alarms.append)
    assert not threading.Event().wait(0.05)
    assert alarms == []
    monkeypatch.undo()


# Services.


def test_services_are_seen_to_while_the_leader_is_stuck(crew: Crew, peer: Peer) -> None:
    released, served = threading.Event(), threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.ask(1)
    wait_until(lambda: crew.counts()[2] == 1)
    crew.serve(served.set)
    assert served.wait(10.0)
    crew.serve_quickly(served.clear)
    wait_until(lambda: not served.is_set())
    released.set()
    assert peer.theirs.recv(1) == b"\1"


def test_services_do_not_wait_until_the_leader_is_found_stuck(patient: None, crew: Crew, peer: Peer) -> None:
    released, served = threading.Event(), threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.ask(1)
    wait_until(lambda: crew._watch._running)
    crew.serve(served.set)
    assert served.wait(10.0)
    released.set()
    assert peer.theirs.recv(1) == b"\1"


def test_what_the_leader_itself_leaves_to_be_done_is_done_if_it_blocks(crew: Crew, peer: Peer) -> None:
    served = threading.Event()

    def leave_and_block() -> None:
        crew.serve(served.set)
        assert served.wait(10.0)

    peer.work[1] = leave_and_block
    peer.call(1)


# Without a gate, and the end.


def test_where_there_is_no_gate_nobody_leads() -> None:
    crew = a_crew(SelectPoller())
    peer = Peer(crew)
    for _ in range(4 * STREAK):
        peer.call()
        assert leader(crew) == NOBODY
    peer.close()
    assert crew.stop(5.0) == 0


def test_a_crew_stops_whatever_its_threads_do(crew: Crew, peer: Peer) -> None:
    meeting = threading.Barrier(8)
    peer.work[1] = lambda: meeting.wait(10.0)
    peer.ask(*[1] * 8)
    assert peer.answers(8) == b"\1" * 8


def test_a_thread_that_is_being_started_goes_home_too(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = a_crew(EpollPoller())
    start, begun = threading.Thread.start, threading.Event()

    def start_late(thread: threading.Thread) -> None:
        begun.set()
        wait_until(lambda: crew._stopped)
        start(thread)

    by = threading.Thread(target=crew._start_thread)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_late)
        start(by)
        assert begun.wait(10.0)
        assert crew.stop(5.0) == 0
        by.join()


def test_it_starts_nobody_where_somebody_is() -> None:
    hired: list[int] = []
    watch = Watch(EpollPoller(), lambda: hired.append(1), lambda: 0)
    watch.keep()
    watch.keep()
    assert watch.standing == len(hired) == 1
    watch.enrol(-1)
    watch.step()
    assert len(hired) == 2
    watch._poller.close()
