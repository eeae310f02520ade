"""The gate of a poller: it lets one thread pass each time it is opened, and its alarm wakes one."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Iterator

import pytest

from remora.transport.gate import AT_ONCE, Gate, make_gate

NOTHING = (False, False)
MAY_PASS = (True, False)
ALARM = (False, True)


class Poller:
    """An epoll descriptor that has something when we say so."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.epoll.register(self.event, select.EPOLLIN)

    def happen(self) -> None:
        os.eventfd_write(self.event, 1)

    def close(self) -> None:
        self.epoll.close()
        os.close(self.event)


@pytest.fixture
def poller() -> Iterator[Poller]:
    if not hasattr(select, "epoll"):
        pytest.skip("this system has no epoll")
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def gate(poller: Poller) -> Iterator[Gate]:
    gate = make_gate(poller.epoll)
    assert gate is not None
    yield gate
    gate.close()


def test_nobody_passes_a_shut_gate(poller: Poller, gate: Gate) -> None:
    poller.happen()
    assert gate.wait(0.0) == NOTHING
    gate.open()
    gate.shut()
    assert gate.wait(0.0) == NOTHING


def test_an_opening_lets_one_pass(poller: Poller, gate: Gate) -> None:
    gate.open()
    assert gate.wait(0.0) == NOTHING  # the poller has nothing
    poller.happen()
    assert gate.wait(0.0) == MAY_PASS
    assert gate.wait(0.0) == NOTHING
    gate.open()
    assert gate.wait(0.0) == MAY_PASS


def test_opening_it_wakes_one_of_those_who_wait(poller: Poller, gate: Gate) -> None:
    passed: queue.SimpleQueue[tuple[bool, bool]] = queue.SimpleQueue()
    threads = [threading.Thread(target=lambda: passed.put(gate.wait(10.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    gate.open()
    poller.happen()
    assert passed.get(timeout=10.0) == MAY_PASS
    with pytest.raises(queue.Empty):
        passed.get(timeout=0.05)
    gate.open()
    assert passed.get(timeout=10.0) == MAY_PASS
    gate.open()
    assert passed.get(timeout=10.0) == MAY_PASS
    for thread in threads:
        thread.join(10.0)


def test_the_alarm_rings_once_each_time_it_is_set(gate: Gate) -> None:
    for seconds in (0.01, AT_ONCE, 0.0):
        gate.alarm(seconds)
        assert gate.wait(10.0) == ALARM
        assert gate.wait(0.02) == NOTHING


def test_a_later_alarm_takes_the_place_of_an_earlier_one(gate: Gate) -> None:
    gate.alarm(0.001)
    gate.alarm(3600.0)
    assert gate.wait(0.05) == NOTHING
    gate.alarm(1.25)
    gate.alarm(0.001)
    assert gate.wait(10.0) == ALARM


def test_it_knows_whether_the_poller_has_something(poller: Poller, gate: Gate) -> None:
    assert not gate.crowded()
    poller.happen()
    assert gate.crowded()
    assert gate.crowded()


def test_a_closed_gate_keeps_nobody(poller: Poller) -> None:
    gate = Gate(poller.epoll)
    gate.close()
    gate.open()
    gate.shut()
    gate.alarm(AT_ONCE)
    assert gate.wait() == ALARM
