"""A pool of threads with thresholds of the test's choice, and a peer that asks it to run something."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remora.agent.runtime.leader_followers import THRESHOLDS
from remora.agent.runtime.pool import WorkerPool
from remora.protocol.leader import IDLE, Leadership, Thresholds
from remora.transport.poller import EpollPoller, Poller
from tests.eventually import eventually

Work = Callable[[], object]

HOUR = 3600.0  # seconds: longer than any test


class Peer:
    """The other end of a link on which each byte asks the pool to run something."""

    def __init__(self, pool: WorkerPool, poller: Poller) -> None:
        self.pool = pool
        self.poller = poller
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.settimeout(10.0)
        self.work: dict[int, Work] = {0: lambda: None}
        self.ran_by: list[int] = []
        poller.add(self)
        poller.arm(self)

    @property
    def state(self) -> Leadership:
        return self.pool.leader.state

    def fileno(self) -> int:
        return self.ours.fileno()

    def ready(self, events: int) -> None:
        for number in self.ours.recv(100):
            self.pool.user_tasks.append(lambda number=number: self._run(number))  # type: ignore[misc]
        self.poller.arm(self)

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

    def leader(self) -> int:
        """Which thread leads, when it is back from what it did."""
        self.call()
        eventually(lambda: self.state.doing is IDLE)
        return self.state.thread

    def close(self) -> None:
        self.poller.remove(self, self.fileno())
        self.ours.close()
        self.theirs.close()


Start = Callable[..., Peer]


def thresholds(**limits: Any) -> Thresholds:
    return Thresholds(**{"spin": THRESHOLDS.spin, **limits})


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a pool, with some thresholds other than the usual ones. Without a gate the test is skipped."""
    made: list[Peer] = []

    def start_pool(poller: Poller | None = None, **limits: Any) -> Peer:
        poller = poller or EpollPoller()
        if isinstance(poller, EpollPoller) and poller.gate is None:
            poller.close()
            pytest.skip("this system has no gate")
        pool = WorkerPool("test", 16, poller, thresholds=thresholds(**limits))
        pool.start()
        made.append(Peer(pool, poller))
        return made[-1]

    yield start_pool
    for peer in made:
        peer.close()
        assert peer.pool.stop(5.0) == 0


@pytest.fixture
def patient() -> dict[str, float]:
    """No thread takes anything from the leader however long it takes, as on a machine that gives it no time."""
    return {"look_every": HOUR, "long": HOUR, "long_answer": HOUR}
