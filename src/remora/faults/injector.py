"""Carries out a plan: asks its runner about every message, and breaks, holds and mends the links of its workers.

A stage is where a plan is at work: for one worker, in a process of its own, or for all workers of a world in one process.
Each worker has an injector there. A worker injects faults into what it *sends*; links that are cut, it cuts on its side.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from remora.clock import NEVER, SYSTEM, Clock
from remora.faults.plan import Plan
from remora.faults.plan_runner import PlanRunner, Record
from remora.transport.fault_link import Fate, Pipe
from remora.transport.fault_pump import Pump
from remora.transport.link import StreamLink
from remora.vocabulary.messages import MessageType

Message = tuple[str, str, MessageType]  # sender, receiver, type


class Report(list[Record]):
    """A list of what was done to which message. It prints one record a line."""

    @property
    def records(self) -> list[Record]:
        return list(self)

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing was done"

    __repr__ = __str__


class Stage:
    """A plan at work, and the workers it works on."""

    def __init__(
        self, name: str, plan: Plan | str = "", shared: bool = False, clock: Clock = SYSTEM, seed: int | None = None
    ) -> None:
        self.clock = clock
        self._seed = seed  # decides what is left to chance, whatever the plan says
        self.shared = shared  # all workers are here: each message is seen where it leaves, and counted there alone
        self.injectors: list[Injector] = []
        self._leavers: list[Injector] = []
        self.pump = Pump(name, clock)
        # Reentrant: a destructor that makes a call may run while it is held.
        self._lock = threading.RLock()  # guards: the execution of the plan, the counts, the list of injectors
        self._records: list[Record] = []
        self._began = self.clock.now()
        self._seen: Counter[Message] = Counter()
        self.runner: PlanRunner
        self.set(plan)

    def set(self, plan: Plan | str) -> None:
        """Have another plan from now on: counting begins anew, and what was cut or frozen is as this one says. It is at work
        when this returns."""
        parsed = Plan.parse(plan) if isinstance(plan, str) else plan
        if self._seed is not None:
            parsed = replace(parsed, seed=self._seed)
        with self._lock:
            self.runner = PlanRunner(parsed, self.clock.now(), self._records, self._began)
        if self.injectors:
            self.pump.run(self._look)

    @property
    def plan(self) -> Plan:
        return self.runner.plan

    def heal(self) -> None:
        """Restore what is cut or frozen now, before this returns."""
        with self._lock:
            self.runner.heal(self.clock.now())
        self.pump.run(self._look)

    def report(self) -> Report:
        """Return what was done so far."""
        with self._lock:
            return Report(self._records)

    def messages(self) -> Counter[Message]:
        """Return the number of messages of each type that left each worker for each other, whatever became of them."""
        with self._lock:
            return Counter(self._seen)

    @property
    def idle(self) -> bool:
        """Return True if all that the plan has begun is done, or waits for time to pass."""
        with self._lock:
            injectors = [*self.injectors, *self._leavers]
        return self.pump.idle and not any(injector.dying for injector in injectors)

    def join(self, me: str, kill: Callable[[], None] | None = None) -> Injector:
        """The part of one worker. `kill` ends it; by default its process kills itself, and is stopped to freeze."""
        injector = Injector(self, me, kill)
        with self._lock:
            self.injectors.append(injector)
        if self.runner.next_time != NEVER or self.runner.killed or self.runner.frozen:
            self.pump.do(self._look)
        return injector

    def leave(self, injector: Injector) -> None:
        """A worker ended."""
        with self._lock:
            if injector in self.injectors:
                self.injectors.remove(injector)
                self._leavers.append(injector)
            last = not self.injectors
        self.pump.do(injector.close_pipes)
        if last:
            self.pump.do(self.pump.cancel_all)

    # What injectors ask.

    def attempt(self, sender: str, receiver: str, kind: int, payload: bytes) -> bool:
        with self._lock:
            return self.runner.attempt(sender, receiver, kind, payload, self.clock.now())

    def leaving(self, sender: str, receiver: str, kind: int, number: int) -> Fate:
        with self._lock:
            if number:
                self._seen[sender, receiver, MessageType(kind)] += 1
            return self.runner.leaving(sender, receiver, kind, number > 0, self.clock.now())

    def passed(self, sender: str, receiver: str, kind: int, number: int) -> None:
        with self._lock:
            happened = self.runner.passed(sender, receiver, kind, number > 0, self.clock.now())
        if happened:
            self._look()

    def severed(self, one: str, other: str) -> bool:
        with self._lock:
            return self.runner.severed(one, other)

    def _look(self) -> None:
        """Do what the runner says now. Runs on the pump's thread, at every change and whenever a time has come."""
        with self._lock:
            self.runner.advance(self.clock.now())
            next_time = self.runner.next_time
            injectors = list(self.injectors)
        for injector in injectors:
            injector.look(self.runner)
        if next_time != NEVER:
            self.pump.at(next_time, self._look)  # (once too often does no harm)


class _Link:
    """A link of a worker: decides what becomes of its frames, and holds its pipe."""

    def __init__(self, stage: Stage, me: str, peer: str) -> None:
        self.stage = stage
        self.me = me
        self.peer = peer
        self.shut = False  # made while the link was cut: silent until it is healed
        self.pipe: Pipe

    def leaving(self, kind: int, number: int) -> Fate:
        return self.stage.leaving(self.me, self.peer, kind, number)

    def left(self, kind: int, number: int) -> None:
        self.stage.passed(self.me, self.peer, kind, number)

    def arrived(self, kind: int, number: int) -> None:
        if not self.stage.shared:  # else it was counted when it left
            self.stage.passed(self.peer, self.me, kind, number)


class Injector:
    """The part of one worker in a plan."""

    def __init__(self, stage: Stage, me: str, kill: Callable[[], None] | None) -> None:
        self.stage = stage
        self.me = me
        self._kill = kill
        self._links: list[_Link] = []  # of the pump's thread
        self._end: threading.Thread | None = None  # ends the worker
        self._stopped_until = 0.0

    def insert(self, link: StreamLink, peer: str, leftover: bytes) -> StreamLink:
        """Have what this link carries pass the plan. `leftover` was read from it already."""
        ours = _Link(self.stage, self.me, peer)
        sock = self.stage.pump.insert(link.sock, ours, leftover, lambda pipe: self._adopt(ours, pipe))
        return StreamLink(sock, link.where, clock=link.clock)

    def close(self) -> None:
        """The worker ended."""
        self.stage.leave(self)

    # On the pump's thread.

    def _adopt(self, link: _Link, pipe: Pipe) -> None:
        link.pipe, link.shut = pipe, self.stage.severed(self.me, link.peer)
        self._links = [other for other in self._links if not other.pipe.closed] + [link]
        pipe.held = link.shut or self._silent(self.stage.runner)

    def look(self, runner: PlanRunner) -> None:
        """Cut, hold and mend our links as the runner says, and end if it says so."""
        if self.me in runner.killed and self._end is None:
            self._end = threading.Thread(target=self._kill or _kill_process, name=f"remora-faults-kill-{self.me}")
            self._end.start()
        if self._kill is None and runner.frozen.get(self.me, 0.0) > self._stopped_until:
            self._stopped_until = runner.frozen[self.me]
            _stop_process(self._stopped_until)
        for link in [link for link in self._links if not link.pipe.closed]:
            cut = self.stage.severed(self.me, link.peer)
            if cut and not link.shut:
                link.pipe.sever()
            else:
                link.shut = cut
                link.pipe.held = cut or self._silent(runner)

    @property
    def dying(self) -> bool:
        """Return True if it is about to end."""
        return self._end is not None and self._end.is_alive()

    def _silent(self, runner: PlanRunner) -> bool:
        """Return True if this worker is to seem frozen. One with a process of its own is stopped instead."""
        return self._kill is not None and self.me in runner.frozen

    def close_pipes(self) -> None:
        for link in self._links:
            if not link.pipe.closed:
                link.pipe.sever()


def _kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Wakes a process at a time, and again until it notices: it may be stopped late. It ends when told to, or with
# its parent.
_WAKER = """
import os, select, signal, sys, time
pause = float(sys.argv[2]) - time.monotonic()
while not select.select([0], [], [], max(pause, 0.0))[0]:
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    pause = 0.01
"""


def _stop_process(until: float) -> None:
    """Stop this process. Another process wakes it up: one that does nothing but wait for the time."""
    command = [sys.executable, "-ISc", _WAKER, str(os.getpid()), repr(until)]
    # At the end of the block it is told that we are awake.
    with nullcontext() if until == NEVER else subprocess.Popen(command, stdin=subprocess.PIPE):
        # (A signal to the process may reach another thread, while this one goes on.)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
