"""The threads of a worker: they watch its links and run what arrives. Knows nothing of messages.

All threads are alike. Each waits at the poller; the one that gets an event reads the link and runs the function that was
asked for itself, without waking another thread first. Three rules keep this free of deadlock:

    C1  Somebody is always on watch, or stands by (`agent.runtime.leader`). A thread that is about to run user code makes
        sure of it, and starts a thread if nobody is left.
    C2  At most `limit` jobs run at once; further ones wait in the backlog. A thread that waits for a remote call inside
        a job does not count (`blocking_region`), so calls may nest to any depth with a limit of one.
    C3  Service work (completing futures, answering pings, connecting) never waits for a place among the jobs.

Threads are daemons, started when needed, and kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from remora.agent.runtime.clean_state import begin_thread, is_clean, make_clean
from remora.agent.runtime.leader_followers import THRESHOLDS, LeaderFollowers
from remora.clock import SYSTEM, Clock
from remora.protocol.leader import Thresholds
from remora.transport.poller import Event, Poller

log = logging.getLogger("remora")

Task = Callable[[], None]


class _ThreadState(threading.local):
    """What the current thread is doing."""

    pool: WorkerPool | None = None
    in_job = False
    handling_events_of: WorkerPool | None = None  # whose events it handles, before it looks at the services itself
    worker: Any = None  # whose thread this is, or for whom it acts


thread_state = _ThreadState()


def current_worker() -> Any:
    """The worker whose function the current thread runs; None on threads of the program."""
    return thread_state.worker


def current_clock() -> Clock:
    """The clock of the worker for whom the current thread acts; the system's for any other thread."""
    return getattr(thread_state.worker, "clock", SYSTEM)


def reset_thread_state() -> None:
    """In a forked child: the thread that lives on was a thread of the parent's worker, perhaps."""
    thread_state.pool = thread_state.handling_events_of = None
    thread_state.in_job = False
    thread_state.worker = None


def set_current_worker(worker: object) -> object:
    """Let calls made by the current thread be calls of `worker`. Returns for whom it acted before."""
    before, thread_state.worker = thread_state.worker, worker
    return before


@contextmanager
def blocking_region() -> Iterator[None]:
    """Wrap every wait for something remote: if this thread runs a job of some worker, its place is free meanwhile."""
    pool = release_slot()
    try:
        yield
    finally:
        if pool is not None:
            reacquire_slot(pool)


def release_slot() -> WorkerPool | None:
    """What `blocking_region` does at first, for those in a hurry. If this thread runs a job: of whom."""
    pool = thread_state.pool
    if not thread_state.in_job or pool is None:
        if pool is not None:
            pool.about_to_block()  # in a service: it has no place to give away, but others must see to what comes
        return None
    thread_state.in_job = False
    pool.release_slot()
    return pool


def reacquire_slot(pool: WorkerPool) -> None:
    """And at last."""
    pool.reacquire_slot()
    thread_state.in_job = True


class WorkerPool:
    """Runs jobs and services on threads that also watch the poller."""

    def __init__(
        self, name: str, limit: int, poller: Poller, clock: Clock = SYSTEM, thresholds: Thresholds = THRESHOLDS
    ) -> None:
        self.name = name
        self.clock = clock
        self.worker: object = None  # for whom its threads act
        self.limit = limit
        self._poller = poller
        self.leader = LeaderFollowers(poller, self._start_thread, self._queued, thresholds)
        self.nearly_done = self.leader.nearly_done  # the current thread is about to answer, and has nothing left to do then
        # Nothing is called or made while it is held: the collector could run a destructor there, which might wait for a
        # job that needs a place.
        self._lock = threading.RLock()  # guards: the count of jobs that run
        self._active = 0
        self._threads: set[threading.Thread] = set()  # each change is one operation, which needs no lock
        self.backlog: deque[Task] = deque()  # jobs that wait for a place
        self._system_tasks: deque[Task] = deque()
        self._nonblocking: deque[Task] = deque()
        self._idle_tasks: deque[Task] = deque()
        self._woken_for_backlog = False  # somebody was woken for the backlog and has not come yet
        self._stopped = False
        self._left_behind = False  # `stop` waits no longer for threads that have not gone home
        self._key = {0: True}  # the thread that takes it closes the poller

    # The threads.

    def start(self) -> None:
        """Start the first thread."""
        self.leader.ensure_follower()

    def _start_thread(self) -> None:
        """Start a thread, which is counted as being on watch from now, so that nobody else starts one for the same need."""
        thread = threading.Thread(target=self._work, name=f"remora-{self.name}-{len(self._threads)}", daemon=True)
        self._threads.add(thread)  # first: `stop` says that it stops, and then looks who is there
        if self._stopped:
            self._threads.discard(thread)
            return
        try:
            thread.start()
        except RuntimeError:  # the interpreter is going down: those who are here must do
            self._threads.discard(thread)
            self.leader.add_idle(-1)

    def _work(self) -> None:
        thread_state.pool = self
        thread_state.worker = self.worker
        begin_thread()
        leader = self.leader
        try:
            events: list[Event] | None = leader.wait()
            while events is not None:
                self._handle(events)
                events = None if self._stopped else leader.events()
        finally:
            if not self._stopped:
                leader.leave()
            self._threads.discard(threading.current_thread())
            if self._threads:
                if self._stopped:
                    self.leader.stop()  # pass the news on
            elif self._left_behind:
                self._lock_up()

    def _handle(self, events: list[Event]) -> None:
        """Take in what came, and run it. C1: another thread follows (`LeaderFollowers.events`)."""
        thread_state.handling_events_of = self
        self._woken_for_backlog = False  # from here on it sees what is in the backlog
        for source, what in events:
            try:
                source.ready(what)
            except BaseException:
                _report()
        thread_state.handling_events_of = None
        if self._nonblocking:
            self._run_nonblocking()
        while self._system_tasks:
            self._run_system_task()
        if self.backlog:
            self._run_jobs()
        while self._idle_tasks:
            self._do_one(self._idle_tasks)

    def _queued(self) -> int:
        jobs = len(self.backlog) if self._active < self.limit else 0
        return jobs + len(self._system_tasks) + len(self._nonblocking)

    # Jobs: user code, limited in number.

    def submit(self, job: Task) -> None:
        """Queue a job. (Whoever handles an event looks at the backlog itself next, and need not do more than append.)"""
        if not self._stopped:
            self.backlog.append(job)
            self._wake_for_backlog()

    def _wake_for_backlog(self) -> None:
        if not self._woken_for_backlog and self._active < self.limit:
            self._woken_for_backlog = True
            self.leader.wake()

    def _run_jobs(self) -> None:
        """Run what is in the backlog, one after the other, while there is a place for it."""
        done = 0
        while True:
            with self._lock:
                self._active -= done
                if not self.backlog or self._active >= self.limit or self._stopped:
                    return
                self._active += 1
            done = 1
            try:
                job = self.backlog.popleft()
            except IndexError:
                continue  # another thread was faster
            self.leader.before_task()  # C1
            thread_state.in_job = True
            try:
                Context().run(job)  # what it sets there is gone with it: the next one is another caller's
            except BaseException:
                log.exception("a job of %s failed", self.name)
            thread_state.in_job = False
            if not is_clean():
                make_clean()
            del job  # not under the lock: with it may go what the program made, and code of the program runs then

    def _active_add(self, n: int) -> None:
        with self._lock:
            self._active += n

    def about_to_block(self) -> None:
        """The current thread is going to wait: others are to do what comes."""
        self.leader.leader_blocks()

    def release_slot(self) -> None:
        """C2: the current thread, which runs a job, is about to wait for something remote."""
        self._active_add(-1)
        self.leader.leader_blocks()
        if self.backlog:
            self._wake_for_backlog()

    def reacquire_slot(self) -> None:
        """It waits no longer. The limit may be passed for a moment: the job must go on."""
        self._active_add(+1)

    # Services: our own work, unlimited (C3).

    def submit_system(self, service: Task) -> None:
        """Have a thread of the pool run `service` soon, whatever the load. Safe in destructors: it takes no lock."""
        if self._stopped:
            return
        self._system_tasks.append(service)
        if thread_state.handling_events_of is not self:
            self.leader.wake()

    def submit_final(self, service: Task) -> None:
        """The same for what must be done even if everybody is going home: whoever stops the pool does it then."""
        self._system_tasks.append(service)
        if not self._stopped and thread_state.handling_events_of is not self:
            self.leader.wake()

    def call_soon(self, service: Task) -> None:
        """The same for what cannot block and takes no time: nobody is woken to stand by meanwhile."""
        if self._stopped:
            return
        self._nonblocking.append(service)
        if thread_state.handling_events_of is not self:
            self.leader.wake()

    def look_again(self) -> None:
        """Called at each tick. An exception may have struck a thread between leaving work to the pool and waking it."""
        if (self._system_tasks or self._nonblocking) and not self._stopped:
            self.leader.wake()

    def call_idle(self, work: Task) -> None:
        """Do what takes no time, and what nobody waits for, when the current thread has nothing else to do: now, if it is
        none of the pool."""
        if thread_state.pool is self:
            self._idle_tasks.append(work)
        else:
            _shielded(work)

    def _run_nonblocking(self) -> None:
        while self._nonblocking:
            self._do_one(self._nonblocking)

    def _do_one(self, queue: deque[Task]) -> None:
        try:
            work = queue.popleft()
        except IndexError:
            return  # another thread was faster
        try:
            work()
        except BaseException:
            _report()

    def _run_system_task(self) -> None:
        try:
            service = self._system_tasks.popleft()
        except IndexError:
            return
        self.leader.before_task()  # C1
        _shielded(Context().run, service)
        if not is_clean():
            make_clean()

    # Figures, and the end.

    def counts(self) -> tuple[int, int, int]:
        """(threads, threads on watch, jobs running)."""
        return len(self._threads), max(self.leader.idle, 0), self._active

    def busy(self, asleep: Set[threading.Thread]) -> int:
        """For tests: how much is being done or is to be done, not counting what is done by threads that sleep."""
        at_work = len(self._threads - asleep) - self.leader.idle
        return at_work + len(self.backlog) + len(self._system_tasks) + len(self._nonblocking) + len(self._idle_tasks)

    def abandon(self) -> None:
        """In a forked child: there are no threads, and nothing is to be done."""
        self._stopped = True
        self._lock = threading.RLock()  # one of the parent's threads may have held the other one

    def stop(self, patience: float) -> int:
        """Let the threads go home. How many still run a function after `patience` seconds; the last one locks up."""
        self._stopped = True
        threads = self._threads - {threading.current_thread()}
        self.backlog.clear()  # their callers have lost us
        end = time.monotonic() + patience
        for thread in threads:
            while (thread.is_alive() or thread in self._threads) and time.monotonic() < end:
                self.leader.stop()
                if thread.is_alive():
                    thread.join(0.02)
                else:
                    time.sleep(0.001)  # another one is starting it at this moment
        self._run_nonblocking()
        while self._system_tasks:
            self._run_system_task()
        while self._idle_tasks:
            self._do_one(self._idle_tasks)
        stuck = len(self._threads)
        self._left_behind = True  # from here on, the last thread sees that it is the last; or we do
        if not self._threads:
            self._lock_up()
        return stuck

    def _lock_up(self) -> None:
        """Close the poller, once: of several threads that find that none is left, one gets the key."""
        if self._key.pop(0, None) is not None:
            self._poller.close()


def _shielded(work: Callable[..., None], *args: object) -> None:
    try:
        work(*args)
    except BaseException:
        _report()


def _report() -> None:
    log.exception("unexpected failure while serving")
