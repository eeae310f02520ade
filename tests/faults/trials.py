"""One scenario under one fault plan, in a world of its own: all is right, or an error of ours, in time; and then at rest.

Time is virtual and passes by itself, with every setting as it is by default; or it is real, with settings that make
everything happen sooner.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

from remora.agent import agent, retries
from remora.agent.peers import connector, farewells, manager
from remora.faults.injector import Message
from remora.faults.kinds import DEEDS, Cut, Fault, Freeze, Kill, MessageFault, Pair, Partition, When, Which
from remora.faults.plan import Plan
from remora.rpc import all_gather
from remora.testing.world import World
from remora.vocabulary.messages import REQUEST, MessageType
from tests.faults import scenarios
from tests.faults.scenarios import SCENARIOS, Story

STEPS = 12  # a scenario has a dozen steps at most
QUICK = {"heartbeat": 0.04, "suspect_after": 0.3, "reconnect_timeout": 0.4, "silence_limit": 3.0, "connect_timeout": 1.0}


@dataclass(frozen=True)
class Pace:
    """How time passes in a trial."""

    clock: Literal["system", "auto"]
    step: float  # seconds that a step may take
    rest: float  # and that it may take until nothing is under way afterwards
    settings: dict[str, Any] = field(default_factory=dict)
    first_gap: float = retries.FIRST_GAP


VIRTUAL = Pace("auto", step=60.0, rest=200.0)
REAL = Pace("system", step=1.5, rest=5.0, settings=QUICK, first_gap=0.02)


@contextmanager
def quick_time() -> Iterator[None]:
    """What happens twice a second happens fifty times a second, and so on: the same stack, in less time."""
    with (
        mock.patch.object(agent, "TICK", 0.02),
        mock.patch.object(manager, "GRACE", 0.03),
        mock.patch.object(farewells, "REDIAL_PATIENCE", 0.03),
        mock.patch.object(connector, "LAST_TRY", 0.2),
        mock.patch.object(all_gather, "LOOK_AGAIN", 0.1),
    ):
        yield


@dataclass(frozen=True)
class Verdict:
    """What was wrong, if anything, and what the plan did."""

    scenario: str
    plan: Plan
    problems: tuple[str, ...]
    seconds: float
    faults: int
    report: str

    def __str__(self) -> str:
        return f"{self.scenario} under: {self.plan}\n  " + "\n  ".join((*self.problems, *self.report.splitlines()))


def _world(plan: Plan | str, pace: Pace) -> World:
    world = World(3, faults=plan, timeout=pace.step, clock=pace.clock, **pace.settings)
    for worker in world.workers:
        worker.agent.retries.gaps = retries.gaps(first=pace.first_gap)
    return world


def survey(scenario: str, pace: Pace = VIRTUAL) -> Counter[Message]:
    """Every message that a scenario sends when nothing goes wrong, until all is at rest."""
    with _world("", pace) as world:
        story = _play(world, scenario)
        assert not story.problems(), story.problems()
        failed = [got for name, (_, got) in story.outcomes.items() if isinstance(got, Exception) and name != "error"]
        assert not failed, failed
        story.outcomes.clear()
        _let_go()
        world.wait_until(lambda: not world.unrest())
        return world.faults.messages()


def try_out(scenario: str, plan: Plan | str, heal: bool = False, pace: Pace = VIRTUAL) -> Verdict:
    """Run a scenario under a plan, and look whether all is well afterwards; `heal`: when nothing goes wrong any more."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    started = time.monotonic()
    with _world(plan, pace) as world:
        clock = world[0].clock
        begun = clock.now()
        story = _play(world, scenario)
        took = clock.now() - begun
        problems = story.problems(world.faults.runner.killed)
        if took > STEPS * pace.step:
            problems.append(f"it took {took:.1f} s")
        problems += [f"{key!r} ran {n} times" for key, n in scenarios.ran.items() if n > _allowed(key)]
        story.outcomes.clear()
        if heal:
            world.faults.set("")
        _let_go()
        problems += _unrest(world, pace.rest)
        report = world.faults.report()
    problems += _stuck_threads()
    return Verdict(scenario, plan, tuple(problems), time.monotonic() - started, len(report), str(report))


def _play(world: World, scenario: str) -> Story:
    scenarios.ran.clear()
    scenarios.kept.clear()
    story = Story()
    SCENARIOS[scenario](world, story)
    return story


def _allowed(key: str) -> int:
    return 2 if key.startswith("async") else 1  # (two calls share such a key)


def _let_go() -> None:
    scenarios.kept.clear()
    gc.collect()


def _unrest(world: World, rest: float) -> list[str]:
    clock, looked = world[0].clock, [-1.0]

    def at_rest() -> bool:
        if not world.unrest():
            return True
        if looked[0] != clock.now():
            looked[0] = clock.now()
            _let_go()  # what was asked for before somebody died may be done only now
        return False

    try:
        world.wait_until(at_rest, rest)
    except AssertionError:
        return [f"not at rest after {rest} s: {each}" for each in world.unrest()]
    return []


def _stuck_threads() -> list[str]:
    end = time.monotonic() + 5.0
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("remora-")]:
        if time.monotonic() > end:
            return [f"threads left behind: {left}"]
        time.sleep(0.001)
    return []


def single_faults(messages: Counter[Message]) -> Iterator[str]:
    """Every single fault at every one of these messages."""
    for (sender, receiver, kind), n in sorted(messages.items()):
        if kind == MessageType.GOODBYE:
            continue
        for i in range(1, n + 1):
            there = f"{kind.name} {sender}->{receiver}"
            deeds = ["drop", "duplicate", "reorder", "corrupt", *(["fail"] if kind & REQUEST else [])]
            yield from (f"{deed} {there} #{i}" for deed in deeds)
            yield f"delay {there} 30ms #{i}"
            if sender != receiver:
                yield from (f"cut {sender}-{receiver} after {i} {kind.name}{end}" for end in (" for 0ms", " for 100ms", ""))
                yield from (f"kill {worker} after {i} {kind.name}" for worker in (sender, receiver))
                yield f"freeze {receiver} after {i} {kind.name} for 100ms"
    if any(kind == MessageType.GOODBYE for _, _, kind in messages):  # who is heard last is a matter of luck
        yield from (f"{deed} GOODBYE * #{i}" for deed in ("drop", "duplicate", "reorder", "corrupt") for i in (1, 2))


KINDS = [None, *(kind for kind in MessageType if kind not in (MessageType.VOID, MessageType.CANCEL))]
NAMES = ["worker0", "worker1", "worker2"]




def latency_of(scenario: str, pace: Pace) -> float:
    """How long every message takes, in seconds. In virtual time a program would else be done before the first fault that
    comes at a time; but goodbyes are waited for in real time, and would not come in it."""
    return 0.004 if pace.clock == "auto" and scenario != "shutdown" else 0.0


def random_plan(seed: int, latency: float = 0.0) -> Plan:
    """A few faults at random, the same for the same seed; workers are seldom killed. Every message takes its time."""
    chance = random.Random(seed)
    makers = [_random_message_fault] * 6 + [_random_cut] * 2 + [_random_freeze, _random_kill]
    faults = [chance.choice(makers)(chance) for _ in range(chance.randint(1, 4))]
    slowness = [MessageFault("delay", None, Pair("*", "*"), Which(), 1.0, latency)] if latency else []
    return Plan((*faults, *slowness), seed)


def _random_message_fault(chance: random.Random) -> Fault:
    deed = chance.choice(DEEDS)
    kind = chance.choice(KINDS) if chance.random() < 0.5 else None
    sender, receiver = chance.choice([*NAMES, "*"]), chance.choice([*NAMES, "*"])
    seconds = chance.uniform(0.001, 0.05) if deed == "delay" else 0.0
    which = chance.choice([Which(), Which("first", chance.randint(1, 4)), Which("nth", chance.randint(1, 6))])
    likely = 1.0 if which != Which() else chance.uniform(0.02, 0.3)
    return MessageFault(deed, kind, Pair(sender, receiver), which, likely, seconds)


def _random_when(chance: random.Random) -> When:
    return When(after=chance.randint(1, 20)) if chance.random() < 0.7 else When(at=chance.uniform(0.0, 0.1))


def _random_cut(chance: random.Random) -> Fault:
    link = Pair(*chance.sample(NAMES, 2), both=True)
    lasting = None if chance.random() < 0.15 else chance.uniform(0.0, 0.15)
    if chance.random() < 0.2:
        lonely = chance.choice(NAMES)
        rest = tuple(name for name in NAMES if name != lonely)
        return Partition(((lonely,), rest), When(at=chance.uniform(0.0, 0.05)), lasting)
    return Cut(link, _random_when(chance), lasting)


def _random_freeze(chance: random.Random) -> Fault:
    return Freeze(chance.choice(NAMES), _random_when(chance), chance.uniform(0.02, 0.2))


def _random_kill(chance: random.Random) -> Fault:
    return Kill(chance.choice(NAMES[1:]), _random_when(chance))
