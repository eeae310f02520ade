"""What was answered is passed on, even if the pool goes home meanwhile: it is on no list any more."""

from __future__ import annotations

import threading
from typing import Any

from remora.agent.channel.completion import have_settled
from remora.agent.runtime.pool import WorkerPool
from remora.transport.poller import EpollPoller
from tests.agent.alone import wait_until


class Answered:
    """As much of a call as matters here."""

    what = "call of a test"

    def __init__(self, number: int, passed_on: list[int]) -> None:
        self._number, self._passed_on = number, passed_on

    def finish(self) -> None:
        self._passed_on.append(self._number)


def test_replies_that_were_read_while_a_pool_stops_are_passed_on() -> None:
    pool = WorkerPool("test", 4, EpollPoller())
    pool.start()
    going = threading.Event()
    passed_on: list[int] = []
    calls: list[Any] = [Answered(number, passed_on) for number in range(3)]

    def read_late() -> None:
        going.set()
        wait_until(lambda: pool._stopped)
        have_settled(pool, calls)

    pool.submit(read_late)
    assert going.wait(10.0)
    assert pool.stop(10.0) == 0
    assert passed_on == [0, 1, 2]
