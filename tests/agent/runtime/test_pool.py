"""The threads of a worker, without a worker: the three rules at the head of `remora.agent.runtime.pool`, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from remora.agent.runtime.current import blocking_region
from remora.agent.runtime.pool import WorkerPool
from remora.transport.poller import EpollPoller, Poller, SelectPoller
from tests.eventually import eventually

MakeCrew = Callable[[int], WorkerPool]


@pytest.fixture(params=[EpollPoller, SelectPoller])
def make_pool(request: pytest.FixtureRequest) -> Iterator[MakeCrew]:
    made: list[WorkerPool] = []

    def make(limit: int) -> WorkerPool:
        poller: Poller = request.param()
        pool = WorkerPool("test", limit, poller)
        pool.start()
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.stop(5.0)


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


def test_jobs_run_up_to_the_limit_at_once_and_all_of_them_in_the_end(make_pool: MakeCrew) -> None:
    pool, gate = make_pool(3), Gate()
    for _ in range(20):
        pool.submit(gate)
    eventually(lambda: gate.inside == 3)
    assert len(pool.user_tasks) == 17
    assert pool.counts()[2] == 3
    gate.open()
    eventually(lambda: gate.passed == 20)
    assert gate.most == 3
    eventually(lambda: pool.counts()[2] == 0)


def test_services_run_when_every_place_is_taken(make_pool: MakeCrew) -> None:
    pool, gate = make_pool(1), Gate()
    pool.submit(gate)
    eventually(lambda: gate.inside == 1)
    served = threading.Event()
    pool.submit_system(served.set)
    assert served.wait(2.0)
    quickly = threading.Event()
    pool.call_soon(quickly.set)
    assert quickly.wait(2.0)
    gate.open()


def test_services_that_block_do_not_hold_up_others(make_pool: MakeCrew) -> None:
    pool, gate = make_pool(1), Gate()
    for _ in range(10):
        pool.submit_system(gate)
    eventually(lambda: gate.inside == 10)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(2.0)
    gate.open()
    eventually(lambda: gate.passed == 10)


def test_a_job_that_waits_gives_its_place_away(make_pool: MakeCrew) -> None:
    pool = make_pool(1)
    second = threading.Event()
    finished = threading.Event()

    def first() -> None:
        with blocking_region():
            assert second.wait(5.0)
        finished.set()

    pool.submit(first)
    pool.submit(second.set)
    assert finished.wait(5.0)
    eventually(lambda: pool.counts()[2] == 0)


def test_jobs_that_wait_for_further_jobs_nest_to_any_depth(make_pool: MakeCrew) -> None:
    pool = make_pool(1)
    done = threading.Event()

    def descend(depth: int, parent: threading.Event) -> None:
        if depth:
            mine = threading.Event()
            pool.submit(lambda: descend(depth - 1, mine))
            with blocking_region():
                assert mine.wait(10.0)
        parent.set()

    pool.submit(lambda: descend(60, done))
    assert done.wait(10.0)
    eventually(lambda: pool.counts()[2] == 0)


def test_a_job_that_fails_costs_no_place(make_pool: MakeCrew, caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(1)

    def fail() -> None:
        raise SystemExit("words")

    def fail_while_waiting() -> None:
        with blocking_region():
            raise KeyboardInterrupt("other words")

    for _ in range(3):
        pool.submit(fail)
        pool.submit(fail_while_waiting)
        pool.submit_system(fail)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(2.0)
    eventually(lambda: caplog.text.count("SystemExit: words") == 6)  # services and jobs run on different threads
    eventually(lambda: pool.counts()[2] == 0)


class Parting:
    """A job that, when it is dropped, does what a program may do in a destructor: something that needs the pool."""

    def __init__(self, pool: WorkerPool, could: list[bool]) -> None:
        self.pool = pool
        self.could = could

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        self.could.append(self.pool._lock.acquire(timeout=1.0))
        if self.could[-1]:
            self.pool._lock.release()


def test_what_a_job_takes_along_when_it_goes_finds_nothing_locked(make_pool: MakeCrew) -> None:
    pool, gate = make_pool(1), Gate()
    could: list[bool] = []
    pool.submit(gate)
    for _ in range(3):
        pool.submit(Parting(pool, could))  # they follow upon each other
    gate.open()
    eventually(lambda: len(could) == 3)
    assert could == [True] * 3


def test_waiting_outside_of_a_job_is_just_waiting() -> None:
    with blocking_region(), blocking_region():
        pass


def test_waiting_inside_waiting_counts_once(make_pool: MakeCrew) -> None:
    pool = make_pool(1)
    active: list[int] = []

    def job() -> None:
        with blocking_region(), blocking_region():
            active.append(pool.counts()[2])
        active.append(pool.counts()[2])

    pool.submit(job)
    eventually(lambda: len(active) == 2)
    assert active == [0, 1]


def test_threads_come_when_needed_and_most_go_again(make_pool: MakeCrew) -> None:
    pool = make_pool(64)
    assert pool.counts()[0] == 1
    gate = Gate()
    for _ in range(40):
        pool.submit(gate)
    eventually(lambda: gate.inside == 40)
    assert pool.counts()[0] <= 45
    gate.open()
    eventually(lambda: gate.passed == 40 and pool.counts()[0] <= 10)


def test_many_jobs_from_many_threads(make_pool: MakeCrew) -> None:
    pool = make_pool(4)
    ran: list[int] = []

    def submit_many(k: int) -> None:
        for i in range(500):
            pool.submit(lambda i=i: ran.append(k * 500 + i))  # type: ignore[misc]

    threads = [threading.Thread(target=submit_many, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(ran) == 3000)
    assert sorted(ran) == list(range(3000))


def test_an_idle_pool_sleeps(make_pool: MakeCrew) -> None:
    pool, gate = make_pool(8), Gate()
    gate.open()
    for _ in range(8):
        pool.submit(gate)
    eventually(lambda: gate.passed == 8)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_stopping_tells_how_many_are_still_at_it() -> None:
    pool, gate = WorkerPool("test", 4, EpollPoller()), Gate()
    pool.start()
    for _ in range(2):
        pool.submit(gate)
    eventually(lambda: gate.inside == 2)
    start = time.monotonic()
    assert pool.stop(0.2) == 2
    assert time.monotonic() - start < 2.0
    gate.open()
    eventually(lambda: gate.passed == 2)


def test_what_comes_after_the_stop_is_dropped() -> None:
    pool = WorkerPool("test", 4, EpollPoller())
    pool.start()
    assert pool.stop(2.0) == 0
    ran: list[int] = []
    pool.submit(lambda: ran.append(1))
    pool.submit_system(lambda: ran.append(2))
    assert ran == []


def test_what_must_be_done_is_done_though_everybody_is_going_home() -> None:
    pool = WorkerPool("test", 1, EpollPoller())
    pool.start()
    done: list[str] = []
    going, seen = threading.Event(), threading.Event()

    def late() -> None:
        going.set()
        eventually(lambda: pool._stopped)
        pool.submit_system(lambda: done.append("what can be left"))
        pool.submit_final(lambda: done.append("what cannot"))
        seen.set()

    pool.submit(late)
    assert going.wait(10.0)
    assert pool.stop(10.0) == 0
    assert seen.is_set()
    assert done == ["what cannot"]


def test_a_pool_may_be_stopped_by_one_of_its_own() -> None:
    pool = WorkerPool("test", 4, EpollPoller())
    pool.start()
    left: list[int] = []
    pool.submit(lambda: left.append(pool.stop(2.0)))
    eventually(lambda: left)
    assert left == [1], "itself"
