"""Keeps a set of processes running by their policies, passes signals on, and leaves none behind.

Everything happens in the thread that calls `wait`; there are no threads of its own. Unix only.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Literal

from remora.options import check_timeout
from remora.supervision.child import Child, Streams, Target
from remora.supervision.policy import RestartPolicy, Restarts

log = logging.getLogger("remora")

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_AGAIN = 0.05  # where the end of a process does not wake us


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a process: its last exit code (negative: the signal that ended it), how often it was restarted, and
    whether it was ended by the supervisor rather than by itself."""

    code: int
    restarts: int
    ended: bool = False


@dataclass
class _Charge:
    """One process that is to be kept running, through all its lives."""

    name: str
    target: Target
    args: tuple[Any, ...]
    env: Mapping[str, str]
    restarts: Restarts
    streams: Streams | None = None
    child: Child | None = None
    due: float | None = None  # when it is to be started (again)
    outcome: Outcome | None = None  # for good
    codes: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.due = None
        environment = {**os.environ, **self.env, "REMORA_RESTARTS": str(self.restarts.made)}
        self.child = Child(self.target, self.args, environment, self.streams)

    def finish(self, ended: bool) -> None:
        self.due = None
        self.outcome = Outcome(self.codes[-1] if self.codes else 0, self.restarts.made, ended)


class Supervisor:
    """See the head of this file.

    restart: what is started again when a process fails: that `one`, which suits workers of a dynamic group, or `all`, which
        is what a static group needs, since it ends with its first member that dies.
    together: when a process has failed for good, end the others; what they wait for will not come.
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
        self._signal: int | None = None  # that asked us to end

    def start(
        self,
        name: str,
        target: Target,
        *args: Any,
        env: Mapping[str, str] | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Start a process, of a function (called with `args`) or a command. `REMORA_RESTARTS` tells it which life it has.
        `streams` are descriptors in the place of our own standard output and standard error, also for its later lives."""
        if name in self._charges:
            raise ValueError(f"there is a process {name!r} already")
        restarts = self._shared if self._restart_all else Restarts(self._policy)
        charge = _Charge(name, target, args, env or {}, restarts, streams)
        charge.start()
        self._charges[name] = charge

    def pids(self) -> dict[str, int]:
        """The numbers of the processes that run now, by name."""
        return {charge.name: charge.child.pid for charge in self._charges.values() if charge.child is not None}

    def wait(self, timeout: float | None = None) -> dict[str, Outcome]:
        """Keep the processes running until all have ended for good: what became of each, by name.

        SIGINT, SIGTERM and SIGHUP are passed on to the processes; when they have ended, the signal takes its usual course
        here. TimeoutError, with the processes still running, if that takes longer than `timeout`.
        """
        end = None if timeout is None else time.monotonic() + check_timeout(timeout, "the timeout of Supervisor.wait")
        with self._signals_heard() as bell:
            while self._signal is None and self._unfinished():
                self._start_due()
                self._sleep(bell, end)
                self._reap()
                if end is not None and time.monotonic() >= end and (names := self._unfinished()):
                    raise TimeoutError(f"still running after {timeout:g} s: {', '.join(names)}")
            if self._signal is not None:
                self.stop(self._signal)
        if self._signal is not None:
            number, self._signal = self._signal, None
            signal.raise_signal(number)
        return {charge.name: charge.outcome for charge in self._charges.values() if charge.outcome is not None}

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End all processes: with that signal, and with SIGKILL if that does not do in time."""
        for charge in self._charges.values():
            if charge.outcome is None and charge.child is None:
                charge.finish(ended=True)
        self._end([charge for charge in self._charges.values() if charge.child is not None], number)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # The work.

    def _unfinished(self) -> list[str]:
        """Those that run, and those that wait for their next life."""
        return [charge.name for charge in self._charges.values() if charge.outcome is None]

    def _start_due(self) -> None:
        now = time.monotonic()
        for charge in self._charges.values():
            if charge.due is not None and charge.due <= now:
                charge.start()

    def _reap(self) -> None:
        for charge in list(self._charges.values()):
            child = charge.child
            if child is not None and child.ended:
                charge.child = None
                charge.codes.append(child.bury())
                self._decide(charge, time.monotonic() - child.started)

    def _decide(self, charge: _Charge, ran_for: float) -> None:
        """A process ended by itself."""
        code = charge.codes[-1]
        delay = charge.restarts.after(code, ran_for)
        if delay is None:
            charge.finish(ended=False)
            if code != 0:
                log.error("%s ended with exit code %d after %d restarts", charge.name, code, charge.restarts.made)
            if code != 0 and self._together:
                self.stop()
            return
        log.warning("%s ended with exit code %d: it is started again in %.1f s", charge.name, code, delay)
        charge.due = time.monotonic() + delay
        if self._restart_all and code != 0:
            self._restart_others(charge)

    def _restart_others(self, failed: _Charge) -> None:
        running = [charge for charge in self._charges.values() if charge.child is not None]
        self._end(running, signal.SIGTERM)
        for charge in self._charges.values():
            charge.due, charge.outcome = failed.due, None

    def _end(self, charges: list[_Charge], number: int) -> None:
        """Have these end, now."""
        children = [charge.child for charge in charges if charge.child is not None]
        for child in children:
            child.signal(number)
            child.signal(signal.SIGCONT)  # one that is stopped would not hear it
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and not all(child.ended for child in children):
            time.sleep(0.01)
        for charge in charges:
            if charge.child is not None:
                charge.codes.append(charge.child.bury())
                charge.child = None
                charge.finish(ended=True)

    # Waiting.

    def _sleep(self, bell: int | None, end: float | None) -> None:
        """Until a process ends, one is due to be started, a signal comes, or the time is up."""
        watched = [charge.child.fileno() for charge in self._charges.values() if charge.child is not None]
        moments = [charge.due for charge in self._charges.values() if charge.due is not None]
        moments += [time.monotonic() + LOOK_AGAIN] if None in watched else []
        moments += [] if end is None else [end]
        poll = select.poll()
        for descriptor in (*watched, bell):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        poll.poll(max(min(moments) - time.monotonic(), 0.0) * 1000 + 1 if moments else None)

    @contextmanager
    def _signals_heard(self) -> Iterator[int | None]:
        """Inside, signals are taken note of, and ring the bell that this yields. Only the main thread can hear them."""
        if threading.current_thread() is not threading.main_thread():
            yield None
            return
        bell, rope = os.pipe()
        os.set_blocking(rope, False)
        before = {number: signal.getsignal(number) for number in FORWARDED}
        heard = [number for number in FORWARDED if before[number] is not signal.SIG_IGN]  # nohup means it
        wakeup = signal.set_wakeup_fd(rope, warn_on_full_buffer=False)
        for number in heard:
            signal.signal(number, self._take_note)
        try:
            yield bell
        finally:
            for number in heard:
                signal.signal(number, before[number])
            signal.set_wakeup_fd(wakeup)
            os.close(bell)
            os.close(rope)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
