"""Keeps a set of processes running by their policies, passes signals on, and leaves none behind.

There are no threads of its own: processes are restarted by the thread that calls `wait`. Other threads may call `start` and
`stop` meanwhile. No lock: a name is reserved by one `dict.setdefault` before its process is started, a process is taken out
of a queue by the thread that records its end, and `stop` marks what it ends before it looks at what runs, so that a thread
that is just restarting one sees the mark, or is seen. Unix only.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

from remora.options import check_timeout
from remora.supervision.child import DESCENDANT_TIMEOUT, Child, Streams, Target, check_target
from remora.supervision.policy import RestartPolicy, Restarts

log = logging.getLogger("remora")

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_AGAIN = 0.05  # where the end of a process does not wake us
REAP_TIMEOUT = DESCENDANT_TIMEOUT + 1.0  # seconds that another thread may need to record the end of a process


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a process: its last exit code (negative: the signal that ended it), the number of restarts, and True if
    the supervisor ended it."""

    code: int
    restarts: int
    ended: bool = False


@dataclass
class _Charge:
    """One supervised process, over all its restarts."""

    name: str
    target: Target
    args: tuple[Any, ...]
    env: Mapping[str, str]
    restarts: Restarts
    streams: Streams | None = None
    running: deque[Child] = field(default_factory=deque)  # one at most; the thread that takes it out records its end
    starter: int | None = None  # the thread that is starting it
    due: float | None = None  # when it is to be started (again)
    outcome: Outcome | None = None  # for good
    stopped: bool = False  # by `stop`: it is not started again, whatever a thread has decided before it saw this
    code: int = 0  # with which its process ended last

    @property
    def child(self) -> Child | None:
        """Return the process, if it runs."""
        try:
            return self.running[0]
        except IndexError:
            return None

    def start(self) -> None:
        self.due = None
        self.starter = threading.get_ident()
        try:
            if not self.stopped:
                environment = {**os.environ, **self.env, "REMORA_RESTARTS": str(self.restarts.made)}
                self.running.append(Child(self.target, self.args, environment, self.streams))
        finally:
            self.starter = None

    def reap(self) -> Child | None:
        """End its process, if that still runs, and record it. Return None if there is none, or another thread does it."""
        try:
            child = self.running.popleft()
        except IndexError:
            return None
        self.code = child.reap()
        return child

    def finish(self, ended: bool) -> None:
        self.due = None
        self.outcome = Outcome(self.code, self.restarts.made, ended)

    def restart_at(self, due: float | None) -> None:
        """Restart it, whatever its outcome was."""
        self.outcome = None
        self.due = due
        if self.stopped:
            self.finish(ended=True)


class _Waker:
    """Wakes the thread in `wait`. Its descriptors are closed when no thread uses it any more."""

    def __init__(self) -> None:
        self.descriptor, self.write_end = os.pipe()  # the one to watch, the one to write to
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self.write_end, False)

    def ring(self) -> None:
        try:
            os.write(self.write_end, b"\0")
        except BlockingIOError:
            pass  # it rings

    def hush(self) -> None:
        try:
            while os.read(self.descriptor, 512):
                pass
        except BlockingIOError:
            pass

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # (there may be no globals any more)
        close(self.descriptor)
        close(self.write_end)


class Supervisor:
    """Keeps processes running, restarts those that fail, and ends them all together.

    restart: the processes to restart when one fails: that `one`, which suits workers of a dynamic group, or `all`, which
        a static group needs, since it ends with its first member that dies.
    together: when a process has failed for good, end the others, which would wait in vain.
    grace: seconds a process has to end after SIGTERM, before it is killed.
    """

    def __init__(
        self,
        policy: RestartPolicy | None = None,
        *,
        restart: Literal["one", "all"] = "one",
        together: bool = True,
        grace: float = 10.0,
    ) -> None:
        if restart not in ("one", "all"):
            raise ValueError(f"restart must be 'one' or 'all', got {restart!r}")
        self._policy = policy or RestartPolicy()
        self._restart_all = restart == "all"
        self._shared = Restarts(self._policy)  # of all together
        self._together = together
        self._grace = check_timeout(grace, "grace")
        self._charges: dict[str, _Charge] = {}
        # Names that are taken, but not to be seen by `wait` and `stop` before there is a process.
        self._starting: dict[str, _Charge] = {}
        self._wakers: list[_Waker] = []  # of the threads in `wait`
        self._signal: int | None = None  # that asked us to end

    def start(
        self,
        name: str,
        target: Target,
        *args: Any,
        env: Mapping[str, str] | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Start a process, of a function (called with `args`) or a command. `REMORA_RESTARTS` tells it how often it was
        restarted. `streams` are descriptors in the place of our own standard output and standard error, also after restarts.
        The name of a process that has ended for good may be used again."""
        check_target(name, target)
        restarts = self._shared if self._restart_all else Restarts(self._policy)
        charge = _Charge(name, target, args, env or {}, restarts, streams)
        if self._starting.setdefault(name, charge) is not charge:  # in one step: of two threads, one gets the name
            raise ValueError(f"there is a process {name!r} already: another thread is starting it")
        try:
            known = self._charges.get(name)
            if known is not None and known.outcome is None:
                raise ValueError(f"there is a process {name!r} already")
            charge.start()
            self._charges[name] = charge
        finally:
            del self._starting[name]
        self._ring()

    def pids(self) -> dict[str, int]:
        """Return the ids of the processes that run now, by name."""
        children = [(charge.name, charge.child) for charge in self._all()]
        return {name: child.pid for name, child in children if child is not None}

    def wait(self, timeout: float | None = None) -> dict[str, Outcome]:
        """Keep the processes running until all have ended for good. Return the outcome of each, by name.

        SIGINT, SIGTERM and SIGHUP are passed on to the processes; when they have ended, the signal takes its usual course
        here. TimeoutError, with the processes still running, if that takes longer than `timeout`. Another thread may call
        `stop` meanwhile, which ends this, too.
        """
        end = None if timeout is None else time.monotonic() + check_timeout(timeout, "the timeout of Supervisor.wait")
        waker = _Waker()
        self._wakers.append(waker)
        try:
            with self._signals_heard(waker):
                while self._signal is None and self._unfinished():
                    self._start_due()
                    self._sleep(waker, end)
                    self._reap()
                    if end is not None and time.monotonic() >= end and (names := self._unfinished()):
                        raise TimeoutError(f"still running after {timeout:g} s: {', '.join(names)}")
                if self._signal is not None:
                    self.stop(self._signal)
        finally:
            self._wakers.remove(waker)
        if self._signal is not None:
            number, self._signal = self._signal, None
            signal.raise_signal(number)
        return {charge.name: charge.outcome for charge in self._all() if charge.outcome is not None}

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End all processes: with that signal, and with SIGKILL if they do not end in time. For any thread."""
        if not isinstance(number, int):
            got = f"{type(number).__name__} {number!r}"
            raise TypeError(f"stop ends all processes, with a signal (signal.SIGTERM); got {got}.")
        charges = self._all()
        for charge in charges:
            charge.stopped = True  # before we look at what runs
        for charge in charges:
            while charge.starter not in (None, threading.get_ident()):  # (this very thread starts it when we return)
                time.sleep(0.001)
        self._end(charges, number)
        for charge in charges:
            if charge.outcome is None:
                charge.finish(ended=True)
        self._ring()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # The work.

    def _all(self) -> list[_Charge]:
        return list(self._charges.values())  # (another thread may start one meanwhile)

    def _ring(self) -> None:
        for waker in list(self._wakers):
            waker.ring()

    def _unfinished(self) -> list[str]:
        """Return the names of the processes that run, or wait for a restart."""
        return [charge.name for charge in self._all() if charge.outcome is None]

    def _start_due(self) -> None:
        now = time.monotonic()
        for charge in self._all():
            due = charge.due
            if due is not None and due <= now:
                charge.start()
                if charge.stopped:  # meanwhile, on this very thread (by a signal handler)
                    self._end([charge], signal.SIGTERM)

    def _reap(self) -> None:
        for charge in self._all():
            child = charge.child
            if child is not None and child.ended and charge.reap() is child:
                self._decide(charge, time.monotonic() - child.started)

    def _decide(self, charge: _Charge, ran_for: float) -> None:
        """Decide what follows after a process ended, by itself or because of `stop`."""
        code = charge.code
        delay = None if charge.stopped else charge.restarts.after(code, ran_for)
        if delay is None:
            charge.finish(ended=charge.stopped)
            if charge.stopped or code == 0:
                return
            log.error("%s ended with exit code %d after %d restarts", charge.name, code, charge.restarts.made)
            if self._together:
                self.stop()
            return
        log.warning("%s ended with exit code %d: it is started again in %.1f s", charge.name, code, delay)
        charge.restart_at(time.monotonic() + delay)
        if self._restart_all and code != 0:
            self._restart_others(charge)

    def _restart_others(self, failed: _Charge) -> None:
        due = failed.due
        others = [charge for charge in self._all() if charge is not failed]
        self._end(others, signal.SIGTERM)
        for charge in others:
            charge.restart_at(due)

    def _end(self, charges: list[_Charge], number: int) -> None:
        """End these processes now."""
        running = [charge for charge in charges if charge.child is not None]
        children = [child for charge in running if (child := charge.child) is not None]
        for child in children:
            child.signal(number)
            child.signal(signal.SIGCONT)  # a stopped process would not get the signal
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and not all(child.ended for child in children):
            time.sleep(0.01)
        for charge in running:
            if charge.reap() is not None:
                charge.finish(ended=True)
        deadline = time.monotonic() + REAP_TIMEOUT
        while time.monotonic() < deadline and any(charge.outcome is None for charge in running):
            time.sleep(0.002)  # the thread in `wait` records its end

    # Waiting.

    def _sleep(self, waker: _Waker, end: float | None) -> None:
        """Sleep until a process ends, one is due to be started, a signal comes, another thread starts or stops something, or
        the time is up."""
        charges = self._all()
        children = [child for charge in charges if (child := charge.child) is not None]
        watched = [child.descriptor for child in children]
        moments = [due for charge in charges if (due := charge.due) is not None]
        moments += [time.monotonic() + LOOK_AGAIN] if None in watched else []
        moments += [] if end is None else [end]
        poll = select.poll()
        for descriptor in (*watched, waker.descriptor):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        poll.poll(max(min(moments) - time.monotonic(), 0.0) * 1000 + 1 if moments else None)
        waker.hush()

    @contextmanager
    def _signals_heard(self, waker: _Waker) -> Iterator[None]:
        """Record signals inside the block, and wake the thread in `wait`. Only the main thread can receive them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in FORWARDED}
        heard = [number for number in FORWARDED if before[number] is not signal.SIG_IGN]  # nohup means it
        wakeup = signal.set_wakeup_fd(waker.write_end, warn_on_full_buffer=False)
        for number in heard:
            signal.signal(number, self._take_note)
        try:
            yield
        finally:
            for number in heard:
                signal.signal(number, before[number])
            signal.set_wakeup_fd(wakeup)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
