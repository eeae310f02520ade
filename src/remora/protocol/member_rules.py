"""The news of who is there, and the rule that tells a busy worker from a lost one. No I/O, no clock.

What is known of a peer comes from two witnesses. Its *process* is heard when it says something, and is asked to if it was
quiet for a while (a heartbeat). Its *host* acknowledges what is sent to it, whatever the process does:

    the process speaks                          it lives
    silent, but its host acknowledges           frozen, or busy in C code: suspected soon, given up after a long time
    silent, and its host does not answer        cut off or switched off: given up soon
    nothing listens at its address              the process is gone: given up at once (see `remora.agent.peers.connector`)

`judge` is that rule for what was observed of a peer at one moment. Silence counts only

    W1  while we ourselves were running: a process that is stopped, or that its host does not run for seconds, has not
        listened (`OwnTime`)
    W2  while something was expected of the peer: it is a neighbour, we wait for its answer or its confirmation, or there is
        suspicion of it. All other links are at rest and cost nothing; if their other end dies, the kernel closes them

A worker that leaves says so on both channels of a pair. Its answers travel on one of them only, and its farewell there is
behind all of them. `on_farewell` is what the peer does about a farewell, and `Farewell` is how long the leaving worker
waits for the peer to hang up:

    F1  an answer that was sent before the farewell reaches its caller, whichever channel brings a farewell first, and
        also over a link that replaces a broken one
    F2  a peer that has heard every farewell that concerns it hangs up; the leaving worker waits for that, and for no
        peer longer than the peer makes progress
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from remora.vocabulary.ids import WorkerInfo

REGULAR_TICK = 0.5  # seconds
LATE_TICK = 1.0  # a tick that comes so long after the last one is late
MAX_GAPS = 1024


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is there that was not. One that comes back under the same name is a new one: the old one died before."""

    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class Suspected:
    """A worker does not answer. It may be busy, frozen or unreachable; calls to it are still sent."""

    worker: WorkerInfo
    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """A worker that was suspected answers again. Nothing was lost."""

    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class Left:
    """A worker left of its own will."""

    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class Died:
    """A worker was given up: its calls have failed, and if it lives after all, it must join again."""

    worker: WorkerInfo
    reason: str


MembershipEvent = Joined | Suspected | Recovered | Left | Died


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as another one sees it. `state` is alive, suspected, left or dead; `reason` says why it is not alive."""

    worker: WorkerInfo
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The seconds for which a peer may keep us waiting."""

    heartbeat: float  # quiet before it is asked for a sign of life
    suspect_after: float  # quiet before it is suspected
    silence: float  # quiet before it is given up although its host answers
    unreachable: float  # its host does not answer, or no connection can be made, before it is given up


class OwnTime:
    """For how long this process was running (W1). It is told the time in regular ticks. If one is late, the process was
    stopped, or waited for a processor, and the time beyond a regular tick is not counted.

    One thread ticks. Any thread may ask: it sees a gap whole or not at all, because the list is replaced and never changed.
    """

    __slots__ = ("_gaps", "_ticked")

    def __init__(self) -> None:
        self._ticked: float | None = None
        self._gaps: tuple[tuple[float, float], ...] = ()  # (from, to): we were not running

    def tick(self, now: float) -> None:
        """It is that late, and we are running."""
        gap = self._open_gap(now)
        self._ticked = now
        if gap is not None:
            self._gaps = (*self._gaps[1 - MAX_GAPS :], gap)

    def since(self, then: float, now: float) -> float:
        """Return for how long of the time from `then` to `now` we were running."""
        gap = self._open_gap(now)
        lost = 0.0 if gap is None else max(now - max(gap[0], then), 0.0)
        for begin, end in reversed(self._gaps):
            if end <= then:
                break
            lost += end - max(begin, then)
        return max(now - then - lost, 0.0)

    def _open_gap(self, now: float) -> tuple[float, float] | None:
        """The gap in which we are, if the next tick is late."""
        ticked = self._ticked
        return None if ticked is None or now - ticked <= LATE_TICK else (ticked + REGULAR_TICK, now)


class Parting(Enum):
    """Return what to do about the farewell of a peer."""

    HANG_UP = auto()  # nothing more will come from it
    AWAIT_ANSWERS = auto()  # its farewell on the other channel comes behind them
    REDIAL = auto()  # they wait for a link


def on_farewell(behind_answers: bool, calls_wait: bool, linked: bool) -> Parting:
    """A peer says farewell: on the channel of its answers (`behind_answers`), or on the one of its own calls.

    `calls_wait`: calls of ours wait for its answers; `linked`: the channel of its answers has a link.
    """
    if behind_answers or not (linked or calls_wait):
        return Parting.HANG_UP
    return Parting.AWAIT_ANSWERS if linked else Parting.REDIAL


class Farewell:
    """The time for which a worker that leaves waits for one peer to hang up (F2)."""

    __slots__ = ("_patience", "_progress_at", "_return_within", "_unheard", "_was_linked")

    def __init__(self, now: float, patience: float, return_within: float) -> None:
        """Begin to wait. `patience`: seconds without progress; `return_within`: seconds in which the peer replaces a
        broken link."""
        self._patience = patience
        self._return_within = return_within
        self._progress_at = now
        self._unheard: int | None = None
        self._was_linked: bool | None = None

    def waits(self, linked: bool, unheard: int, now: float) -> bool:
        """Return True to go on waiting. `unheard` says how much the peer has not confirmed: if it shrinks, that is
        progress."""
        if linked is not self._was_linked or self._unheard is None or unheard < self._unheard:
            self._progress_at = now
        self._was_linked, self._unheard = linked, unheard
        if not linked and not unheard:
            return False
        return now - self._progress_at < (self._patience if linked else self._return_within)


class Verdict(Enum):
    """One thing to do about a peer."""

    WELL = auto()
    ASK = auto()  # for a sign of life
    SUSPECT = auto()
    REDIAL = auto()  # its host does not answer on this link: see whether it does on another
    DEAD = auto()


def judge(limits: Limits, quiet: float, unanswered: float) -> Verdict:
    """Return what follows from how long the process said nothing, and for how long its host acknowledged nothing it was
    sent.

    A host is given half its time on the old link, and the other half to answer on a new one: a path may be blocked for
    one connection and open for the next.
    """
    if quiet > limits.silence:
        return Verdict.DEAD
    if unanswered > limits.unreachable / 2 and quiet > limits.unreachable / 2:
        return Verdict.REDIAL
    if quiet > limits.suspect_after:
        return Verdict.SUSPECT
    return Verdict.ASK if quiet > limits.heartbeat else Verdict.WELL
