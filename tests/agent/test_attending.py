"""Waiting for the future of a call: the thread that waits reads the reply itself, and runs nothing of others meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from remora import rpc
from remora.agent.channel import Channel
from remora.errors import CallCancelled, CallTimeout
from tests.agent.alone import wait_until

gate = threading.Event()
unpickled_on: list[int] = []


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    gate.clear()
    unpickled_on.clear()
    yield
    gate.set()


def wait_at_gate() -> str:
    assert gate.wait(20.0)
    return "passed"


def quick() -> str:
    return "quick"


class Witness:
    """Tells who unpickled it."""

    def __init__(self) -> None:
        self.state = 1

    def __setstate__(self, state: dict[str, int]) -> None:
        unpickled_on.append(threading.get_ident())
        self.__dict__ = state


def late_witness() -> Witness:
    assert gate.wait(20.0)
    return Witness()


def reader(channel: Channel) -> bool:
    return channel._reading.locked()


def outgoing(me: str) -> Channel:
    rpc.rpc_sync(me, quick)  # so that there is a link
    return rpc._get_current_rpc_agent().peer(me).outgoing


def test_the_thread_that_waits_reads_its_reply(me: str) -> None:
    channel = outgoing(me)
    future = rpc.rpc_async(me, late_witness)
    threading.Thread(target=lambda: (wait_until(lambda: reader(channel)), gate.set())).start()
    assert future.wait().state == 1
    assert unpickled_on == [threading.get_ident()]


def test_the_reply_of_another_call_is_left_to_the_crew(me: str) -> None:
    channel = outgoing(me)
    mine, other = rpc.rpc_async(me, wait_at_gate), rpc.rpc_async(me, late_witness)
    threading.Thread(target=lambda: (wait_until(lambda: reader(channel)), gate.set())).start()
    assert mine.wait() == "passed"
    wait_until(other.done)
    assert unpickled_on != [threading.get_ident()]


def test_callbacks_never_run_on_the_thread_that_waits(me: str) -> None:
    """It may hold a lock that they need."""
    lock = threading.Lock()
    ran_on: list[int] = []

    def callback(_: object) -> None:
        with lock:
            ran_on.append(threading.get_ident())

    channel = outgoing(me)
    future = rpc.rpc_async(me, wait_at_gate)
    future.add_done_callback(callback)
    with lock:
        threading.Thread(target=lambda: (wait_until(lambda: reader(channel)), gate.set())).start()
        assert future.wait(10.0) == "passed"
    wait_until(lambda: len(ran_on) == 1)
    assert ran_on != [threading.get_ident()]


def test_a_call_that_somebody_else_cancels_ends_the_waiting(me: str) -> None:
    channel = outgoing(me)
    future = rpc.rpc_async(me, wait_at_gate)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            future.wait()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: reader(channel))
    began = time.monotonic()
    assert future.cancel()
    thread.join(10.0)
    assert isinstance(ended[0], CallCancelled)
    assert time.monotonic() - began < 0.8  # a read that nothing ends takes a second
    gate.set()


def test_a_deadline_ends_the_waiting(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate, timeout=0.2)
    with pytest.raises(CallTimeout):
        future.wait()
    gate.set()


def test_the_patience_of_who_waits_ends_it_too_and_the_call_goes_on(me: str) -> None:
    future = rpc.rpc_async(me, wait_at_gate)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        future.wait(0.2)
    assert 0.2 <= time.monotonic() - began < 5.0
    gate.set()
    assert future.wait() == "passed"


def test_calls_that_are_answered_while_somebody_begins_to_wait(me: str) -> None:
    """The reply may be there, be read by another thread, or have been dealt with, at any point of waiting for it."""
    for _ in range(3000):
        assert rpc.rpc_async(me, quick).wait(20.0) == "quick"


def test_many_threads_wait_for_many_futures(me: str) -> None:
    wrong: list[object] = []

    def work() -> None:
        for _ in range(100):
            futures = [rpc.rpc_async(me, quick) for _ in range(5)]
            wrong.extend(value for future in futures if (value := future.wait(20.0)) != "quick")

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert wrong == []


def test_a_lone_call_is_written_at_once(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the crew, which is asked to write bursts."""
    rpc.rpc_sync(me, quick)
    asked: list[object] = []
    monkeypatch.setattr(Channel, "_want_flush", asked.append)
    for _ in range(50):
        assert rpc.rpc_async(me, quick).wait(20.0) == "quick"
    assert asked == []


def test_waiting_inside_a_function_gives_its_place_away(narrow: str) -> None:
    assert rpc.rpc_sync(narrow, call_back, args=(narrow,)) == "quick"


def call_back(name: str) -> str:
    return rpc.rpc_async(name, quick).wait()


