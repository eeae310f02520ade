"""Brisk times: one thread leads, another stands by, and nothing waits for a leader that is stuck."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from remora.agent import watch as watching
from remora.agent.crew import Crew, waiting
from remora.agent.watch import NOBODY, STREAK, Watch
from remora.transport.poller import EpollPoller, SelectPoller
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

    def ready(self, writable: bool) -> None:
        for number in self.ours.recv(100):
            self.crew.submit(lambda number=number: self._run(number), hurry=False)  # type: ignore[misc]
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
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    monkeypatch.setattr(watching, "MOMENT", 2.0)  # so that a slow machine is brisk, too
    crew = a_crew(EpollPoller())
    yield crew
    assert crew.stop(5.0) == 0


@pytest.fixture
def no_patrol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands by does not look after the leader: on a slow machine it might find it asleep."""
    monkeypatch.setattr(watching, "PATROL", 3600.0)


@pytest.fixture
def peer(crew: Crew) -> Iterator[Peer]:
    peer = Peer(crew)
    yield peer
    peer.close()


def leader(crew: Crew) -> int:
    return crew._watch._leader


def make_brisk(crew: Crew, peer: Peer) -> int:
    """Call until one thread leads and nobody else is at the poller. Which."""

    def brisk() -> bool:
        peer.call()
        return leader(crew) > 0 and not crew._watch._asleep

    wait_until(brisk)
    return leader(crew)


def test_one_thread_runs_everything_and_one_stands_by(no_patrol: None, crew: Crew, peer: Peer) -> None:
    make_brisk(crew, peer)

    def led() -> bool:  # (not at once: another one may be on its way to the poller when brisk times begin)
        del peer.ran_by[:]
        for _ in range(200):
            peer.call()
        return set(peer.ran_by) == {leader(crew)} and not crew._watch._asleep

    wait_until(led)
    wait_until(lambda: crew.counts()[:2] == (2, 1))


def test_the_leader_serves_other_links_too(no_patrol: None, crew: Crew, peer: Peer) -> None:
    make_brisk(crew, peer)
    other = Peer(crew)

    def led() -> bool:
        del other.ran_by[:]
        for _ in range(20):
            other.call()
            peer.call()
        return set(other.ran_by) == {leader(crew)}

    try:
        wait_until(led)
    finally:
        other.close()


def test_a_function_that_blocks_does_not_hold_up_the_next(crew: Crew, peer: Peer) -> None:
    make_brisk(crew, peer)
    released = threading.Event()
    peer.work[1] = lambda: released.wait(10.0)
    peer.work[2] = released.set
    peer.ask(1)
    peer.ask(2)
    assert peer.answers(2) == b"\1\2"
    assert peer.ran_by[-2] != peer.ran_by[-1]


def test_functions_that_wait_for_each_other_all_run(crew: Crew, peer: Peer) -> None:
    make_brisk(crew, peer)
    meeting = threading.Barrier(8)
    peer.work[1] = lambda: meeting.wait(10.0)
    peer.ask(*[1] * 8)
    assert peer.answers(8) == b"\1" * 8
    assert not meeting.broken


def test_long_functions_that_pile_up_are_run_by_several(
    crew: Crew, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is short enough that the leader is never stuck, and none waits for another."""
    monkeypatch.setattr(watching, "PATROL", 0.1)
    make_brisk(crew, peer)
    pause = threading.Event()
    peer.work[1] = lambda: pause.wait(0.02)
    before = len(peer.ran_by)
    peer.ask(*[1] * 30)
    wait_until(lambda: len(peer.ran_by) - before == 30)
    assert len(set(peer.ran_by[before:])) > 1


def test_a_leader_that_waits_for_something_remote_hands_over_at_once(no_patrol: None, crew: Crew, peer: Peer) -> None:
    lead = make_brisk(crew, peer)
    released = threading.Event()

    def wait() -> None:
        with waiting():
            assert released.wait(10.0)

    peer.work[1], peer.work[2] = wait, released.set
    peer.ask(1)
    peer.ask(2)
    assert peer.answers(2) == b"\1\2"
    assert peer.ran_by[-2] == lead != peer.ran_by[-1]


def test_a_leader_with_nothing_to_do_goes_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOMENT", 0.05)
    crew = a_crew(EpollPoller())
    peer = Peer(crew)
    make_brisk(crew, peer)
    wait_until(lambda: leader(crew) == NOBODY)
    steps = crew._watch._steps
    wait_until(lambda: crew.counts()[1] == crew.counts()[0])  # all are at the poller
    assert crew._watch._steps <= steps + 1
    peer.call()
    peer.close()
    assert crew.stop(5.0) == 0


def test_services_are_seen_to_while_the_leader_is_stuck(crew: Crew, peer: Peer) -> None:
    make_brisk(crew, peer)
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


@pytest.mark.parametrize(
    ("poller", "moment"),
    [(EpollPoller, 0.0), (SelectPoller, 2.0)],
    ids=["events are rare", "the poller cannot be asked without waiting"],
)
def test_where_nobody_leads(
    poller: type[EpollPoller | SelectPoller], moment: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MOMENT", moment)
    crew = a_crew(poller())
    peer = Peer(crew)
    for _ in range(4 * STREAK):
        peer.call()
        assert leader(crew) == NOBODY
    peer.close()
    assert crew.stop(5.0) == 0


def test_a_crew_stops_in_brisk_times(crew: Crew, peer: Peer) -> None:
    make_brisk(crew, peer)


def test_it_starts_nobody_where_somebody_is() -> None:
    hired: list[int] = []
    watch = Watch(EpollPoller(), lambda: hired.append(1), lambda: 0)
    watch.keep()
    watch.keep()
    assert watch.standing == len(hired) == 1
    watch.enrol(-1)
    assert watch.step()
    assert len(hired) == 2
    watch._poller.close()
