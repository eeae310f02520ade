"""Decides which thread of a worker leads: it waits for events, until another takes its place. No I/O, clock or threads.

One thread *leads*. It waits at the poller and runs what comes itself: nothing is handed over, its caches stay warm, and
libraries that keep helpers for each thread that ever computed (OpenMP) keep them for one. The others are *followers*. They
wait at a gate, where the kernel does not wake them for what the leader sees anyway. A timer of the kernel, the *alarm*,
wakes one of them to look after the leader. This machine decides when the gate opens and shuts, when the alarm rings, who
takes over and who is called for help:

    L1  an event or a queued task is never left without a thread that will see it
    L2  at most one thread leads; no thread takes over from a leader that waits at the poller
    L3  the gate is opened for a stuck leader within a limit: at once if it waits for something remote, at the second look
        that finds it with the same task for long, after `reading` if it takes in what came
    L4  the gate is shut again when the leader is back and nothing spoke for more threads lately (`relief`)
    L5  while the leader has nothing to do, no alarm is set
    L6  after the end every thread returns

The state is shared by all threads and has no lock, but for `thread` and `followers`. Two rules replace it. Between a
comparison and the write that depends on it nothing is called, so the interpreter does not switch threads there. And each
side first *says* what it does, in one step, and then *looks* at what the other side said, in the next; so the second of two
threads sees the first:

    the leader says IDLE (`idle`), then looks whether the gate is open (`shut_due`)
    a follower says open (`decide`), then looks whether the leader is IDLE (`opened`)
    a thread opens the gate, then looks whether it is said to be shut (`opened`); and the other way round (`was_shut`)
    the leader says READING (`busy`), then looks whether the alarm is set (`alarm_due`)
    a follower says that it rang (`rang`), then looks whether the leader is IDLE (`decide`)
    a thread says that a follower is called (`call_helper`), then has the alarm ring at once
    a thread sets the alarm, then looks whether a follower is called (`called_meanwhile`)

A look costs the leader its interpreter. So looks are rare while all is well, and the leader puts them off itself while it
does many short things. A method returns what is to be done, in that order, or nothing.
`remora.agent.runtime.leader_followers` has
the steps of each task inlined; tests/agent/runtime/test_leader_followers.py proves the two forms equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

NONE = 0  # no thread
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The limits at which a leader is stuck or behind, and for how long others help it. Times are in seconds.

    The measurements were made on two cores, with the benchmarks that docs/performance.md names.
    """

    # From one look after the leader to the next. A look takes 150 µs of a training step of 2 ms.
    look_every: float = 0.001
    # So many times that, if all was well, or while the leader takes in what came: a training step takes 1.83 ms, and 2.23 ms
    # if it is looked after every millisecond.
    relaxed: int = 8
    # A leader that takes fewer steps than this between two looks does long things. A served call has three steps and takes
    # 30 µs: thirty calls fit into a millisecond, and this is five.
    few_steps: int = 16
    # No relaxed looks after the leader was found stuck or behind: where it happened once, it happens again.
    fast_for: float = 0.1
    # A task that took longer than this was not short: others that are queued behind it may take as long. Four no-op calls.
    medium: float = 0.000125
    # The leader is with one task for long. A no-op call takes 30 µs, and what is woken elsewhere takes 50 µs to run.
    long: float = 0.001
    # The same for a leader that is behind: functions of a few hundred microseconds then run on all processors.
    long_if_behind: float = 0.00025
    # The same after an answer was sent. What is left takes microseconds, unless the leader lost its processor; another
    # thread would wait for one, too.
    long_answer: float = 0.005
    # More time for a leader that takes in what came, which does not block. A burst of 5,000 calls takes it 10 ms and costs
    # 7.5 µs for each call; with threads that helped, which fought for the interpreter, 12 to 18 µs.
    reading: float = 0.05
    # The gate is opened at the so-manieth look in a row that finds the leader behind. Two are too few: of 400 looks while
    # eight callers starve the leader of its processor, 50 find it behind, and another thread would starve as well.
    late_looks: int = 3
    # The gate stays open for this long after there was reason to. To open it again takes the leader a millisecond or more.
    relief: float = 0.05
    # A thread that helped so often while the leader was away leads from then on.
    helped: int = 8
    # So many followers are kept for `term` after they helped; further ones end at once.
    spare: int = 4
    # A follower that helped ends after this time without work, and with it what libraries keep for it. A training step takes
    # 2.0 ms if OpenMP has one set of threads, and 3.2 to 3.7 ms with two.
    term: float = 0.05
    # The leader does not sleep after so many events in a row, each within `spin` of the last: to be woken takes longer than
    # a no-op call (60 µs before, 31 µs with it).
    streak: int = 8
    spin: float = 300e-6
    # Another thread had the processor for so long: the leader sleeps at once for the next `rests` events.
    interruption: float = 0.001
    rests: int = 256


class Doing(Enum):
    """An activity of the leader."""

    IDLE = auto()  # it waits for events, or is about to
    READING = auto()  # it takes in what came; this does not block
    RUNNING = auto()  # it runs a task, which may block
    ANSWERING = auto()  # it sends the answer, and has nothing left to do then
    WAITING = auto()  # it waits for something remote


IDLE, READING, RUNNING, ANSWERING, WAITING = Doing  # one name is loaded faster than two


@dataclass(frozen=True, slots=True)
class Alarm:
    """Wake a follower after so many seconds. Replaces the alarm that was set before."""

    seconds: float


class Effect(Enum):
    """One thing that a decision asks for, beside `Alarm`."""

    OPEN = auto()  # let one follower pass the gate when the poller has something
    SHUT = auto()  # let no follower pass
    TAKE_OVER = auto()  # the current thread leads from now on, or opens the gate for the next one if it may not
    HELP = auto()  # a follower looks at the queue: the current thread if it is one, else one that is called


OPEN, SHUT, TAKE_OVER, HELP = Effect

Effects = tuple[Effect | Alarm, ...]

NOTHING: Effects = ()


class Leadership:
    """The state of leading: who leads, what the leader says that it does, and what the gate and its alarm are set
    to."""

    __slots__ = (
        "alarm_set", "began", "called", "doing", "fast_until", "few", "followers", "helped", "late", "long_at", "open",
        "open_until", "pace", "renew_at", "set_steps", "steps", "streak", "stuck_steps", "thread", "thresholds",
    )  # fmt: skip

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        # Under the lock of the runtime: each is read and then written.
        self.thread = NONE  # the one that leads
        self.followers = 0  # threads that wait at the gate, or are on their way to it
        # Written by the leader, and by the thread that takes over.
        self.doing = READING
        self.steps = 0  # things begun, or nearly done
        self.began = 0.0  # when the last one was
        self.long_at = 0.0  # when it takes long
        self.streak = 0  # events in a row, each soon after the last; below zero after an interruption
        self.helped = 0  # tasks that helpers began since the leader did; a lost addition does no harm
        # The gate. Written by any thread: each write says what the gate is about to be.
        self.open = False
        self.open_until = 0.0  # at least
        # The alarm. Written by any thread that sets it; the last one counts, as it does for the timer.
        self.alarm_set = False
        self.pace = 1  # so many times `look_every`
        self.fast_until = 0.0  # not more than once `look_every` until then
        self.set_steps = 0  # `steps` when it was set
        self.few = 0  # so many more are few when it rings
        self.renew_at = NEVER  # when the leader sets it again, if it does many short things
        self.called = False  # the follower that comes is to look at the queue
        # Written by the follower for which the alarm rang: one at a time.
        self.late = 0  # looks in a row that found the leader behind
        self.stuck_steps = -1  # `steps` at the last look that found it with one task for long

    # The leader.

    def idle(self, me: int) -> bool:
        """The current thread has nothing to do. Whether it leads, and may go to the poller."""
        if self.thread != me:
            return False
        self.doing = IDLE
        self.helped = 0
        return True

    def shut_due(self, now: float) -> Effects:
        """The leader has said that it is IDLE."""
        if self.open and now > self.open_until:
            self.open = False
            return (SHUT,)
        return NOTHING

    def busy(self, me: int, now: float, slept_since: float = -NEVER) -> None:
        """The leader has events in its hands, for which it slept at the poller, if it did not poll for them. (Another thread
        may lead by now, if a destructor waited on this one.)"""
        if now - slept_since < self.thresholds.spin:
            self.streak += 1
        elif self.streak > 0:
            self.streak = 0
        if self.thread == me:
            self.steps += 1
            self.began = now
            self.long_at = now + self.thresholds.long
            self.doing = READING

    def alarm_due(self, now: float) -> Effects:
        """The leader has said that it is busy."""
        return NOTHING if self.alarm_set else self._alarm(now, self.pace)

    def begin_task(self, now: float, queued: int) -> Effects:
        """The leader is about to run a task, and `queued` others could be run now."""
        limits = self.thresholds
        took = now - self.began if self.doing is not READING else 0.0
        self.doing = RUNNING
        self.steps += 1
        self.began = now
        self.long_at = now + limits.long
        effects = self.renew(now) if now > self.renew_at and self.alarm_set else NOTHING
        return effects + self.begin_next(now, took) if took > limits.medium and queued else effects

    def begin_next(self, now: float, took: float) -> Effects:
        """Others are queued behind the task that begins, and the last one was not short: this one may take as long."""
        if took > self.thresholds.long:
            return self.call_helper()
        if self.pace == 1:
            return NOTHING
        self.pace = 1
        return self._alarm(now, 1)

    def renew(self, now: float) -> Effects:
        """The leader puts the alarm off, if it does many short things."""
        if self.steps - self.set_steps < self.few // 2:
            self.renew_at = NEVER
            return NOTHING
        self.pace = self.thresholds.relaxed if self.began > self.fast_until else 1
        self.late = 0
        return self._alarm(now, self.pace)

    def answer(self, now: float) -> None:
        """The leader sends the answer of its task."""
        self.doing = ANSWERING
        self.steps += 1
        self.long_at = now + self.thresholds.long_answer

    def block(self) -> Effects:
        """The leader is about to wait for something remote: others do what comes."""
        effects = NOTHING
        if self.doing is IDLE:  # a destructor waits, on a leader at the poller: what it was woken for may be in its hands
            effects = self.call_helper()
        self.doing = WAITING
        if not self.open:
            self.open = True
            effects = (OPEN, *effects)
        return effects

    def leave(self, me: int) -> Effects:
        """The current thread ends. If it led, a follower is to lead."""
        if self.thread != me:
            return NOTHING
        self.doing = READING
        self.thread = NONE
        return self.call_helper()

    # A follower.

    def rang(self) -> bool:
        """The alarm rang for the current thread. Whether it was called to look at the queue."""
        self.alarm_set = False
        called, self.called = self.called, False
        return called

    def decide(self, now: float, called: bool, queued: bool) -> Effects:
        """Look after the leader. `called` is from `rang`; `queued`: tasks or events wait."""
        if self.doing is IDLE:
            return (HELP,) if called else NOTHING
        limits = self.thresholds
        is_long = now > self.long_at
        is_late = queued and self.doing is not ANSWERING and 0 < self.steps - self.set_steps < self.few
        self.late = self.late + 1 if is_late else 0
        if is_long and self._is_stuck(now):
            return self._open_up(now)  # until the leader is back
        self.stuck_steps = self.steps if is_long else -1
        self.pace = 1 if is_long or self.late or now < self.fast_until else min(2 * self.pace, limits.relaxed)
        effects = self._alarm(now, limits.relaxed if self.doing is READING else self.pace)
        if self.late >= limits.late_looks:
            self.open_until = now + limits.relief
            return effects + self._open_up(now)
        return (*effects, HELP) if called else effects

    def _is_stuck(self, now: float) -> bool:
        """It has been with one thing for long. One that takes in what came is left alone for a while; for a task, a second
        look has to confirm it: three of four such tasks end before that."""
        if self.doing is READING:
            return now > self.long_at + self.thresholds.reading
        return self.stuck_steps == self.steps

    def _open_up(self, now: float) -> Effects:
        self.pace = 1
        self.fast_until = now + self.thresholds.fast_for
        self.open = True
        return (OPEN, HELP)

    def may_help(self, now: float) -> bool:
        """The poller has something, and the gate let the current thread pass: whether it takes that, or leaves it to the
        leader, which comes to it at once."""
        if self.doing is IDLE:
            return False
        limits = self.thresholds
        is_behind = now < self.open_until and self.doing is not ANSWERING and now > self.began + limits.long_if_behind
        if now < self.long_at and not is_behind:
            return self.doing is WAITING
        self.open_until = now + limits.relief
        return True

    def defer(self, now: float) -> Effects:
        """A follower has left something to the leader, and looks again soon."""
        return self._alarm(now, self.thresholds.long_if_behind / self.thresholds.look_every)

    def begin_help(self, queued: int) -> Effects:
        """A thread that does not lead is about to run a task, and `queued` others could be run now."""
        self.helped += 1
        effects = NOTHING
        if self.open:
            effects = (TAKE_OVER if self.helped > self.thresholds.helped else OPEN,)
        return effects + self.call_helper() if queued else effects

    def take_over(self, me: int, leader: int, now: float) -> Effects | None:
        """The current thread leads instead of `leader`, if that still leads and is away. It runs a task; or is on its way to
        the poller, if no thread led."""
        if self.thread != leader or (leader != NONE and self.doing is IDLE):
            return None
        self.thread = me
        self.doing = IDLE if leader == NONE else RUNNING
        self.steps += 1
        self.began = now
        self.long_at = now + self.thresholds.long
        self.streak = self.helped = 0
        self.open = False
        return (SHUT,) if leader == NONE else (SHUT, *self._alarm(now, self.pace))

    # Any thread.

    def opened(self, now: float) -> Effects:
        """The current thread has opened the gate. The leader may be back and have missed that; or another thread has said
        meanwhile that the gate is shut, and shut it before this one opened it."""
        if self.doing is IDLE and now > self.open_until:
            self.open = False
        return NOTHING if self.open else (SHUT,)

    def was_shut(self) -> Effects:
        """The current thread has shut the gate. Another one may have opened it before, and said so."""
        return (OPEN,) if self.open else NOTHING

    def call_helper(self) -> Effects:
        """A thread other than the leader is to look at the queue."""
        self.called = True
        return (HELP,)

    def called_meanwhile(self) -> bool:
        """The alarm has been set. Whether a follower was called, and this put that off: then it is to ring at once."""
        return self.called

    def wakes_leader(self, me: int) -> bool:
        """Return True to wake the leader for something that thread `me` has queued, and not to call a helper. A leader
        that runs something may not come back soon. (The leader itself looks at the queue when it has done what it
        does.)"""
        return self.doing is IDLE or self.doing is READING or self.thread == me

    def _alarm(self, now: float, pace: float) -> Effects:
        seconds = pace * self.thresholds.look_every
        self.alarm_set = True
        self.set_steps = self.steps
        self.few = int(pace * self.thresholds.few_steps)
        self.renew_at = now + seconds / 2
        return (Alarm(seconds),)

    def check(self) -> None:
        """Assert what must hold between any two steps."""
        assert 1 <= self.pace <= self.thresholds.relaxed, "L3: looks are too rare"
        assert self.followers >= 0, "L1: more followers left than came"
        assert self.set_steps <= self.steps, "L3: the alarm was set in the future"
        assert self.thread != NONE or self.doing is not IDLE, "L1: followers leave to the leader what comes, and none leads"
