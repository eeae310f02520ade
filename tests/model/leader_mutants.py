"""Who leads, with one rule broken at a time, and a scenario in which that shows. Not tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from remora.protocol.leader import (
    HELP,
    IDLE,
    NEVER,
    NONE,
    NOTHING,
    OPEN,
    READING,
    RUNNING,
    SHUT,
    WAITING,
    Alarm,
    Effects,
    Leadership,
)
from tests.model import leader_model
from tests.model.leader_model import FREES, LASTS, LIMITS, READS, SHORT, STAYS, WAITS, Scenario, World


@dataclass(frozen=True)
class Mutant:
    """One change, and the promise that the explorer finds broken."""

    name: str
    breaks: str
    where: object
    attribute: str
    instead: Callable[..., Any]
    shows_in: Scenario


RELIEF = replace(LIMITS, relief=3)

one = Scenario("one event", (SHORT,))
free = Scenario("one event, at any time", (SHORT,), prompt=False)
two = Scenario("two events", (SHORT, SHORT))
lasts = Scenario("a task lasts", (LASTS, SHORT))
lasts_and_ends = Scenario("a task lasts, and ends", (LASTS, FREES))
several_last = Scenario("more come while a task lasts", (LASTS, SHORT, SHORT))
relief = Scenario("the gate stays open for a while", (LASTS, SHORT, FREES), limits=RELIEF)
eager = Scenario("a helper takes over soon", (LASTS, SHORT), threads=3, limits=replace(RELIEF, helped=0))
back_and_forth = Scenario("a helper takes over soon, and back", (LASTS, FREES), limits=replace(RELIEF, helped=0))
waits = Scenario("a task waits for something remote", (WAITS, FREES))
reads = Scenario("an event takes long to read", (READS, FREES))
queued = Scenario("the program queues a task", (SHORT,), (SHORT,))
queued_behind = Scenario("the program queues a task while another lasts", (LASTS,), (FREES,))
queued_while_waiting = Scenario("the program queues a task while another waits", (WAITS,), (SHORT,))
destructor = Scenario("a destructor waits on the leader", (SHORT,), destructor=True)
fails = Scenario("the leader fails", (), (SHORT,), fails=True)
stops = Scenario("the end", (SHORT, LASTS), stops=True)
stops_waiting = Scenario("the end while a task waits", (WAITS,), stops=True)
idle_between = Scenario("an alarm rings while the leader is idle", (SHORT, LASTS, SHORT))
ends = Scenario("a task lasts, and ends by itself", (LASTS,), ends=True)
reopened = Scenario("the leader waits as soon as it is back", (LASTS, STAYS, SHORT), ends=True)
replaced = Scenario("the leader is back when a helper takes over", (LASTS, FREES, SHORT), limits=RELIEF)

SMALL = [
    one, two, lasts, lasts_and_ends, several_last, eager, back_and_forth, waits, reads, queued,
    queued_while_waiting, destructor, fails, stops, stops_waiting, ends,
]  # fmt: skip
LARGE = [
    relief,
    free,
    idle_between,
    queued_behind,
    replaced,
    reopened,
    Scenario("the end while a task waits and another is queued", (WAITS,), (SHORT,), stops=True),
    Scenario("more come while a task waits", (WAITS, SHORT, FREES)),
    Scenario("a destructor waits on the leader, and ends", (SHORT, FREES), destructor=True),
    Scenario("the leader fails among events", (SHORT,), (SHORT,), fails=True),
    Scenario("two events, at any time", (SHORT, SHORT), prompt=False),
]


def sets_no_alarm(self: Leadership, now: float) -> Effects:
    return NOTHING


def keeps_the_alarm_set(self: Leadership) -> bool:
    called, self.called = self.called, False
    return called


def hears_no_call(self: Leadership) -> bool:
    self.alarm_set = self.called = False
    return False


def looks_after_the_idle(self: Leadership, now: float, called: bool, queued: bool, decide: Any = Leadership.decide) -> Any:
    effects = decide(self, now, called, queued)
    return (*self._alarm(now, 1), *effects) if self.doing is IDLE else effects


def never_finds_it_stuck(self: Leadership, now: float) -> bool:
    return self.doing is READING and now > self.long_at + self.thresholds.reading


def waits_for_readers(self: Leadership, now: float) -> bool:
    return self.doing is not READING and self.stuck_steps == self.steps


def looks_once(self: Leadership, now: float, called: bool, queued: bool, decide: Any = Leadership.decide) -> Effects:
    effects: Effects = decide(self, now, called, queued)
    if OPEN in effects or self.doing is IDLE:
        return effects
    self.alarm_set = False
    return tuple(effect for effect in effects if not isinstance(effect, Alarm))


def takes_over_from_the_idle(self: Leadership, me: int, leader: int, now: float) -> Effects | None:
    if self.thread != leader:
        return None
    self.thread, self.doing, self.open = me, IDLE if leader == NONE else RUNNING, False
    self.began, self.long_at = now, now + self.thresholds.long
    return (SHUT, *(self._alarm(now, 1) if leader else ()))


def sets_no_alarm_when_it_takes_over(
    self: Leadership, me: int, leader: int, now: float, take_over: Any = Leadership.take_over
) -> Effects | None:
    effects = take_over(self, me, leader, now)
    if effects is None or leader == NONE:
        return effects  # type: ignore[no-any-return]
    self.alarm_set = True
    return (SHUT,)


def leads_though_replaced(self: Leadership, me: int) -> bool:
    if self.thread in (me, NONE) or self.doing is not IDLE:
        self.doing = IDLE
        return True
    return False


def waits_behind_a_shut_gate(self: Leadership) -> Effects:
    self.doing = WAITING
    return NOTHING


def waits_as_if_idle(self: Leadership) -> Effects:
    if self.doing is not IDLE:
        self.doing = WAITING
    self.open = True
    return (OPEN,)


def never_shuts(self: Leadership, now: float) -> Effects:
    return NOTHING


def does_not_look_after_it_opened(self: Leadership, now: float) -> Effects:
    return NOTHING


def helps_no_leader_that_waits(self: Leadership, now: float, may_help: Any = Leadership.may_help) -> bool:
    return self.doing is not WAITING and bool(may_help(self, now))


def opens_though_shut(self: Leadership, now: float) -> Effects:
    """As it was: the leader alone is looked at."""
    if self.doing is IDLE and now > self.open_until and self.open:
        self.open = False
        return (SHUT,)
    return NOTHING


def shuts_though_open(self: Leadership) -> Effects:
    return NOTHING


def leaves_in_silence(self: Leadership, me: int) -> Effects:
    if self.thread == me:
        self.doing, self.thread = READING, NONE
    return NOTHING


def puts_the_call_off(self: Leadership) -> bool:
    return False


def wakes_only_the_leader(self: Leadership, me: int) -> bool:
    return True


def calls_nobody(self: Leadership) -> Effects:
    return (HELP,)


def stops_the_followers_only(world: World) -> None:
    world.timer = world.now


def starts_none(world: World) -> None:
    """C1."""


def begins_without_an_alarm(self: Leadership, now: float, pace: float) -> Effects:
    self.alarm_set, self.renew_at = True, NEVER
    return NOTHING


MUTANTS = [
    Mutant("the leader sets no alarm", "L1", Leadership, "alarm_due", sets_no_alarm, lasts),
    Mutant("an alarm that rang counts as set", "L5", Leadership, "rang", keeps_the_alarm_set, one),
    Mutant("an alarm is noted and not set", "L1", Leadership, "_alarm", begins_without_an_alarm, lasts),
    Mutant("a follower that was called does not come", "L3", Leadership, "rang", hears_no_call, queued_behind),
    Mutant("a call leaves no note", "L3", Leadership, "call_helper", calls_nobody, queued_behind),
    Mutant("a call is put off", "L3", Leadership, "called_meanwhile", puts_the_call_off, queued_while_waiting),
    Mutant("only the leader is woken for a task", "L3", Leadership, "wakes_leader", wakes_only_the_leader, queued_behind),
    Mutant("an idle leader is looked after", "L5", Leadership, "decide", looks_after_the_idle, one),
    Mutant("a leader is never found stuck", "L3", Leadership, "_is_stuck", never_finds_it_stuck, lasts),
    Mutant("a leader that reads is never found stuck", "L3", Leadership, "_is_stuck", waits_for_readers, reads),
    Mutant("there is no second look", "L1", Leadership, "decide", looks_once, lasts),
    Mutant("a thread takes over from a leader at the poller", "L2", Leadership, "take_over", takes_over_from_the_idle,
           replaced),
    Mutant("a replaced leader leads on", "L2", Leadership, "idle", leads_though_replaced, back_and_forth),
    Mutant("the next leader is not looked after", "L1", Leadership, "take_over", sets_no_alarm_when_it_takes_over,
           Scenario("both last", (LASTS, LASTS, SHORT), threads=4, limits=replace(RELIEF, helped=0))),
    Mutant("a leader waits behind a shut gate", "L3", Leadership, "block", waits_behind_a_shut_gate, waits),
    Mutant("a leader in a destructor counts as idle", "L1", Leadership, "block", waits_as_if_idle, destructor),
    Mutant("the gate stays open", "L4", Leadership, "shut_due", never_shuts, waits),
    Mutant("a follower opens the gate and does not look", "L4", Leadership, "opened", does_not_look_after_it_opened, ends),
    Mutant("a follower opens a gate that was shut meanwhile", "L4", Leadership, "opened", opens_though_shut, ends),
    Mutant("a gate is shut that was opened meanwhile", "L3", Leadership, "was_shut", shuts_though_open, reopened),
    Mutant("followers leave all to a leader that waits", "L3", Leadership, "may_help", helps_no_leader_that_waits, waits),
    Mutant("a leader leaves in silence", "L1", Leadership, "leave", leaves_in_silence, fails),
    Mutant("no thread is started", "L1", leader_model, "start_thread", starts_none, lasts),
    Mutant("the end wakes the followers only", "L6", leader_model, "stop", stops_the_followers_only, stops),
]  # fmt: skip
