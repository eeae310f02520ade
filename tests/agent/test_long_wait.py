"""What still waits says so: after 10 s, and then after twice the time, by whatever clock it waits."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from remora import rpc
from remora.agent.calls.call import Call
from remora.agent.channel.outbox import Outbox
from remora.agent.peers.unanswered import Unanswered
from remora.clock import NEVER
from remora.errors import CallNotSent, CallTimeout
from remora.faults.worker_faults import WorkerFaults
from remora.long_wait import LongWait, listed
from remora.testing.world import World
from tests.eventually import eventually

T = TypeVar("T")


class FakeClock:
    """Time passes when a thread waits for it, and only then."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.ready_at = NEVER  # when what is waited for comes

    def now(self) -> float:
        return self.time

    def soon(self, seconds: float) -> float:
        return self.time + seconds

    def block(self, wait: Callable[[float | None], T], deadline: float, wake: Callable[[], None] | None = None) -> T:
        self.time = min(deadline, self.ready_at)
        return wait(0.0)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_reports_come_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    wait = LongWait(lambda: "init_rpc: still waiting for rank 2 of 3", clock)
    for second in range(1, 100):
        clock.time = 1000.0 + second
        wait.look()
    assert said(caplog) == [f"init_rpc: still waiting for rank 2 of 3, {n} s" for n in (10, 20, 40, 80)]


def test_a_look_that_comes_late_reports_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    wait = LongWait(lambda: "it", clock)
    clock.time += 50
    wait.look()
    wait.look()
    assert said(caplog) == ["it, 50 s"]
    clock.time += 29
    wait.look()
    assert len(said(caplog)) == 1
    clock.time += 1
    wait.look()
    assert said(caplog)[1:] == ["it, 80 s"]


def test_nothing_is_described_that_does_not_take_long(caplog: pytest.LogCaptureFixture) -> None:
    def describe() -> str:
        raise AssertionError("described too early")

    clock = FakeClock()
    clock.ready_at = 1009.0
    assert LongWait(describe, clock).block(lambda _: clock.time >= 1009.0, NEVER)
    assert said(caplog) == []


def test_a_thread_that_blocks_reports_meanwhile_and_is_back_when_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    clock.ready_at = 1045.0
    assert LongWait(lambda: "it", clock).block(lambda _: clock.time >= 1045.0, NEVER)
    assert clock.time == 1045.0
    assert said(caplog) == ["it, 10 s", "it, 20 s", "it, 40 s"]


def test_a_deadline_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    assert not LongWait(lambda: "it", clock).block(lambda _: False, 1025.0)
    assert clock.time == 1025.0
    assert said(caplog) == ["it, 10 s", "it, 20 s"]


def test_long_lists_are_cut() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(n) for n in range(10)], 3) == "0, 1, 2 and 7 more"


# Where it is used. Real waits are short here, and are reported soon.

gate = threading.Event()


def pass_gate() -> None:
    assert gate.wait(20.0)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    gate.clear()
    monkeypatch.setattr("remora.long_wait.FIRST", 0.2)


def test_a_gathering_says_whom_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    with World(2, clock="auto") as world:
        with pytest.raises(CallTimeout):
            world.run(0, rpc._all_gather, None, timeout=35.0)
        assert [each for each in said(caplog) if "_all_gather" in each] == [
            "_all_gather waits for worker1, 10 s",
            "_all_gather waits for worker1, 20 s",
        ]


@pytest.mark.parametrize("timeout", [50.0, 0.0])
def test_shutdown_says_whom_it_waits_for_and_what_that_one_runs(
    soon: None, caplog: pytest.LogCaptureFixture, timeout: float
) -> None:
    with World(2) as world, ThreadPoolExecutor(1) as pool:
        future = world.run(0, rpc.rpc_async, "worker1", pass_gate, timeout=timeout)
        ending = pool.submit(world.shutdown)
        try:
            eventually(lambda: any("shutdown waits" in each for each in said(caplog)))
        finally:
            gate.set()
        ending.result(20)
        future.wait()
    texts = [each for each in said(caplog) if "shutdown waits" in each]
    running = r"shutdown waits for worker1, which runs tests\.agent\.test_long_wait\.pass_gate since \d+ s"
    serving = r"shutdown waits for 1 call of worker0 served here \(tests\.agent\.test_long_wait\.pass_gate\)"
    assert all(re.match(running, each) or re.match(serving, each) for each in texts), texts


def test_a_call_that_waits_for_room_says_so(
    soon: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(2) as world:
        peer = world[0].peer("worker1")
        call = Call(peer, "train")
        call.limit(0.7, 0.7)
        with monkeypatch.context() as patched:
            patched.setattr(Outbox, "is_full", lambda outbox: True)
            with pytest.raises(CallNotSent):
                peer.outgoing.outbox.wait_for_room(call)
    assert said(caplog)[0] == "call of train on worker1 waits until worker1 has taken what was sent before, 0 s"


def test_waiting_for_a_connection_says_so(
    soon: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(2, reconnect_timeout=1.0) as world:
        monkeypatch.setattr(WorkerFaults, "bar", lambda _, name: name == "worker1")
        with pytest.raises(CallNotSent):
            world.run(0, rpc.rpc_sync, "worker1", pass_gate)
    assert said(caplog)[0] == "worker0 still waits for a connection with worker1 (1 call pending), 0 s"


def test_what_has_come_meanwhile_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """It said "shutdown waits for , 10 s" if the last call ended between the wait and the report."""
    clock = FakeClock()
    wait = LongWait(lambda: "", clock)
    clock.time += 15
    wait.look()
    assert not said(caplog)
    with World(1) as world:
        assert not world[0].agent._under_way()


class FakePeer:
    """A worker that has not answered some calls."""

    def __init__(self, clock: FakeClock) -> None:
        self.key = self
        self.name = "w1"
        self.outgoing = self
        self.now = clock.now
        self.pending: dict[int, Call] = {}
        self._unanswered = Unanswered(clock, lambda report: report())
        self._clock = clock

    def called(self, timeout: float = 0.0) -> Call:
        call = Call(self, "train")  # type: ignore[arg-type]
        call.limit(timeout, 60.0)
        self.pending[call.id] = call
        return call

    def answers(self, call: Call) -> None:
        del self.pending[call.id]

    def verify(self, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            self._clock.time += 0.5
            self._unanswered.look([self])  # type: ignore[list-item]


def test_calls_say_for_whom_they_wait_and_for_how_long(caplog: pytest.LogCaptureFixture) -> None:
    peer = FakePeer(FakeClock())
    first = peer.called()
    peer.verify(5)
    second = peer.called(30.0)
    peer.verify(16)
    text = "call of train on w1 waits for its answer, "
    assert said(caplog) == [f"{text}without a timeout (1 more call to w1), {n} s" for n in (10, 20)]
    peer.answers(first)
    caplog.clear()
    peer.verify(10)
    assert not said(caplog), "calls to this worker take long, as was said"
    peer.answers(second)
    peer.verify(61)
    peer.called(-1.0)
    peer.verify(21)
    assert said(caplog) == [f"{text}with a timeout of 60 s, {n} s" for n in (10, 20)]


def test_a_call_that_was_answered_before_the_report_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    peer = FakePeer(clock)
    reports: list[Callable[[], None]] = []
    unanswered = Unanswered(clock, reports.append)
    peer.called()
    clock.time += 11
    unanswered.look([peer])  # type: ignore[list-item]
    peer.pending.clear()
    assert len(reports) == 1
    reports[0]()
    assert not said(caplog)


def test_calls_that_all_take_long_are_not_all_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Neither one by one, nor in a queue, where each is old when it becomes the oldest."""
    peer = FakePeer(FakeClock())
    for _ in range(20):
        call = peer.called()
        peer.verify(12)
        peer.answers(call)
    assert len(said(caplog)) == 1
    peer.verify(61)
    caplog.clear()
    for call in [peer.called() for _ in range(100)]:
        peer.verify(1)
        peer.answers(call)
    assert [text.split()[-2] for text in said(caplog)] == ["10", "20", "40", "80"]


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_a_worker_reports_its_calls(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    monkeypatch.setattr("remora.long_wait.FIRST", 0.2)
    gate.clear()
    with World(2) as world:
        future = world.run(0, rpc.rpc_async, "worker1", pass_gate, timeout=timeout)
        try:
            eventually(lambda: any("pass_gate on worker1 waits for its answer" in text for text in said(caplog)))
        finally:
            gate.set()
        future.wait()
