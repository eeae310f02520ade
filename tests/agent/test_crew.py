"""The threads of a worker, without a worker: the three rules at the head of `remora.agent.crew`, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from remora.agent.crew import Crew, waiting
from remora.transport.poller import EpollPoller, Poller, SelectPoller
from tests.agent.alone import wait_until

MakeCrew = Callable[[int], Crew]


@pytest.fixture(params=[EpollPoller, SelectPoller])
def make_crew(request: pytest.FixtureRequest) -> Iterator[MakeCrew]:
    made: list[Crew] = []

    def make(limit: int) -> Crew:
        poller: Poller = request.param()
        crew = Crew("test", limit, poller)
        crew.start()
        made.append(crew)
        return crew

    yield make
    for crew in made:
        crew.stop(5.0)


class Gate:
    """Lets threads pass when it is opened, and counts those who are in it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._lock = threading.Lock()
        self.inside = self.most = self.passed = 0

    def __call__(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self._open.wait(10.0)
        with self._lock:
            self.inside -= 1
            self.passed += 1

    def open(self) -> None:
        self._open.set()


def test_jobs_run_up_to_the_limit_at_once_and_all_of_them_in_the_end(make_crew: MakeCrew) -> None:
    crew, gate = make_crew(3), Gate()
    for _ in range(20):
        crew.submit(gate)
    wait_until(lambda: gate.inside == 3)
    assert len(crew.backlog) == 17
    assert crew.counts()[2] == 3
    gate.open()
    wait_until(lambda: gate.passed == 20)
    assert gate.most == 3
    wait_until(lambda: crew.counts()[2] == 0)


def test_services_run_when_every_place_is_taken(make_crew: MakeCrew) -> None:
    crew, gate = make_crew(1), Gate()
    crew.submit(gate)
    wait_until(lambda: gate.inside == 1)
    served = threading.Event()
    crew.serve(served.set)
    assert served.wait(2.0)
    quickly = threading.Event()
    crew.serve_quickly(quickly.set)
    assert quickly.wait(2.0)
    gate.open()


def test_services_that_block_do_not_hold_up_others(make_crew: MakeCrew) -> None:
    crew, gate = make_crew(1), Gate()
    for _ in range(10):
        crew.serve(gate)
    wait_until(lambda: gate.inside == 10)
    done = threading.Event()
    crew.submit(done.set)
    assert done.wait(2.0)
    gate.open()
    wait_until(lambda: gate.passed == 10)


def test_a_job_that_waits_gives_its_place_away(make_crew: MakeCrew) -> None:
    crew = make_crew(1)
    second = threading.Event()
    finished = threading.Event()

    def first() -> None:
        with waiting():
            assert second.wait(5.0)
        finished.set()

    crew.submit(first)
    crew.submit(second.set)
    assert finished.wait(5.0)
    wait_until(lambda: crew.counts()[2] == 0)


def test_jobs_that_wait_for_further_jobs_nest_to_any_depth(make_crew: MakeCrew) -> None:
    crew = make_crew(1)
    done = threading.Event()

    def descend(depth: int, parent: threading.Event) -> None:
        if depth:
            mine = threading.Event()
            crew.submit(lambda: descend(depth - 1, mine))
            with waiting():
                assert mine.wait(10.0)
        parent.set()

    crew.submit(lambda: descend(60, done))
    assert done.wait(10.0)
    wait_until(lambda: crew.counts()[2] == 0)


def test_a_job_that_fails_costs_no_place(make_crew: MakeCrew, caplog: pytest.LogCaptureFixture) -> None:
    crew = make_crew(1)

    def fail() -> None:
        raise SystemExit("words")

    def fail_while_waiting() -> None:
        with waiting():
            raise KeyboardInterrupt("other words")

    for _ in range(3):
        crew.submit(fail)
        crew.submit(fail_while_waiting)
        crew.serve(fail)
    done = threading.Event()
    crew.submit(done.set)
    assert done.wait(2.0)
    wait_until(lambda: caplog.text.count("SystemExit: words") == 6)  # services and jobs run on different threads
    wait_until(lambda: crew.counts()[2] == 0)


class Parting:
    """A job that, when it is dropped, does what a program may do in a destructor: something that needs the crew."""

    def __init__(self, crew: Crew, could: list[bool]) -> None:
        self.crew = crew
        self.could = could

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        self.could.append(self.crew._lock.acquire(timeout=1.0))
        if self.could[-1]:
            self.crew._lock.release()


def test_what_a_job_takes_along_when_it_goes_finds_nothing_locked(make_crew: MakeCrew) -> None:
    crew, gate = make_crew(1), Gate()
    could: list[bool] = []
    crew.submit(gate)
    for _ in range(3):
        crew.submit(Parting(crew, could))  # they follow upon each other
    gate.open()
    wait_until(lambda: len(could) == 3)
    assert could == [True] * 3


def test_waiting_outside_of_a_job_is_just_waiting() -> None:
    with waiting(), waiting():
        pass


def test_waiting_inside_waiting_counts_once(make_crew: MakeCrew) -> None:
    crew = make_crew(1)
    active: list[int] = []

    def job() -> None:
        with waiting(), waiting():
            active.append(crew.counts()[2])
        active.append(crew.counts()[2])

    crew.submit(job)
    wait_until(lambda: len(active) == 2)
    assert active == [0, 1]


def test_threads_come_when_needed_and_most_go_again(make_crew: MakeCrew) -> None:
    crew = make_crew(64)
    assert crew.counts()[0] == 1
    gate = Gate()
    for _ in range(40):
        crew.submit(gate)
    wait_until(lambda: gate.inside == 40)
    assert crew.counts()[0] <= 45
    gate.open()
    wait_until(lambda: gate.passed == 40 and crew.counts()[0] <= 10)


def test_many_jobs_from_many_threads(make_crew: MakeCrew) -> None:
    crew = make_crew(4)
    ran: list[int] = []

    def submit_many(k: int) -> None:
        for i in range(500):
            crew.submit(lambda i=i: ran.append(k * 500 + i))  # type: ignore[misc]

    threads = [threading.Thread(target=submit_many, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(ran) == 3000)
    assert sorted(ran) == list(range(3000))


def test_an_idle_crew_sleeps(make_crew: MakeCrew) -> None:
    crew, gate = make_crew(8), Gate()
    gate.open()
    for _ in range(8):
        crew.submit(gate)
    wait_until(lambda: gate.passed == 8)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_stopping_tells_how_many_are_still_at_it() -> None:
    crew, gate = Crew("test", 4, EpollPoller()), Gate()
    crew.start()
    for _ in range(2):
        crew.submit(gate)
    wait_until(lambda: gate.inside == 2)
    start = time.monotonic()
    assert crew.stop(0.2) == 2
    assert time.monotonic() - start < 2.0
    gate.open()
    wait_until(lambda: gate.passed == 2)


def test_what_comes_after_the_stop_is_dropped() -> None:
    crew = Crew("test", 4, EpollPoller())
    crew.start()
    assert crew.stop(2.0) == 0
    ran: list[int] = []
    crew.submit(lambda: ran.append(1))
    crew.serve(lambda: ran.append(2))
    assert ran == []


def test_what_must_be_done_is_done_though_everybody_is_going_home() -> None:
    crew = Crew("test", 1, EpollPoller())
    crew.start()
    done: list[str] = []
    going, seen = threading.Event(), threading.Event()

    def late() -> None:
        going.set()
        wait_until(lambda: crew._stopped)
        crew.serve(lambda: done.append("what can be left"))
        crew.see_to(lambda: done.append("what cannot"))
        seen.set()

    crew.submit(late)
    assert going.wait(10.0)
    assert crew.stop(10.0) == 0
    assert seen.is_set()
    assert done == ["what cannot"]


def test_a_crew_may_be_stopped_by_one_of_its_own() -> None:
    crew = Crew("test", 4, EpollPoller())
    crew.start()
    left: list[int] = []
    crew.submit(lambda: left.append(crew.stop(2.0)))
    wait_until(lambda: left)
    assert left == [1], "itself"
