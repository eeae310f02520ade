"""The thread pool of a worker: its threads watch the links and run what arrives. Knows nothing of messages.

A thread that gets an event reads the link and runs the requested function itself, without waking another thread first. The
pool runs four kinds of tasks:

    user tasks         functions of the program, limited in number; further ones wait
    system tasks       Remora's own work that may block: completing futures, connecting
    nonblocking tasks  Remora's own work that cannot block and takes no time
    idle tasks         nonblocking work that can wait until the current thread has nothing else to do

Three rules keep this free of deadlock:

    C1  One thread always leads or follows (`agent.runtime.leader_followers`). A thread that is about to run a task that may
        block makes sure of it, and starts a thread if none is left.
    C2  At most `limit` user tasks run at once. A thread that waits for a remote call inside a user task does not count
        (`current.blocking_region`), so calls may nest to any depth with a limit of one.
    C3  System tasks never wait for a slot.

Threads are daemons. The pool starts them when needed, and spare followers end after a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Set
from contextvars import Context
from functools import partial

from remora.agent.runtime.clean_state import begin_thread, is_clean, make_clean
from remora.agent.runtime.current import thread_state
from remora.agent.runtime.leader_followers import THRESHOLDS, LeaderFollowers
from remora.clock import SYSTEM, Clock
from remora.protocol.leader import Thresholds
from remora.transport.poller import Event, Poller

log = logging.getLogger("remora")

Task = Callable[[], None]


class WorkerPool:
    """Runs tasks on threads that also watch the poller."""

    def __init__(
        self,
        name: str,
        limit: int,
        poller: Poller,
        clock: Clock = SYSTEM,
        thresholds: Thresholds = THRESHOLDS,
        worker: object = None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.worker = worker  # the worker for which the threads act
        self.limit = limit
        self._poller = poller
        self.leader = LeaderFollowers(poller, self._start_thread, self._queued, thresholds)
        self.about_to_block = self.leader.leader_blocks
        # The current thread is about to answer, and has nothing else to do. It returns the time of the worker's clock.
        self.nearly_done = self.leader.nearly_done if clock is SYSTEM else partial(_nearly_done, self.leader, clock)
        # Nothing is called or made while it is held: the collector could run a destructor there, which might wait for a
        # user task that needs a slot.
        self._lock = threading.RLock()  # guards: _active
        self._active = 0  # user tasks that run, without those that wait for something remote
        self._threads: set[threading.Thread] = set()  # each change is one operation, which needs no lock
        self.user_tasks: deque[Task] = deque()  # user tasks that wait for a slot
        self._system_tasks: deque[Task] = deque()
        self._nonblocking: deque[Task] = deque()
        self._idle_tasks: deque[Task] = deque()
        self._woken_for_tasks = False  # a thread was woken for user tasks and has not come yet
        self._stopped = False
        self._left_behind = False  # `stop` waits no longer for threads that have not ended
        self._key = {0: True}  # the thread that takes it closes the poller

    # The threads.

    def start(self) -> None:
        """Start the first thread."""
        self.leader.ensure_follower()

    def _start_thread(self) -> None:
        """Start a thread, which counts as a follower from now on, so that no other thread starts one for the same need."""
        thread = threading.Thread(target=self._work, name=f"remora-{self.name}-{len(self._threads)}", daemon=True)
        self._threads.add(thread)  # first: `stop` sets `_stopped`, and then looks which threads there are
        if self._stopped:
            self._threads.discard(thread)
            return
        try:
            thread.start()
        except RuntimeError:  # the interpreter is going down: the threads that exist must do
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
                    self.leader.stop()  # wake the next thread to end
            elif self._left_behind:
                self._lock_up()

    def _handle(self, events: list[Event]) -> None:
        """Handle events, and run the tasks that they queue. C1: another thread follows (`LeaderFollowers.events`)."""
        thread_state.handling_events_of = self
        self._woken_for_tasks = False  # from here on it sees the user tasks
        for source, what in events:
            try:
                source.ready(what)
            except BaseException:
                _report()
        thread_state.handling_events_of = None
        if self._nonblocking:
            _run_all(self._nonblocking)
        while self._system_tasks:
            self._run_system_task()
        if self.user_tasks:
            self._run_user_tasks()
        if self._idle_tasks:
            _run_all(self._idle_tasks)

    def _queued(self) -> int:
        runnable = len(self.user_tasks) if self._active < self.limit else 0
        return runnable + len(self._system_tasks) + len(self._nonblocking)

    # User tasks, limited in number (C2).

    def submit(self, task: Task) -> None:
        """Queue a user task. (A thread that handles an event runs them next, and only needs to append.)"""
        if not self._stopped:
            self.user_tasks.append(task)
            self._wake_for_user_tasks()

    def _wake_for_user_tasks(self) -> None:
        if not self._woken_for_tasks and self._active < self.limit:
            self._woken_for_tasks = True
            self.leader.wake()

    def _run_user_tasks(self) -> None:
        """Run the user tasks, one after the other, while there is a slot."""
        done = 0
        while True:
            with self._lock:
                self._active -= done
                if not self.user_tasks or self._active >= self.limit or self._stopped:
                    return
                self._active += 1
            done = 1
            try:
                task = self.user_tasks.popleft()
            except IndexError:
                continue  # another thread was faster
            self.leader.before_task()  # C1
            thread_state.in_user_task = True
            try:
                Context().run(task)  # context variables end with the task: the next one is another caller's
            except BaseException:
                log.exception("a task of %s failed", self.name)
            thread_state.in_user_task = False
            if not is_clean():
                make_clean()
            del task  # not under the lock: dropping it may run destructors of the program

    def release_slot(self) -> None:
        """Free the slot of the current thread, which is about to wait for something remote in a user task (C2)."""
        with self._lock:
            self._active -= 1
        self.leader.leader_blocks()
        if self.user_tasks:
            self._wake_for_user_tasks()

    def reacquire_slot(self) -> None:
        """Count the slot again. The limit may be exceeded for a moment: the task must go on."""
        with self._lock:
            self._active += 1

    # Remora's own work, unlimited (C3).

    def submit_system(self, task: Task) -> None:
        """Run a system task soon, whatever the load. Safe in destructors: it takes no lock."""
        if self._stopped:
            return
        self._system_tasks.append(task)
        if thread_state.handling_events_of is not self:
            self.leader.wake()

    def submit_final(self, task: Task) -> None:
        """Run a system task that must run even if the pool stops: then the thread in `stop` runs it."""
        self._system_tasks.append(task)
        if not self._stopped and thread_state.handling_events_of is not self:
            self.leader.wake()

    def call_soon(self, task: Task) -> None:
        """Run a nonblocking task soon. No thread is woken to follow meanwhile."""
        if self._stopped:
            return
        self._nonblocking.append(task)
        if thread_state.handling_events_of is not self:
            self.leader.wake()

    def look_again(self) -> None:
        """Wake a thread if tasks are left. The tick calls this: an exception may have interrupted a thread after it queued
        a task and before it woke the pool."""
        if (self._system_tasks or self._nonblocking) and not self._stopped:
            self.leader.wake()

    def call_idle(self, task: Task) -> None:
        """Run a nonblocking task that no thread waits for when the current thread has nothing else to do: now, if it is
        not a thread of the pool."""
        if thread_state.pool is self:
            self._idle_tasks.append(task)
        else:
            _shielded(task)

    def _run_system_task(self) -> None:
        try:
            task = self._system_tasks.popleft()
        except IndexError:
            return
        self.leader.before_task()  # C1
        _shielded(Context().run, task)
        if not is_clean():
            make_clean()

    # Figures, and the end.

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of threads, of idle threads, and of running user tasks."""
        return len(self._threads), max(self.leader.idle, 0), self._active

    def busy(self, asleep: Set[threading.Thread]) -> int:
        """Return the number of running and queued tasks, without those of threads that sleep. For tests."""
        at_work = len(self._threads - asleep) - self.leader.idle
        return at_work + len(self.user_tasks) + len(self._system_tasks) + len(self._nonblocking) + len(self._idle_tasks)

    def abandon(self) -> None:
        """Stop in a forked child, which has none of the threads."""
        self._stopped = True
        self._lock = threading.RLock()  # one of the parent's threads may have held the other one

    def stop(self, timeout: float) -> int:
        """End the threads. Return how many still run a function after `timeout` seconds; the last one closes the poller."""
        self._stopped = True
        threads = self._threads - {threading.current_thread()}
        self.user_tasks.clear()  # their callers get WorkerLost
        end = time.monotonic() + timeout
        for thread in threads:
            while (thread.is_alive() or thread in self._threads) and time.monotonic() < end:
                self.leader.stop()
                if thread.is_alive():
                    thread.join(0.02)
                else:
                    time.sleep(0.001)  # another thread is starting it at this moment
        _run_all(self._nonblocking)
        while self._system_tasks:
            self._run_system_task()
        _run_all(self._idle_tasks)
        stuck = len(self._threads)
        self._left_behind = True  # from here on, the last thread sees that it is the last; or this one does
        if not self._threads:
            self._lock_up()
        return stuck

    def _lock_up(self) -> None:
        """Close the poller, once: of several threads that find that none is left, one takes the key."""
        if self._key.pop(0, None) is not None:
            self._poller.close()


def _nearly_done(leader: LeaderFollowers, clock: Clock) -> float:
    """`LeaderFollowers.nearly_done` under another clock than the system's."""
    leader.nearly_done()
    return clock.now()


def _run_all(queue: deque[Task]) -> None:
    while queue:
        try:
            task = queue.popleft()
        except IndexError:
            return  # another thread was faster
        try:
            task()
        except BaseException:
            _report()


def _shielded(work: Callable[..., None], *args: object) -> None:
    try:
        work(*args)
    except BaseException:
        _report()


def _report() -> None:
    log.exception("unexpected failure while serving")
