"""Waiting for the future of a call: the thread that waits reads the reply itself, and runs nothing of others meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from remora import rpc
from remora.agent.channel.channel import Channel
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
    return channel.reading.locked()


def outgoing(me: str) -> Channel:
    rpc.rpc_sync(me, quick)  # so that there is a link
    return rpc._get_current_rpc_agent().peer(me).outgoing


def test_the_thread_that_waits_reads_its_reply(me: str) -> None:
    channel = outgoing(me)
    future = rpc.rpc_async(me, late_witness)
    threading.Thread(target=lambda: (wait_until(lambda: reader(channel)), gate.set())).start()
    assert future.wait().state == 1
    assert unpickled_on == [threading.get_ident()]


def test_the_reply_of_another_call_is_left_to_the_pool(me: str) -> None:
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
    """Not by the pool, which is asked to write bursts."""
    rpc.rpc_sync(me, quick)
    asked: list[object] = []
    monkeypatch.setattr(Channel, "want_flush", asked.append)
    for _ in range(50):
        assert rpc.rpc_async(me, quick).wait(20.0) == "quick"
    assert asked == []


def test_waiting_inside_a_function_gives_its_place_away(narrow: str) -> None:
    assert rpc.rpc_sync(narrow, call_back, args=(narrow,)) == "quick"


def call_back(name: str) -> str:
    return rpc.rpc_async(name, quick).wait()




# Many at once.


def test_the_thread_that_waits_for_all_reads_their_replies(me: str) -> None:
    channel = outgoing(me)
    here = threading.get_ident()
    # The first at least: while it deals with that, what comes next may be read by the pool. A pool thread that reads between
    # its reading and its dealing with that passes on all of it, which happens on a full machine, but not time and again.
    for _ in range(20):
        gate.clear()
        unpickled_on.clear()
        futures = [rpc.rpc_async(me, late_witness) for _ in range(5)]
        threading.Thread(target=lambda: (wait_until(lambda: channel.reading.holder() == here), gate.set())).start()
        assert [each.state for each in torch.futures.wait_all(futures)] == [1] * 5
        assert len(unpickled_on) == 5
        if here in unpickled_on:
            return
    pytest.fail("the pool read all replies, time and again")


def test_of_all_replies_only_those_that_are_waited_for_are_read_by_who_waits(me: str) -> None:
    channel = outgoing(me)
    other, mine = rpc.rpc_async(me, late_witness), rpc.rpc_async(me, wait_at_gate)
    threading.Thread(target=lambda: (wait_until(lambda: reader(channel)), gate.set())).start()
    assert torch.futures.wait_all([mine]) == ["passed"]
    wait_until(other.done)
    assert unpickled_on != [threading.get_ident()]


def test_one_that_fails_elsewhere_ends_the_waiting_for_all(me: str) -> None:
    """Of another kind, or on another connection: nothing of it is seen by reading this one."""
    channel = outgoing(me)
    elsewhere: torch.futures.Future[int] = torch.futures.Future()
    every = torch.futures.collect_all([rpc.rpc_async(me, wait_at_gate), elsewhere])

    def fail() -> None:
        wait_until(lambda: reader(channel))
        elsewhere.set_exception(ValueError("elsewhere"))

    threading.Thread(target=fail).start()
    began = time.monotonic()
    with pytest.raises(ValueError, match="elsewhere"):
        every.wait()
    assert time.monotonic() - began < 0.8  # a read that nothing ends takes a second
    gate.set()


def test_a_member_that_is_cancelled_or_too_late_ends_the_waiting_for_all(me: str) -> None:
    channel = outgoing(me)
    futures = [rpc.rpc_async(me, wait_at_gate) for _ in range(3)]
    threading.Thread(target=lambda: (wait_until(lambda: reader(channel)), futures[1].cancel())).start()
    began = time.monotonic()
    with pytest.raises(CallCancelled):
        torch.futures.wait_all(futures)
    assert time.monotonic() - began < 0.8  # a read that nothing ends takes a second
    with pytest.raises(CallTimeout):
        torch.futures.wait_all([futures[0], rpc.rpc_async(me, wait_at_gate, timeout=0.1)])
    with pytest.raises(TimeoutError):
        torch.futures.collect_all([futures[0], futures[2]]).wait(0.1)  # type: ignore[call-arg]
    gate.set()
    assert torch.futures.wait_all([futures[0], futures[2]]) == ["passed"] * 2


def test_waiting_for_all_runs_no_callbacks(me: str) -> None:
    ran_on: list[int] = []
    channel = outgoing(me)
    futures = [rpc.rpc_async(me, wait_at_gate) for _ in range(3)]
    futures[1].add_done_callback(lambda _: ran_on.append(threading.get_ident()))
    threading.Thread(target=lambda: (wait_until(lambda: reader(channel)), gate.set())).start()
    assert torch.futures.wait_all(futures) == ["passed"] * 3
    wait_until(lambda: len(ran_on) == 1)
    assert ran_on != [threading.get_ident()]


def test_many_threads_wait_for_all_of_many(me: str) -> None:
    wrong: list[object] = []

    def work() -> None:
        for _ in range(40):
            found = torch.futures.wait_all([rpc.rpc_async(me, quick) for _ in range(20)])
            wrong.extend(value for value in found if value != "quick")

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert len(torch.futures.wait_all([rpc.rpc_async(me, quick) for _ in range(5000)])) == 5000
