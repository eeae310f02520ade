"""Threads of a worker around the machine of `remora.protocol.leader`, in every interleaving. Not tests.

A world has the real machine, a poller, a gate with its timer, a queue, and a few threads that do what
`remora.agent.runtime.leader_followers` and `remora.agent.runtime.pool` do, one step at a time. A step is one method
of the machine, one
system call, or one operation on a shared count. Between any two of them any other thread may act, an event may arrive, a
task may be queued by another thread, a destructor may wait, the leader may fail, the end may come.

Time is a number that goes up by one. In a *prompt* world it does so only when no thread can do anything: then waiting times
can be bounded (L3, L5). In any other world it does so at any moment. Times are kept as distances from now, as far as the
machine can tell them apart, so the worlds of a scenario are finite in number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from remora.protocol.leader import (
    ANSWERING,
    HELP,
    IDLE,
    NEVER,
    NONE,
    OPEN,
    RUNNING,
    SHUT,
    TAKE_OVER,
    WAITING,
    Alarm,
    Effects,
    Leadership,
    Thresholds,
)
from tests.model.walk import Broken, Finding, Move, NotWalked, Rules, walk

LIMITS = Thresholds(
    look_every=2, relaxed=2, few_steps=3, fast_for=4, medium=0.5, long=2, long_if_behind=1, long_answer=3, reading=4,
    late_looks=2, relief=-1, helped=1, spare=2, term=0, streak=10**9, spin=0,
)  # fmt: skip

# What an event or a task is: its task ends at once; lasts until it is freed; waits for something remote until it is freed;
# the same for ever; its event is read until it is freed; frees the others.
SHORT, LASTS, WAITS, STAYS, READS, FREES = "short", "lasts", "waits", "stays", "reads", "frees"

OUTSIDE = 0  # a thread of the program, which queues a task


@dataclass(frozen=True)
class Scenario:
    """What may happen, once each."""

    name: str
    arrive: tuple[str, ...] = ()  # events, in this order
    queue: tuple[str, ...] = ()  # tasks that a thread of the program queues
    destructor: bool = False  # one waits on the leader while it is IDLE
    fails: bool = False  # the leader, once, with nothing in its hands
    ends: bool = False  # what lasts may end by itself
    stops: bool = False
    prompt: bool = True
    threads: int = 3
    limits: Thresholds = LIMITS

    @property
    def limit(self) -> float:
        """For how long anything may wait for a leader that is stuck (L3): until it is long, for the look after that, and
        for the second one."""
        each = self.limits
        first = each.relaxed * each.look_every + max(each.long, each.long_answer)
        return first + max(each.look_every, each.reading + each.relaxed * each.look_every if READS in self.arrive else 0)


@dataclass(frozen=True)
class Thread:
    """Where a thread is, and what it has yet to carry out before it goes on."""

    at: str = "absent"
    todo: tuple[Any, ...] = ()
    hand: tuple[str, ...] = ()  # events or the task
    brief: bool = False  # it has helped, and ends after a term
    deferred: bool = False
    passes: bool = False
    called: bool = False
    resume: str = ""  # where it was when a destructor began


@dataclass
class World:
    """A moment."""

    scenario: Scenario
    machine: Leadership
    threads: list[Thread]
    now: int = 100
    events: tuple[str, ...] = ()
    woken: bool = False  # the poller was
    gate: bool = False  # lets one pass
    timer: float = NEVER
    rings: bool = False
    queue: tuple[str, ...] = ()
    arrive: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    destructor: bool = False
    fails: bool = False
    stops: bool = False
    stopped: bool = False
    freed: bool = False
    called: bool = False  # a helper was, for what is in the queue
    waited: int = 0  # time for which something waited and no thread could take it
    idle_rings: int = 0  # alarms since something last came
    trace: tuple[Any, ...] = field(default=(), compare=False)


def beginning(scenario: Scenario) -> World:
    world = World(
        scenario, Leadership(scenario.limits), [Thread() for _ in range(scenario.threads + 1)], arrive=scenario.arrive,
        outside=scenario.queue, destructor=scenario.destructor, fails=scenario.fails, stops=scenario.stops,
    )  # fmt: skip
    world.machine.followers = 1
    world.threads[1] = Thread("wait")
    return world


def copied(world: World) -> World:
    machine = Leadership.__new__(Leadership)
    for name in Leadership.__slots__:
        setattr(machine, name, getattr(world.machine, name))
    new = World.__new__(World)
    new.__dict__.update(world.__dict__)
    new.machine, new.threads = machine, list(world.threads)
    return new


def key(world: World) -> Hashable:
    """What the future depends on. A field of the machine that is not in it would make two worlds one."""
    machine, limits, now = world.machine, world.scenario.limits, world.now

    def ago(moment: float, most: float) -> float:
        return max(moment - now, -most - 1)

    return (
        machine.thread, machine.followers, machine.doing, machine.open, machine.alarm_set, machine.pace, machine.called,
        machine.late, machine.few, min(machine.helped, limits.helped + 1),
        min(machine.steps - machine.set_steps, machine.few + limits.few_steps * 2), machine.stuck_steps == machine.steps,
        ago(machine.began, limits.long + 1), ago(machine.long_at, limits.reading), ago(machine.open_until, 0),
        ago(machine.fast_until, 0), ago(machine.renew_at, 0), tuple(world.threads), world.events, world.woken, world.gate,
        ago(world.timer, 0), world.rings, world.queue, world.arrive, world.outside, world.destructor, world.fails,
        world.stops, world.stopped, world.freed, world.waited, world.idle_rings, world.called,
    )  # fmt: skip


# What may happen.

def moves(world: World) -> list[Move]:
    found: list[Move] = [("step", me) for me in range(len(world.threads)) if can_step(world, me)]
    if world.timer <= world.now:
        found.append(("ring",))
    at_rest = not found
    if at_rest:
        check_rest(world)
    if world.timer < NEVER and (at_rest or not world.scenario.prompt):
        found.append(("tick",))
    found += surprises(world)
    return found


def surprises(world: World) -> Iterator[Move]:
    if world.arrive and not world.stopped:
        yield ("arrive",)
    if world.outside and not world.stopped:
        yield ("queue",)
    for me, thread in enumerate(world.threads):
        if thread.at in ("poll", "busy") and not thread.todo and not world.stopped:
            if world.destructor:
                yield "destructor", me
            if world.fails and thread.at == "busy" and not thread.hand:
                yield "fail", me
        if thread.brief and thread.at == "asleep" and not thread.todo:
            yield "term", me
    if world.scenario.ends and not world.freed:
        yield ("end",)
    if world.stops and not world.stopped:
        yield ("stop",)


def can_step(world: World, me: int) -> bool:
    thread = world.threads[me]
    if thread.todo:
        return True
    if thread.at == "absent":
        return False
    if thread.at == "poll":
        return bool(world.events) or world.woken
    if thread.at == "asleep":
        return world.rings or (world.gate and (bool(world.events) or world.woken))
    if thread.at in ("lasting", "blocked", "reading", "in_destructor"):
        return world.freed
    return thread.at != "staying"


def make(before: World, move: Move) -> World:
    """The world after a move."""
    world = copied(before)
    world.trace = (before.trace, described(before, move))
    kind, machine = move[0], world.machine
    if kind == "step":
        step(world, move[1])
    elif kind == "ring":
        world.timer, world.rings = NEVER, True
        idle = machine.doing is IDLE and not waits(world) and world.scenario.prompt
        world.idle_rings = world.idle_rings + 1 if idle else 0
        require(world.idle_rings <= 2, "L5: alarms ring, and there is nothing to do")
    elif kind == "tick":
        world.now += 1
        world.waited = world.waited + 1 if waits(world) and world.scenario.prompt and not world.stopped else 0
        at_once = machine.doing is WAITING or world.called
        too_long = world.waited > (0 if at_once else world.scenario.limit)
        require(not too_long, "L3: {} waited for {}", [*world.events, *world.queue], world.waited)
    elif kind == "arrive":
        world.events, world.arrive = (*world.events, world.arrive[0]), world.arrive[1:]
    elif kind == "queue":
        world.queue, world.outside = (*world.queue, world.outside[0]), world.outside[1:]
        world.threads[OUTSIDE] = Thread(todo=("wake",))
    elif kind == "destructor":
        world.destructor = False
        at = world.threads[move[1]].at
        go(world, move[1], "in_destructor", ("block", "ensure"), resume=at)
    elif kind == "fail":
        world.fails = False
        go(world, move[1], "exit")
    elif kind == "term":
        go(world, move[1], "over")
    elif kind == "end":
        world.freed = True
    elif kind == "stop":
        world.stops, world.stopped = False, True
        stop(world)
    machine.check()
    check(world)
    return world


def described(world: World, move: Move) -> str:
    if move[0] != "step":
        return " ".join(map(str, move))
    thread = world.threads[move[1]]
    return f"thread {move[1]}: {thread.todo[0] if thread.todo else thread.at} {' '.join(thread.hand)}"


def require(kept: bool, words: str, *of: object) -> None:
    if not kept:
        raise Broken(words.format(*of))


def waits(world: World) -> bool:
    return bool(world.events or world.queue or world.woken)


def check(world: World) -> None:
    """What must be true at any moment."""
    at_poller = [me for me, each in enumerate(world.threads) if each.at in ("shut", "poll")]
    if not world.scenario.destructor:  # (one that waited there may be replaced, and still come back to the poller)
        require(len(at_poller) <= 1, "L2: {} lead", at_poller)
        require(all(world.machine.thread == me for me in at_poller), "L2: {} believes that it leads", at_poller)


def check_rest(world: World) -> None:
    """What must be true when no thread can do anything by itself."""
    machine = world.machine
    if world.timer < NEVER:
        return
    if world.stopped:
        away = ("absent", "lasting", "blocked", "staying", "reading", "in_destructor")
        back = all(each.at in away for each in world.threads)
        require(back, "L6: {} did not return", [each.at for each in world.threads])
        return
    require(not waits(world), "L1: no thread will see {}", [*world.events, *world.queue] or "the wake-up")
    if machine.doing is IDLE:
        is_open = machine.open or world.gate
        require(not is_open or world.scenario.limits.relief >= 0, "L4: the leader is back, and the gate is open")
        require(not machine.alarm_set, "L5: an alarm is set for nothing")


# What threads do.


def go(world: World, me: int, at: str, todo: tuple[Any, ...] = (), **changes: Any) -> None:
    world.threads[me] = replace(world.threads[me], at=at, todo=todo, **changes)


def later(world: World, me: int, todo: tuple[Any, ...]) -> None:
    world.threads[me] = replace(world.threads[me], todo=todo)


def step(world: World, me: int) -> None:
    thread = world.threads[me]
    if thread.todo:
        first, rest = thread.todo[0], thread.todo[1:]
        later(world, me, rest)
        carry_out(world, me, first)
    else:
        getattr(SerialQueue, thread.at)(world, me, thread)


def carry_out(world: World, me: int, effect: Any) -> None:
    """One thing of those that a thread has yet to do."""
    machine, rest = world.machine, world.threads[me].todo
    if effect is OPEN:
        world.gate = True
        later(world, me, ("opened", *rest))
    elif effect is SHUT:
        world.gate = False
        later(world, me, ("was shut", *rest))
    elif isinstance(effect, Alarm):
        world.timer = world.now + effect.seconds
        later(world, me, ("look at call", *rest))
    elif effect is HELP:
        world.timer = world.now
        world.idle_rings = 0
    elif effect is TAKE_OVER:
        effects = take_over(world, me, world.threads[me].hand and int(world.threads[me].hand[1]))
        later(world, me, ((OPEN,) if effects is None else effects) + rest)
    elif effect == "look at call":
        if machine.called_meanwhile():
            world.timer = world.now
    elif effect == "opened":
        later(world, me, machine.opened(world.now) + rest)
    elif effect == "was shut":
        later(world, me, machine.was_shut() + rest)
    elif effect == "ensure":
        ensure_follower(world)
    elif effect == "block":
        if machine.thread == me:
            later(world, me, machine.block() + rest)
    elif effect == "kick":
        later(world, me, ("wake", *rest) if world.queue else rest)
    else:
        assert effect == "wake"
        world.called = machine.thread != me and machine.doing in (RUNNING, ANSWERING, WAITING)
        if machine.wakes_leader(me):
            world.woken = True
        else:
            later(world, me, (*machine.call_helper(), *rest))


def take_over(world: World, me: int, leader: int) -> Effects | None:
    return world.machine.take_over(me, leader, world.now)


def start_thread(world: World) -> None:
    if world.stopped:
        return
    free = next((each for each in range(1, len(world.threads)) if world.threads[each].at == "absent"), None)
    if free is None:
        raise NotWalked
    world.threads[free] = Thread("wait")


def ensure_follower(world: World) -> None:
    if world.machine.followers < 1:
        world.machine.followers += 1
        start_thread(world)


def stop(world: World) -> None:
    world.woken, world.timer = True, world.now


def take(world: World) -> tuple[str, ...]:
    """What the poller has."""
    taken, world.events, world.woken = world.events, (), False
    world.waited = world.idle_rings = 0
    return taken


class SerialQueue:
    """By where a thread is. Each leaves it somewhere else."""

    @staticmethod
    def wait(world: World, me: int, thread: Thread) -> None:
        if world.machine.thread == NONE:
            effects = take_over(world, me, NONE)
            if effects is not None:
                world.machine.followers -= 1
                go(world, me, "next", effects, brief=False)
                return
        go(world, me, "gate")

    @staticmethod
    def gate(world: World, me: int, thread: Thread) -> None:
        if world.stopped:
            go(world, me, "back", hand=())
        elif world.machine.open and not thread.deferred:
            go(world, me, "asleep", (OPEN,))
        else:
            go(world, me, "asleep")

    @staticmethod
    def asleep(world: World, me: int, thread: Thread) -> None:
        passes = world.gate and (bool(world.events) or world.woken)
        if passes:
            world.gate = False
        rang, world.rings = world.rings, False
        go(world, me, "rang" if rang else "at_gate", passes=passes, deferred=False)

    @staticmethod
    def rang(world: World, me: int, thread: Thread) -> None:
        called = world.machine.rang()
        go(world, me, "look", called=called)

    @staticmethod
    def look(world: World, me: int, thread: Thread) -> None:
        effects = world.machine.decide(world.now, thread.called, bool(world.queue or world.events))
        if HELP in effects:
            todo = tuple(each for each in effects if each is not HELP)
            go(world, me, "back", todo, hand=(), called=False, passes=False)
        else:
            go(world, me, "at_gate", effects, called=False)

    @staticmethod
    def at_gate(world: World, me: int, thread: Thread) -> None:
        if not thread.passes or not world.machine.open:
            go(world, me, "gate", passes=False)
        elif world.machine.may_help(world.now):
            go(world, me, "glance", passes=False)
        else:
            go(world, me, "gate", world.machine.defer(world.now), passes=False, deferred=True)

    @staticmethod
    def glance(world: World, me: int, thread: Thread) -> None:
        if world.events or world.woken:
            go(world, me, "back", (OPEN,), hand=take(world))
        else:
            go(world, me, "gate")

    @staticmethod
    def over(world: World, me: int, thread: Thread) -> None:
        go(world, me, "back", (OPEN,) if world.machine.open else (), hand=("end",))

    @staticmethod
    def back(world: World, me: int, thread: Thread) -> None:
        if world.machine.followers <= 1:
            start_thread(world)  # in its place
        else:
            world.machine.followers -= 1
            ensure_follower(world)
        go(world, me, "exit" if thread.hand == ("end",) else "handle")

    @staticmethod
    def next(world: World, me: int, thread: Thread) -> None:
        if world.stopped:
            go(world, me, "exit")
        elif world.machine.idle(me):
            go(world, me, "shut", hand=())
        elif world.machine.followers >= world.scenario.limits.spare:
            go(world, me, "handle" if world.queue else "exit", hand=())
        else:
            world.machine.followers += 1
            go(world, me, "wait", hand=(), brief=True)

    @staticmethod
    def shut(world: World, me: int, thread: Thread) -> None:
        go(world, me, "poll", world.machine.shut_due(world.now))

    @staticmethod
    def poll(world: World, me: int, thread: Thread) -> None:
        go(world, me, "busy", hand=take(world))

    @staticmethod
    def busy(world: World, me: int, thread: Thread) -> None:
        world.machine.busy(me, world.now)
        go(world, me, "alarm" if world.machine.thread == me else "handle")

    @staticmethod
    def alarm(world: World, me: int, thread: Thread) -> None:
        go(world, me, "handle", world.machine.alarm_due(world.now))

    @staticmethod
    def handle(world: World, me: int, thread: Thread) -> None:
        ensure_follower(world)
        if READS in thread.hand and not world.freed:
            go(world, me, "reading")
        else:
            SerialQueue.reading(world, me, thread)

    @staticmethod
    def reading(world: World, me: int, thread: Thread) -> None:
        world.queue += thread.hand
        go(world, me, "take", hand=())

    @staticmethod
    def take(world: World, me: int, thread: Thread) -> None:
        if world.queue:
            task, world.queue = world.queue[0], world.queue[1:]
            world.waited, world.called = 0, False
            go(world, me, "task", hand=(task,))
        else:
            go(world, me, "next")

    @staticmethod
    def task(world: World, me: int, thread: Thread) -> None:
        ensure_follower(world)
        leader = world.machine.thread
        if leader == me:
            effects = world.machine.begin_task(world.now, len(world.queue))
        else:
            effects = world.machine.begin_help(len(world.queue))
        go(world, me, "run", effects, hand=(thread.hand[0], str(leader)))

    @staticmethod
    def run(world: World, me: int, thread: Thread) -> None:
        task = thread.hand[0]
        if task == FREES:
            world.freed = True
        if task == LASTS and not world.freed:
            go(world, me, "lasting")
        elif task == WAITS and not world.freed:
            go(world, me, "blocked", ("block", "ensure", "kick"))
        elif task == STAYS:
            go(world, me, "staying", ("block", "ensure", "kick"))
        else:
            SerialQueue.lasting(world, me, thread)

    @staticmethod
    def lasting(world: World, me: int, thread: Thread) -> None:
        if world.machine.thread == me:
            world.machine.answer(world.now)
        go(world, me, "take", hand=())

    blocked = lasting

    @staticmethod
    def in_destructor(world: World, me: int, thread: Thread) -> None:
        go(world, me, thread.resume, resume="")

    @staticmethod
    def exit(world: World, me: int, thread: Thread) -> None:
        world.threads[me] = Thread()
        if world.stopped:
            stop(world)  # pass the news on
            return
        effects = world.machine.leave(me)
        if effects:
            ensure_follower(world)
            world.timer = world.now
            world.woken = True


# The walk.

RULES = Rules(moves, make, key, described)


def explore(scenario: Scenario, most: int = 400_000) -> Finding:
    """Every world that a scenario can lead to."""
    return walk(scenario.name, beginning(scenario), RULES, most)
