"""Who is there: the news that listeners hear, and the rule that tells a busy worker from a lost one. No I/O, no clock.

What is known of a peer comes from two witnesses. Its *process* is heard when it says something, and is asked to if it was
quiet for a while (a heartbeat). Its *host* acknowledges what is sent to it, whatever the process does:

    the process speaks                          it lives
    silent, but its host acknowledges           frozen, or busy in C code: suspected soon, given up after a long time
    silent, and its host does not answer        cut off or switched off: given up soon
    nobody listens at its address               the process is gone: given up at once (see `remora.agent.dialling`)

`judge` is that rule for what was observed of a peer at one moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from remora.vocabulary.ids import WorkerInfo


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
    """How long, in seconds, a peer may keep us waiting."""

    heartbeat: float  # quiet before it is asked for a sign of life
    suspect_after: float  # quiet before it is suspected
    silence: float  # quiet before it is given up although its host answers
    unreachable: float  # its host does not answer, or no connection can be made, before it is given up


class Verdict(Enum):
    """What to do about a peer."""

    WELL = auto()
    ASK = auto()  # for a sign of life
    SUSPECT = auto()
    REDIAL = auto()  # its host does not answer on this link: see whether it does on another
    DEAD = auto()


def judge(limits: Limits, quiet: float, unanswered: float) -> Verdict:
    """What follows from how long the process said nothing, and for how long its host acknowledged nothing it was sent.

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
