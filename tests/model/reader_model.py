"""Threads around one link and the machine of `remora.protocol.reader`, in every interleaving. Not tests.

A world has the real machine, a link (two, if it breaks), a poller, and a few threads that do what the receiving half of a
channel does, one step at a time: threads of the program that call and wait, pool threads, the timer, the tick. A step is one
method of the machine, one system call, or one operation on a shared set, queue or turn. Between any two of them any other
thread may act, a reply may arrive, an exception of a signal handler may strike the main thread, or a handler may hold it up.

Waits have no time limit here, and the tick comes only where a scenario needs it: what is late in a worker until a time limit
has passed is lost in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from remora.protocol.reader import (
    ARM,
    ARM_AGAIN,
    COMPLETE,
    DEFER,
    FLUSH,
    LONG_AGO,
    PASS_ON,
    READ,
    ROUND,
    WAKE,
    WRITE,
    Effect,
    Effects,
    Reader,
    Registration,
    Thresholds,
)
from tests.model.walk import Broken, Finding, Move, Rules, walk

ONCE, LAST = 1, 2  # how the poller was asked to watch for bytes
PONG, END = 0, -1  # messages: an answer that only wakes the reader; the end of the link
REQUESTS = 100  # messages from this number on are requests, others are the replies to calls of that number
NOW = 1.0
LIMITS = Thresholds(round=0.1, memory=0.5)
TICKS = 3  # what a surprise leaves behind is put right by so many ticks


@dataclass(frozen=True)
class Scenario:
    """What may happen."""

    name: str
    sync: tuple[int, ...] = ()  # calls whose threads wait for the reply
    waits: tuple[tuple[int, ...], ...] = ()  # calls whose threads have futures of them, and wait: one thread for each group
    futures: tuple[int, ...] = ()  # calls whose threads have futures of them, and do not wait
    notified: tuple[int, ...] = ()  # calls of our own, of whose replies a thread wants to hear
    callbacks: tuple[int, ...] = ()  # calls with a future, to which a callback is added
    low: tuple[int, ...] = ()  # calls that are under way, and whose replies may wait
    expires: tuple[int, ...] = ()  # calls that another thread gives up
    requests: int = 0  # that come in
    pauses: bool = False  # flow control stops the reading, and lets it go on
    outbox: bool = False  # the kernel does not take what is written, for a while
    pool: int = 1
    came: bool = False  # a waiter came a moment ago
    owned: bool = False  # … and the channel is waiter-owned
    asleep: int = 0  # a call whose thread is parked at the beginning
    blocked: int = 0  # a call whose thread has a future of it, and is parked at the beginning
    patient: bool = False  # the timer does not run: what a thread waits for is not left to it
    main: int = -1  # which of the threads is the main thread
    strikes: int = 0
    holds: int = 0  # signal handlers that take long
    nested: int = 0  # the call that a signal handler makes, and waits for
    breaks: int = 0  # links that break
    closes: bool = False
    ticks: bool = False
    partial: bool = False  # a read may leave something
    lasts: bool = True  # the kind of poller
    fine: bool = False  # no steps are taken as one


class Thread(NamedTuple):
    """Where a thread is, and what it knows."""

    kind: str
    at: str
    back: tuple[str, ...] = ()  # where it goes on after this part
    calls: tuple[int, ...] = ()  # what it waits for
    port: int | None = None  # the link it reads
    arms: int | None = None  # the link whose registration it decides
    armed: int = 0
    events: int = 0
    holder: int | None = None
    n: int = 0  # how many, or how far
    taken: bool = False  # `pending` had the call that is being settled
    share: tuple[int, ...] = ()
    mine: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    dying: bool = False  # struck
    held: bool = False  # a signal handler is on top of it
    below: tuple[Any, ...] = ()  # what the handler interrupted


class Link(NamedTuple):
    """A link, and what the poller knows of it."""

    socket: tuple[int, ...] = ()
    known: bool = True  # to the poller
    mask: int = 0
    writes: bool = False  # the poller tells when there is room
    queued: bool = False  # the poller has an event
    unread: bool = False
    outbox: bool = False
    room: bool = True


class World:
    """A moment."""

    scenario: Scenario
    machine: Reader
    registrations: list[Registration]
    links: list[Link]
    threads: list[Thread]
    port: int | None
    role: int  # threads are numbered from 1; 0: none
    token: int  # of the role
    sorting: int
    arming: tuple[int, ...]  # the thread that decides, for each link
    pending: frozenset[int]
    sent: frozenset[int]  # the peer has these, and has not answered
    unsent: frozenset[int]  # kept until there is a link
    lazy: frozenset[int]  # left to be written with others
    replied: frozenset[int]
    failed: frozenset[int]
    done: frozenset[int]  # completed
    signals: frozenset[int]  # synchronous calls whose threads can be woken
    woken: frozenset[int]
    noted: frozenset[int]  # calls of which a thread wants to hear
    inbox: tuple[int, ...]
    answered: tuple[int, ...]
    tasks: tuple[Any, ...]
    order: tuple[int, ...]  # in which messages arrived
    received: int  # so many of them were sorted
    pong: bool  # on its way
    pinged: int  # how often the reader was woken since the last of them
    timer: bool
    paused: bool
    closed: bool
    left: dict[str, int]  # surprises
    ticked: int  # since the last surprise
    vain: int  # how often the poller told, and nothing came of it
    trace: Any


NUMBERED = (
    "port", "role", "sorting", "arming", "pending", "sent", "unsent", "lazy", "replied", "failed", "done", "signals",
    "woken", "noted", "inbox", "answered", "tasks", "order", "received", "pong", "pinged", "timer", "paused", "closed",
    "ticked", "vain",
)  # fmt: skip
SETS = ("low_priority", "notify_ids", "parked")
DICTS = ("deferred", "deferred_long")
PLAIN = ("unwatched", "last_waiter_at", "counted", "waiter_owned")


def beginning(scenario: Scenario) -> World:
    world = World()
    world.scenario = scenario
    world.machine = machine = Reader(LIMITS)
    world.registrations, world.links, world.port = [Registration()], [Link()], 0
    threads = [Thread("none", "over")]
    threads += [Thread("sync", "unwatch", calls=(call,)) for call in scenario.sync]
    threads += [Thread("async", "list", calls=calls) for calls in scenario.waits]
    threads += [Thread("future", "list", calls=(call,)) for call in scenario.futures]
    threads += [Thread("later", "list", calls=(call,)) for call in scenario.callbacks]
    threads += [Thread("callback", "list", calls=(call,)) for call in scenario.notified]
    threads += [Thread("sync", "asleep", calls=(scenario.asleep,))] * (scenario.asleep > 0)
    threads += [Thread("async", "blocked", calls=(scenario.blocked,))] * (scenario.blocked > 0)
    threads += [Thread("pool", "idle")] * scenario.pool
    threads += [Thread("expiry", "expire", calls=(call,)) for call in scenario.expires]
    if scenario.closes:
        threads.append(Thread("closer", "close"))
    if scenario.outbox:
        threads.append(Thread("writer", "write"))
    if scenario.pauses:
        threads.append(Thread("flow", "pause"))
    if scenario.owned or scenario.came or scenario.waits:
        threads.append(Thread("timer", "timer"))
    if scenario.ticks:
        threads.append(Thread("tick", "tick"))
    world.threads = threads
    world.role = world.token = world.sorting = 0
    world.arming = (0,)
    for name in ("sent", "unsent", "lazy", "replied", "failed", "done", "signals", "woken", "noted"):
        setattr(world, name, frozenset())
    world.pending = world.sent = frozenset(scenario.low)
    machine.low_priority = set(scenario.low)
    if scenario.asleep:
        machine.notify_ids.add(scenario.asleep)
        world.signals |= {scenario.asleep}
        world.pending, world.sent = world.pending | {scenario.asleep}, world.sent | {scenario.asleep}
    if scenario.blocked:
        machine.parked.add(next(me for me, each in enumerate(threads) if each.at == "blocked"))
        world.pending, world.sent = world.pending | {scenario.blocked}, world.sent | {scenario.blocked}
    world.inbox = world.answered = world.tasks = world.order = ()
    world.pong = world.timer = world.paused = world.closed = False
    world.ticked = world.vain = world.received = world.pinged = 0
    world.trace = ()
    if scenario.owned or scenario.came:
        machine.came(NOW)
    if scenario.owned:
        machine.sent_async(NOW)
        machine.owned()
        world.timer = True
    world.left = {
        "strike": scenario.strikes, "hold": scenario.holds, "nest": int(scenario.nested > 0), "break": scenario.breaks,
        "request": scenario.requests, "age": int(not scenario.patient),
    }  # fmt: skip
    arm(world, 0, READ)
    world.registrations[0].armed = READ
    return world


def copied(world: World) -> World:
    new = World.__new__(World)
    new.__dict__.update(world.__dict__)
    machine = Reader.__new__(Reader)
    old = world.machine
    machine.thresholds = old.thresholds
    machine.unwatched, machine.counted, machine.waiter_owned = old.unwatched, old.counted, old.waiter_owned
    machine.last_waiter_at = old.last_waiter_at
    machine.seen, machine.stalled, machine.woken = old.seen, old.stalled, old.woken
    machine.low_priority, machine.notify_ids, machine.parked = set(old.low_priority), set(old.notify_ids), set(old.parked)
    machine.deferred, machine.deferred_long = dict(old.deferred), dict(old.deferred_long)
    registrations = []
    for each in world.registrations:
        registration = Registration.__new__(Registration)
        registration.armed, registration.again, registration.unsure = each.armed, each.again, each.unsure
        registrations.append(registration)
    new.machine, new.registrations = machine, registrations
    new.links, new.threads, new.left = list(world.links), list(world.threads), dict(world.left)
    return new


def key(world: World) -> Hashable:
    """What the future depends on. A field that is not in it would make two worlds one."""
    machine, role = world.machine, world.role and world.token
    threads = [each if each.holder is None else each._replace(holder=-(each.holder == role)) for each in world.threads]
    return (
        tuple([world.__dict__[name] for name in NUMBERED]),
        tuple([frozenset(getattr(machine, name)) for name in SETS]),
        tuple([frozenset(getattr(machine, name)) for name in DICTS]),
        tuple([getattr(machine, name) for name in PLAIN]),
        role and machine.seen == role, role and machine.stalled == role, role and machine.woken == role,
        tuple([(each.armed, each.again, each.unsure) for each in world.registrations]),
        tuple(world.links), tuple(world.left.values()),
        tuple(threads),
    )  # fmt: skip


# What may happen.

def moves(world: World) -> list[Move]:
    found: list[Move] = []
    for me, thread in enumerate(world.threads):
        if not thread.held and thread.at not in ("tick", "timer"):
            found += [("step", me, choice) for choice in choices(world, me, thread)]
    for me, thread in enumerate(world.threads):
        if thread.at == "timer" and world.timer and not world.scenario.patient and (not found or hurries(world)):
            found.append(("step", me, None))
    if world.pong and world.port is not None and END not in world.links[world.port].socket:
        found.append(("pong",))
    if not found and world.scenario.holds:  # what a wait cannot see comes to an end with its limit
        found += [("limit", me) for me, each in enumerate(world.threads) if each.at == "bytes" and is_late(world, each)]
    if not found and world.ticked < TICKS and not world.left["strike"]:
        found += [("step", me, None) for me, thread in enumerate(world.threads) if thread.at == "tick"]
    if not found:
        check_rest(world)
    return [*found, *surprises(world)]


def is_late(world: World, thread: Thread) -> bool:
    return not thread.held and not world.pending & set(thread.calls)


def hurries(world: World) -> bool:
    """The timer acts while others do, too: it does nothing that these could tell from what they do themselves, but to
    give the channel up."""
    return world.scenario.fine or world.machine.last_waiter_at == LONG_AGO or world.closed


def surprises(world: World) -> Iterator[Move]:
    scenario, left = world.scenario, world.left
    if world.port is not None and not world.closed and END not in world.links[world.port].socket:
        for call in sorted(world.sent):
            yield "arrive", call
        if left["request"]:
            yield ("request",)
        if left["break"]:
            yield ("break",)
    if world.port is not None and not world.links[world.port].room:
        yield ("room",)
    if scenario.main > 0:
        thread = world.threads[scenario.main]
        if left["strike"] and strikable(thread):
            yield ("strike",)
        if thread.held:
            yield ("let_go",)
        elif left["hold"] and strikable(thread):
            yield ("hold",)
        if left["nest"] and thread.at in ("bytes", "async_bytes"):
            yield ("nest",)
    if left["age"] and world.machine.last_waiter_at != LONG_AGO:
        yield ("age",)


def strikable(thread: Thread) -> bool:
    return thread.at not in ("over", "dead", "unwatch", "list") and not thread.dying and not thread.held and not thread.below


def choices(world: World, me: int, thread: Thread) -> list[Any]:
    """In how many ways a thread can go on; none if it cannot."""
    at = thread.at
    if at in ("over", "dead"):
        return []
    if at == "idle":
        found: list[Any] = [("event", number) for number, link in enumerate(world.links) if fires(link)]
        return found + ([("task",)] if world.tasks else [])
    if at in ("bytes", "async_bytes"):
        assert thread.port is not None
        link = world.links[thread.port]
        return [None] if link.socket or not link.known else []
    if at == "asleep":
        return [None] if thread.calls[0] in world.woken else []
    if at == "blocked":
        return [None] if world.done.issuperset(thread.calls) or world.failed & set(thread.calls) & world.done else []
    if at in ("go_on", "attach", "close_link", "close_sorting"):
        return [None] if not world.sorting or world.sorting == me else []
    if at == "read" and thread.port is not None:
        few = world.scenario.partial and len(world.links[thread.port].socket) > 1
        return ["all", "first"] if few else ["all"]
    if at == "send" and thread.kind in ("async", "future", "later") and world.machine.waiter_owned:
        return ["now", "later"]
    return [None]


def fires(link: Link) -> bool:
    """Whether the poller has something to tell."""
    if not link.known:
        return False
    readable = bool(link.socket) and (link.queued if link.mask == LAST else link.mask == ONCE)
    return readable or (link.writes and link.room)


def make(before: World, move: Move) -> World:
    """The world after a move."""
    world = copied(before)
    world.trace = (before.trace, described(before, move))
    kind = move[0]
    if kind == "step":
        me = move[1]
        thread = world.threads[me]
        if thread.kind not in ("pool", "tick"):
            world.vain = 0
        STEPS[thread.at](world, me, thread, move[2])
        fused = fused_for(world, me)
        while (thread := world.threads[me]).at in fused or (thread.kind == "tick" and thread.at != "tick"):
            options = choices(world, me, thread)
            if len(options) != 1:
                break
            STEPS[thread.at](world, me, thread, options[0])
    else:
        if kind != "pong":
            world.vain = world.ticked = world.pinged = 0
        globals()["surprise_" + kind](world, *move[1:])
    world.machine.check()
    for each in world.registrations:
        each.check()
    check(world)
    return world


def fused_for(world: World, me: int) -> frozenset[str]:
    """The steps that are one with the step before."""
    exposed = me == world.scenario.main and (world.left["strike"] or world.threads[me].dying)
    return LOCAL if exposed or world.scenario.fine else FUSED


def described(world: World, move: Move) -> str:
    if move[0] != "step":
        return " ".join(map(str, move))
    thread = world.threads[move[1]]
    return f"thread {move[1]} ({thread.kind}): {thread.at} {move[2] or ''} {list(thread.calls) or ''}"


def require(kept: bool, words: str, *of: object) -> None:
    if not kept:
        raise Broken(words.format(*of))


def check(world: World) -> None:
    """What must be true at any moment."""
    sorts = [me for me, each in enumerate(world.threads) if each.at in ("read", "sort", "settle", "settled", "popped")]
    require(len(sorts) <= 1, "R2: {} sort", sorts)
    require(world.vain <= 2 * world.scenario.pool + 1, "R4: the poller tells of the same bytes, and no thread reads them")


def waited_for(world: World) -> frozenset[int]:
    """Calls for which a thread waits that can be told, and futures, for which one may come to ask."""
    found: set[int] = set()
    for each in world.threads:
        if each.at not in ("over", "dead") and not each.held and each.kind in ("sync", "async"):
            found.update(each.calls)
    if not world.scenario.patient:
        found.update((*world.scenario.futures, *world.scenario.callbacks))
        found.update(*world.scenario.waits)
    return frozenset(found) | (world.noted - world.done)


def check_rest(world: World) -> None:
    """What must be true when no thread can do anything by itself."""
    held = next((me for me, each in enumerate(world.threads) if each.held), 0)
    if held and held in (world.sorting, *world.arming):
        return  # for the few microseconds that this takes a handler can hold up others
    waited = waited_for(world)
    machine = world.machine
    if world.port is not None:
        link = world.links[world.port]
        lost = [each for each in link.socket if each in waited or (each >= REQUESTS and not world.paused) or each == END]
        idle = END in lost and len(lost) == 1 and not waited
        require(not lost or idle, "R1: no thread will read {}", lost)
        require(not (link.outbox and link.room), "R1: no thread will write what is left")
    require(not (world.inbox and waited & set(world.inbox)), "R1: no thread will sort {}", world.inbox)
    require(not world.lazy & waited, "R1: no thread will write {}", set(world.lazy))
    told = waited & (world.replied | world.failed) - world.done
    require(not told, "R3: no thread is woken for {}", set(told))
    if world.closed:
        rest = [*machine.parked, *machine.deferred, *machine.deferred_long, *world.answered]
        require(not rest, "R6: {} are left", rest)
        require(not any(link.known for link in world.links), "R6: something is armed")
        waiting = [each.at for each in world.threads if each.kind in ("sync", "async") and each.at not in ("over", "dead")]
        require(not waiting or bool(held), "R6: {} are left", waiting)
        require(not machine.waiter_owned and not world.timer, "R6: the timer is to come")


# Surprises.


def surprise_arrive(world: World, call: int) -> None:
    world.sent -= {call}
    world.order += (call,)
    deliver(world, call)


def surprise_request(world: World) -> None:
    message = REQUESTS + world.left["request"]
    world.left["request"] -= 1
    world.order += (message,)
    deliver(world, message)


def surprise_pong(world: World) -> None:
    world.pong = False
    deliver(world, PONG)


def surprise_break(world: World) -> None:
    world.left["break"] -= 1
    deliver(world, END)


def surprise_limit(world: World, me: int) -> None:
    """Nothing came for so long that the thread looks whether it is over."""
    go(world, me, "leave")


def surprise_room(world: World) -> None:
    assert world.port is not None
    world.links[world.port] = world.links[world.port]._replace(room=True)


def surprise_age(world: World) -> None:
    world.left["age"] -= 1
    world.machine.last_waiter_at = LONG_AGO


def surprise_hold(world: World) -> None:
    world.left["hold"] -= 1
    main = world.scenario.main
    world.threads[main] = world.threads[main]._replace(held=True)


def surprise_let_go(world: World) -> None:
    main = world.scenario.main
    world.threads[main] = world.threads[main]._replace(held=False)


def surprise_nest(world: World) -> None:
    """A signal handler calls, and waits for the reply."""
    world.left["nest"] -= 1
    main = world.scenario.main
    world.threads[main] = Thread("sync", "unwatch", calls=(world.scenario.nested,), below=(world.threads[main],))


def surprise_strike(world: World) -> None:
    """An exception of a signal handler strikes the main thread: what `finally` does is done."""
    world.left["strike"] -= 1
    me = world.scenario.main
    thread = world.threads[me]._replace(dying=True, back=())
    world.arming = tuple([0 if each == me else each for each in world.arming])
    if world.sorting == me:
        if thread.at == "read":
            assert thread.port is not None
            broken(world, thread.port)
        else:
            if thread.at in ("settled", "settle") and thread.taken:
                forget(world, world.inbox[0])
                tell(world, world.inbox[0])
            world.tasks += (("go_on",),)
        world.sorting = 0
    world.tasks += tuple([("complete", call) for call in thread.share])
    if world.role == me:
        thread = thread._replace(at="leave" if thread.kind == "sync" else "async_leave")
    else:
        thread = thread._replace(at="given_up")
    world.threads[me] = thread


def deliver(world: World, message: int) -> None:
    assert world.port is not None
    link = world.links[world.port]
    world.links[world.port] = link._replace(socket=(*link.socket, message), queued=link.queued or link.mask == LAST)


# What threads do.

Step = Callable[[World, int, Thread, Any], None]
STEPS: dict[str, Step] = {}


def step(function: Step) -> Step:
    STEPS[function.__name__.strip("_")] = function
    return function


def go(world: World, me: int, at: str, **changes: Any) -> None:
    world.threads[me] = world.threads[me]._replace(at=at, **changes)


def then(world: World, me: int, *parts: str, **changes: Any) -> None:
    """Go through these parts, the last of which is where the thread goes on."""
    thread = world.threads[me]
    world.threads[me] = thread._replace(at=parts[0], back=(*parts[1:], *thread.back), **changes)


def back(world: World, me: int, **changes: Any) -> None:
    thread = world.threads[me]
    world.threads[me] = thread._replace(at=thread.back[0], back=thread.back[1:], **changes)


def perform(world: World, me: int, effects: Effects, on: str, **changes: Any) -> None:
    """Carry out what the machine asks for, one step each, and go on there."""
    parts = [PARTS[each] for each in effects if each not in (ARM, ARM_AGAIN) or world.port is not None]
    then(world, me, *parts, on, arms=world.port if {"rearm", "rearm_again"} & set(parts) else None, **changes)


# Steps that touch nothing that is shared, or only look at it before the thread does what it would have done anyway.
LOCAL = frozenset((
    "armed", "reads", "got", "after", "after_passing", "async_reads", "async_got", "parked", "shared", "check",
))  # fmt: skip
# Steps that are one with the step before: whatever happens in between could as well happen before it, or after this one. Not
# so for a thread that may be struck in between, nor in a scenario that is walked in `fine` steps.
FUSED = LOCAL | {
    "arming", "decide", "want", "ask", "send", "recheck", "take", "async_take", "read", "settle", "settled", "popped",
    "passed", "left_counted", "flush", "round_over", "dispose", "handed_over", "come_for", "defer_rest", "next_round",
    "pool_passes", "look_up", "sleep", "set_timer", "was_read", "was_read_counted", "try_again", "replaced", "parks",
    "ready", "was_told",
}  # fmt: skip

PARTS: dict[Effect, str] = {
    ARM: "rearm", ARM_AGAIN: "rearm_again", FLUSH: "flush", PASS_ON: "pass_on", ROUND: "set_timer", WAKE: "look_up",
}  # fmt: skip


def arm(world: World, number: int, events: int) -> None:
    """The system call."""
    link = world.links[number]
    if not link.known:
        return
    mask = (LAST if events == READ and world.scenario.lasts else ONCE) if events & READ else 0
    world.links[number] = link._replace(mask=mask, writes=bool(events & WRITE), queued=mask == LAST and bool(link.socket))


def broken(world: World, number: int) -> None:
    """A link is of no use any more."""
    if world.port == number:
        world.port = None
        discard(world, number)
        world.tasks += (("attach",),)


def discard(world: World, number: int) -> None:
    world.links[number] = Link(known=False)
    world.tasks += (("close_link",),)


def forget(world: World, call: int) -> None:
    world.machine.low_priority.discard(call)
    world.machine.notify_ids.discard(call)


def is_async(world: World, call: int) -> bool:
    scenario = world.scenario
    of_one = (*scenario.futures, *scenario.callbacks, *scenario.notified, *scenario.low, scenario.blocked)
    return any(call in calls for calls in scenario.waits) or call in of_one


def tell(world: World, call: int) -> None:
    """A call is settled, and off the list."""
    if is_async(world, call):
        world.answered += (call,)
    elif call in world.signals:
        world.woken |= {call}


def settle_failed(world: World, call: int) -> None:
    world.failed |= {call}
    if is_async(world, call):
        world.tasks += (("complete", call),)
    elif call in world.signals:
        world.woken |= {call}


# … to have the poller watch.


@step
def rearm_again(world: World, me: int, thread: Thread, _: Any) -> None:
    assert thread.arms is not None
    world.registrations[thread.arms].again = True
    rearm(world, me, thread, _)


@step
def rearm(world: World, me: int, thread: Thread, _: Any) -> None:
    assert thread.arms is not None
    world.registrations[thread.arms].unsure = True
    go(world, me, "arming")


@step
def arming(world: World, me: int, thread: Thread, _: Any) -> None:
    assert thread.arms is not None
    if not world.registrations[thread.arms].unsure or decider(world, thread.arms):
        back(world, me, arms=None)
        return
    decides(world, thread.arms, me)
    go(world, me, "decide")


def decider(world: World, number: int) -> int:
    """The thread that decides what the poller watches for on a link. Each link has a turn of its own."""
    return world.arming[number]


def decides(world: World, number: int, me: int) -> None:
    world.arming = (*world.arming[:number], me, *world.arming[number + 1 :])


@step
def decide(world: World, me: int, thread: Thread, _: Any) -> None:
    assert thread.arms is not None
    go(world, me, "look", armed=world.registrations[thread.arms].decide())


@step
def look(world: World, me: int, thread: Thread, _: Any) -> None:
    go(world, me, "want", holder=role(world))


def role(world: World) -> int | None:
    return world.token if world.role else None


@step
def want(world: World, me: int, thread: Thread, _: Any) -> None:
    number = thread.arms
    assert number is not None
    link = world.links[number]
    events = world.machine.wanted_events(thread.holder, bool(world.sorting), link.outbox, world.paused)
    asks = world.port == number and world.registrations[number].must_ask(events, thread.armed, link.unread)
    go(world, me, "ask" if asks else "decided", events=events, holder=None)


@step
def ask(world: World, me: int, thread: Thread, _: Any) -> None:
    assert thread.arms is not None
    arm(world, thread.arms, thread.events)
    go(world, me, "decided")


@step
def decided(world: World, me: int, thread: Thread, _: Any) -> None:
    assert thread.arms is not None
    world.registrations[thread.arms].armed = thread.events
    decides(world, thread.arms, 0)
    go(world, me, "arming" if world.registrations[thread.arms].unsure else "armed", events=0, armed=0)


@step
def armed(world: World, me: int, thread: Thread, _: Any) -> None:
    back(world, me, arms=None)


# … to read and to sort.


@step
def receive(world: World, me: int, thread: Thread, _: Any) -> None:
    assert thread.port is not None
    if world.sorting:
        world.registrations[thread.port].again = True
        if not world.threads[world.sorting].held:
            world.vain = 0  # it spins for the few microseconds that sorting takes
        back(world, me)
    else:
        world.sorting = me
        go(world, me, "read")


@step
def read(world: World, me: int, thread: Thread, how: str) -> None:
    number = thread.port
    assert number is not None
    link = world.links[number]
    count = 1 if how == "first" else len(link.socket)
    taken = link.socket[:count]
    if not link.known or taken[:1] == (END,):
        broken(world, number)
        go(world, me, "sorted")
        return
    if END in taken:
        count = taken.index(END)
        taken = taken[:count]
    world.links[number] = link._replace(
        socket=link.socket[count:], unread=how == "first" if thread.kind == "pool" else link.unread
    )
    world.inbox += taken
    world.vain = 0
    go(world, me, "sort")


@step
def sort(world: World, me: int, thread: Thread, _: Any) -> None:
    if not world.inbox:
        go(world, me, "sorted")
        return
    message = world.inbox[0]
    if message == PONG:
        world.inbox = world.inbox[1:]
        return
    require(world.order[0] == message, "R5: {} is sorted before {}", message, world.order[0])
    if message in world.pending:
        world.replied |= {message}
        world.machine.low_priority.discard(message)
        go(world, me, "settle")
    else:
        go(world, me, "popped")


@step
def settle(world: World, me: int, thread: Thread, _: Any) -> None:
    message = world.inbox[0]
    taken = message in world.pending
    world.pending -= {message}
    go(world, me, "settled" if taken else "popped", taken=taken)


@step
def settled(world: World, me: int, thread: Thread, _: Any) -> None:
    forget(world, world.inbox[0])
    tell(world, world.inbox[0])
    go(world, me, "popped", taken=False)


@step
def popped(world: World, me: int, thread: Thread, _: Any) -> None:
    world.inbox, world.order = world.inbox[1:], world.order[1:]
    world.received += 1
    world.pinged = 0
    go(world, me, "sort")


@step
def sorted_(world: World, me: int, thread: Thread, _: Any) -> None:
    world.sorting = 0
    back(world, me)


@step
def pass_answered(world: World, me: int, thread: Thread, _: Any) -> None:
    world.tasks += tuple([("complete", call) for call in world.answered])
    go(world, me, "passed", others=world.answered)


@step
def passed(world: World, me: int, thread: Thread, _: Any) -> None:
    world.answered = tuple([each for each in world.answered if each not in thread.others])
    back(world, me, others=())


@step
def flush(world: World, me: int, thread: Thread, _: Any) -> None:
    write(world, world.lazy)
    world.lazy = frozenset()
    back(world, me)


def write(world: World, calls: frozenset[int]) -> None:
    if world.port is None:
        world.unsent |= calls
    else:
        world.sent |= calls


@step
def look_up(world: World, me: int, thread: Thread, _: Any) -> None:
    if world.role:
        world.tasks += (("ping",),)
        world.pinged += 1
        require(world.pinged <= 2, "R4: the reader is woken again and again")
    back(world, me)


# … to call and wait for the reply.


@step
def unwatch(world: World, me: int, thread: Thread, _: Any) -> None:
    if world.port is None:
        go(world, me, "list")
    else:
        perform(world, me, world.machine.sent(), "list")


@step
def list_(world: World, me: int, thread: Thread, _: Any) -> None:
    world.pending |= set(thread.calls)
    go(world, me, {"sync": "send", "callback": "note"}.get(thread.kind, "own"))


@step
def send(world: World, me: int, thread: Thread, how: str | None) -> None:
    if how == "later":
        world.lazy |= set(thread.calls)
    else:
        write(world, frozenset(thread.calls))
    go(world, me, "recheck")


@step
def recheck(world: World, me: int, thread: Thread, _: Any) -> None:
    """The end may have come while the call was put on the list."""
    if world.closed:
        for call in thread.calls:
            if call in world.pending:
                world.pending -= {call}
                forget(world, call)
                settle_failed(world, call)
    go(world, me, {"sync": "await", "async": "come", "later": "note"}.get(thread.kind, "over"))


@step
def await_(world: World, me: int, thread: Thread, _: Any) -> None:
    port = None if world.inbox else world.port
    go(world, me, "park" if port is None else "take", port=port)


@step
def take(world: World, me: int, thread: Thread, _: Any) -> None:
    if not world.role:
        take_role(world, me)
        go(world, me, "reads")
    else:
        go(world, me, "reads" if world.role == me else "park")


def take_role(world: World, me: int) -> None:
    world.role = me
    world.token += 1


@step
def reads(world: World, me: int, thread: Thread, _: Any) -> None:
    go(world, me, "bytes" if thread.calls[0] in world.pending and thread.port == world.port else "leave")


@step
def bytes_(world: World, me: int, thread: Thread, _: Any) -> None:
    go(world, me, "got")


@step
def got(world: World, me: int, thread: Thread, _: Any) -> None:
    if thread.port != world.port:
        go(world, me, "leave")
    else:
        then(world, me, "receive", "after")


@step
def after(world: World, me: int, thread: Thread, _: Any) -> None:
    if world.answered:
        then(world, me, "pass_answered", "after_passing")
    else:
        after_passing(world, me, thread, _)


@step
def after_passing(world: World, me: int, thread: Thread, _: Any) -> None:
    if thread.calls[0] in world.replied or world.inbox:
        go(world, me, "leave")
    else:
        world.token += 1  # the reader has moved
        go(world, me, "reads")


@step
def leave(world: World, me: int, thread: Thread, _: Any) -> None:
    if thread.below:  # the role is the interrupted frame's
        perform(world, me, world.machine.left_to_frame_below(), "check")
    else:
        world.role = 0
        go(world, me, "left")


@step
def left(world: World, me: int, thread: Thread, _: Any) -> None:
    go(world, me, "left_counted", n=len(world.pending))


@step
def left_counted(world: World, me: int, thread: Thread, _: Any) -> None:
    effects = world.machine.left(thread.n)
    perform(world, me, effects, "given_up" if thread.dying else "check", n=0)


@step
def check_(world: World, me: int, thread: Thread, _: Any) -> None:
    if thread.calls[0] in world.replied or thread.calls[0] in world.failed:
        end(world, me)
    else:
        go(world, me, "await")


def end(world: World, me: int) -> None:
    thread = world.threads[me]
    if thread.below:
        world.threads[me] = thread.below[0]
    else:
        world.signals -= set(thread.calls)
        world.woken -= set(thread.calls)
        world.threads[me] = Thread(thread.kind, "over")


@step
def park(world: World, me: int, thread: Thread, _: Any) -> None:
    world.machine.notify_ids.add(thread.calls[0])
    go(world, me, "parks", port=None)


@step
def parks(world: World, me: int, thread: Thread, _: Any) -> None:
    if thread.calls[0] not in world.pending:
        world.machine.notify_ids.discard(thread.calls[0])
    go(world, me, "watch")


@step
def watch(world: World, me: int, thread: Thread, _: Any) -> None:
    on = {"sync": "signal", "callback": "send", "later": "write_out"}.get(thread.kind, "parked")
    perform(world, me, world.machine.watch(), on)


@step
def write_out(world: World, me: int, thread: Thread, _: Any) -> None:
    """No thread may come to do it."""
    if world.machine.waiter_owned:
        then(world, me, "flush", "over")
    else:
        go(world, me, "over")


@step
def signal(world: World, me: int, thread: Thread, _: Any) -> None:
    world.signals |= set(thread.calls)
    go(world, me, "sleep")


@step
def sleep(world: World, me: int, thread: Thread, _: Any) -> None:
    go(world, me, "check" if thread.calls[0] in world.replied | world.failed else "asleep")


@step
def asleep(world: World, me: int, thread: Thread, _: Any) -> None:
    world.woken -= set(thread.calls)
    go(world, me, "check")


@step
def given_up(world: World, me: int, thread: Thread, _: Any) -> None:
    """Struck. No thread waits for a synchronous call any more; a future goes on."""
    if thread.kind == "sync":
        for call in thread.calls:
            world.pending -= {call}
            forget(world, call)
    world.machine.parked.discard(me)
    world.threads[me] = Thread(thread.kind, "dead")


# … to have a future, and to wait for it.


@step
def own(world: World, me: int, thread: Thread, _: Any) -> None:
    if world.machine.waiter_owned:
        go(world, me, "send")
        return
    effects = world.machine.sent_async(NOW)
    perform(world, me, effects, "owned" if ROUND in effects else "send")


@step
def set_timer(world: World, me: int, thread: Thread, _: Any) -> None:
    world.timer = True
    back(world, me)


@step
def owned(world: World, me: int, thread: Thread, _: Any) -> None:
    perform(world, me, world.machine.owned(), "send")


@step
def come(world: World, me: int, thread: Thread, _: Any) -> None:
    then(world, me, "flush", "came")


@step
def came(world: World, me: int, thread: Thread, _: Any) -> None:
    world.machine.came(NOW)
    then(world, me, "come_for", "attend")


@step
def come_for(world: World, me: int, thread: Thread, _: Any) -> None:
    """Complete what was deferred for this thread, one after the other."""
    for call in thread.calls:
        if took(world, call):
            world.done |= {call}
            return
    back(world, me)


def took(world: World, call: int) -> bool:
    machine = world.machine
    return (machine.deferred.pop(call, None) or machine.deferred_long.pop(call, None)) is not None


def is_over(world: World, thread: Thread) -> bool:
    return not world.pending & set(thread.calls)


@step
def attend(world: World, me: int, thread: Thread, _: Any) -> None:
    port = None if world.inbox else world.port
    if is_over(world, thread):
        go(world, me, "sleeps", port=None)
    else:
        go(world, me, "async_park" if port is None else "async_take", port=port)


@step
def async_take(world: World, me: int, thread: Thread, _: Any) -> None:
    if not world.role:
        take_role(world, me)
        then(world, me, "rearm", "async_reads", arms=thread.port)
    else:
        go(world, me, "async_park")


@step
def async_reads(world: World, me: int, thread: Thread, _: Any) -> None:
    leaves = world.answered or world.inbox or is_over(world, thread) or thread.port != world.port
    if not leaves:
        world.token += 1  # the reader has moved
    go(world, me, "async_leave" if leaves else "async_bytes")


@step
def async_bytes(world: World, me: int, thread: Thread, _: Any) -> None:
    go(world, me, "async_got")


@step
def async_got(world: World, me: int, thread: Thread, _: Any) -> None:
    if thread.port != world.port:
        go(world, me, "async_leave")
    else:
        then(world, me, "receive", "async_reads")


@step
def async_leave(world: World, me: int, thread: Thread, _: Any) -> None:
    world.role = 0
    go(world, me, "async_left")


@step
def async_left(world: World, me: int, thread: Thread, _: Any) -> None:
    has_outbox = world.port is not None and world.links[world.port].outbox
    perform(world, me, world.machine.left_async(has_outbox), "given_up" if thread.dying else "share", port=None)


@step
def share(world: World, me: int, thread: Thread, _: Any) -> None:
    """The thread shares out what it met. `share` is what it took up, `mine` and `others` what it has yet to see to."""
    go(world, me, "dispose", share=world.answered, mine=(), others=(), n=0)


@step
def dispose(world: World, me: int, thread: Thread, _: Any) -> None:
    if thread.n == len(thread.share):
        go(world, me, "defer_rest", n=1)
        return
    call = thread.share[thread.n]
    quiet = call not in world.scenario.low
    what = world.machine.disposal(quiet, False, call in thread.calls, call in world.noted)
    if what is COMPLETE:
        go(world, me, "dispose", mine=(*thread.mine, call), n=thread.n + 1)
    elif what is DEFER:
        go(world, me, "defer")
    else:
        go(world, me, "dispose", others=(*thread.others, call), n=thread.n + 1)


@step
def defer(world: World, me: int, thread: Thread, _: Any) -> None:
    call = thread.share[thread.n]
    world.machine.deferred[call] = call
    go(world, me, "deferred")


@step
def deferred(world: World, me: int, thread: Thread, _: Any) -> None:
    """A thread may want to hear of it by now."""
    call = thread.share[thread.n]
    others = (*thread.others, call) if call in world.noted and took(world, call) else thread.others
    go(world, me, "dispose", others=others, n=thread.n + 1)


@step
def defer_rest(world: World, me: int, thread: Thread, _: Any) -> None:
    """To complete the first may take long, or wait for a thread that waits for another."""
    if thread.n < len(thread.mine):
        call = thread.mine[thread.n]
        world.machine.deferred[call] = call
        go(world, me, "defer_rest", n=thread.n + 1)
    else:
        go(world, me, "hand_over", n=0)


@step
def hand_over(world: World, me: int, thread: Thread, _: Any) -> None:
    back_again = [each for each in thread.mine[1:] if (each in world.noted or world.machine.parked) and took(world, each)]
    world.tasks += tuple([("complete", call) for call in (*thread.others, *back_again)])
    go(world, me, "handed_over", others=())


@step
def handed_over(world: World, me: int, thread: Thread, _: Any) -> None:
    world.answered = tuple([each for each in world.answered if each not in thread.share])
    go(world, me, "complete_mine")


@step
def complete_mine(world: World, me: int, thread: Thread, _: Any) -> None:
    world.done |= set(thread.mine[:1])
    then(world, me, "come_for", "shared", mine=())


@step
def shared(world: World, me: int, thread: Thread, _: Any) -> None:
    if world.machine.must_pass_on(world.closed):
        then(world, me, "pass_on", "attend", share=())
    else:
        go(world, me, "attend", share=())


@step
def pass_on(world: World, me: int, thread: Thread, _: Any) -> None:
    machine = world.machine
    for deferred_ in (machine.deferred_long, machine.deferred):
        world.tasks += tuple([("complete", call) for call in sorted(deferred_)])
        deferred_.clear()
    back(world, me)


@step
def async_park(world: World, me: int, thread: Thread, _: Any) -> None:
    world.machine.parked.add(me)
    go(world, me, "watch", port=None)


@step
def parked(world: World, me: int, thread: Thread, _: Any) -> None:
    go(world, me, "sleeps")


@step
def sleeps(world: World, me: int, thread: Thread, _: Any) -> None:
    world.machine.parked.add(me)
    then(world, me, "come_for", "blocked")


@step
def blocked(world: World, me: int, thread: Thread, _: Any) -> None:
    world.machine.parked.discard(me)
    end(world, me)


@step
def note(world: World, me: int, thread: Thread, _: Any) -> None:
    """A callback is added to a future."""
    world.noted |= set(thread.calls)
    go(world, me, "noted")


@step
def noted(world: World, me: int, thread: Thread, _: Any) -> None:
    if took(world, thread.calls[0]):
        world.tasks += (("complete", thread.calls[0]),)
        go(world, me, "over")
    else:
        go(world, me, "park")


# … in the pool.


@step
def idle(world: World, me: int, thread: Thread, choice: Move) -> None:
    if choice[0] == "event":
        number = choice[1]
        link = world.links[number]
        readable = bool(link.socket) and (link.queued if link.mask == LAST else link.mask == ONCE)
        events = (READ if readable else 0) | (WRITE if link.writes and link.room else 0) | (4 if END in link.socket else 0)
        lasts = link.mask == LAST
        world.links[number] = link._replace(queued=False, mask=link.mask if lasts else 0, writes=False)
        world.vain += 1
        go(world, me, "ready", port=number, events=events)
        return
    task, world.tasks = world.tasks[0], world.tasks[1:]
    if task[0] == "complete":
        world.done |= {task[1]}
    elif task[0] == "ping":
        world.pong = world.port is not None
    else:
        go(world, me, task[0])


@step
def ready(world: World, me: int, thread: Thread, _: Any) -> None:
    number, events = thread.port, thread.events
    assert number is not None
    if number != world.port:
        go(world, me, "idle", port=None, events=0)
        return
    world.registrations[number].told(events, world.scenario.lasts)
    link = world.links[number]
    if link.outbox and link.room:
        world.links[number] = link._replace(outbox=False)
        world.vain = 0
    if events == WRITE:
        then(world, me, "rearm", "idle", arms=number, events=0, port=None)
    else:
        go(world, me, "try_role", events=0)


@step
def try_role(world: World, me: int, thread: Thread, _: Any) -> None:
    if not world.role:
        take_role(world, me)
        go(world, me, "pool_reads")
    else:
        go(world, me, "was_told")


@step
def was_told(world: World, me: int, thread: Thread, _: Any) -> None:
    assert thread.port is not None
    world.registrations[thread.port].again = True
    go(world, me, "try_again")


@step
def try_again(world: World, me: int, thread: Thread, _: Any) -> None:
    if not world.role:
        go(world, me, "try_role")
    elif world.machine.may_replace(role(world)) and thread.port == world.port:
        then(world, me, "receive", "replaced", n=world.received, holder=role(world))
    else:
        then(world, me, "rearm", "idle", arms=thread.port, port=None)


@step
def replaced(world: World, me: int, thread: Thread, _: Any) -> None:
    effects = world.machine.replaced(thread.holder, world.received != thread.n)
    perform(world, me, effects, "was_read", n=0, holder=None)


@step
def pool_reads(world: World, me: int, thread: Thread, _: Any) -> None:
    if thread.port == world.port:
        then(world, me, "receive", "pool_leaves")
    else:
        go(world, me, "pool_leaves")


@step
def pool_leaves(world: World, me: int, thread: Thread, _: Any) -> None:
    world.role = 0
    go(world, me, "was_read")


@step
def was_read(world: World, me: int, thread: Thread, _: Any) -> None:
    go(world, me, "was_read_counted", n=len(world.pending))


@step
def was_read_counted(world: World, me: int, thread: Thread, _: Any) -> None:
    number = thread.port
    assert number is not None
    link = world.links[number]
    effects = world.machine.was_read(world.registrations[number], thread.n, link.unread, link.outbox, world.paused)
    parts = ["rearm"] if effects else []
    then(world, me, *parts, "pool_passes", arms=number if parts else None, n=0, port=None)


@step
def pool_passes(world: World, me: int, thread: Thread, _: Any) -> None:
    if world.answered:
        then(world, me, "pass_answered", "idle")
    else:
        go(world, me, "idle")


@step
def go_on(world: World, me: int, thread: Thread, _: Any) -> None:
    world.sorting = me
    then(world, me, "sort", "pass_answered", "idle", port=None)


@step
def attach(world: World, me: int, thread: Thread, _: Any) -> None:
    """A new link. What was not read from the last one comes again."""
    if world.closed or world.port is not None:
        go(world, me, "idle")
        return
    number = len(world.links)
    world.links.append(Link(tuple([each for each in world.order if each not in world.inbox])))
    world.registrations.append(Registration())
    world.arming += (0,)
    world.port = number
    world.machine.unwatched = False
    world.sent, world.unsent = world.sent | world.unsent, frozenset()
    then(world, me, "rearm", "pool_passes", arms=number)


@step
def close_link(world: World, me: int, thread: Thread, _: Any) -> None:
    world.sorting = me
    go(world, me, "closed_link")


@step
def closed_link(world: World, me: int, thread: Thread, _: Any) -> None:
    world.sorting = 0
    perform(world, me, (ARM,), "idle")


# … beside the calls.


@step
def expire(world: World, me: int, thread: Thread, _: Any) -> None:
    """A call is given up. It ceases to be of low priority before it is off the list, not after that: else a reader
    that leaves in between would count one too few that wait."""
    world.machine.low_priority.discard(thread.calls[0])
    go(world, me, "expires")


@step
def expires(world: World, me: int, thread: Thread, _: Any) -> None:
    call = thread.calls[0]
    taken = call in world.pending
    world.pending -= {call}
    go(world, me, "expired" if taken else "over")


@step
def expired(world: World, me: int, thread: Thread, _: Any) -> None:
    world.machine.notify_ids.discard(thread.calls[0])
    go(world, me, "fail")


@step
def fail(world: World, me: int, thread: Thread, _: Any) -> None:
    settle_failed(world, thread.calls[0])
    then(world, me, "look_up", "over")


@step
def close(world: World, me: int, thread: Thread, _: Any) -> None:
    """The channel is closed, and all calls fail. In this order: a thread puts a call on the list, then looks whether the
    channel is closed (`recheck`)."""
    world.closed = True
    go(world, me, "close_calls")


@step
def close_calls(world: World, me: int, thread: Thread, _: Any) -> None:
    if not world.pending:
        go(world, me, "retire")
        return
    call = min(world.pending)
    world.pending -= {call}
    forget(world, call)
    settle_failed(world, call)


@step
def retire(world: World, me: int, thread: Thread, _: Any) -> None:
    if world.port is not None:
        number, world.port = world.port, None
        discard(world, number)
    go(world, me, "close_sorting")


@step
def close_sorting(world: World, me: int, thread: Thread, _: Any) -> None:
    then(world, me, "pass_answered", "pass_on", "over")


@step
def write_(world: World, me: int, thread: Thread, _: Any) -> None:
    """The kernel does not take all of a message."""
    if world.port is None:
        go(world, me, "over")
        return
    world.links[world.port] = world.links[world.port]._replace(outbox=True, room=False)
    perform(world, me, (ARM,), "over")


@step
def pause(world: World, me: int, thread: Thread, _: Any) -> None:
    world.paused = True
    perform(world, me, (ARM,), "resume")


@step
def resume(world: World, me: int, thread: Thread, _: Any) -> None:
    world.paused = False
    perform(world, me, (ARM,), "over")


# … now and then.


@step
def timer(world: World, me: int, thread: Thread, _: Any) -> None:
    world.timer = False
    if world.machine.counted:
        then(world, me, "flush", "round_over")
    else:
        go(world, me, "timer")


@step
def round_over(world: World, me: int, thread: Thread, _: Any) -> None:
    machine = world.machine
    world.tasks += tuple([("complete", call) for call in sorted(machine.deferred_long)])
    machine.deferred_long.clear()
    machine.deferred, machine.deferred_long = machine.deferred_long, machine.deferred
    go(world, me, "is_deserted")


@step
def is_deserted(world: World, me: int, thread: Thread, _: Any) -> None:
    go(world, me, "give_up" if world.machine.is_deserted(NOW, world.closed) else "next_round")


@step
def give_up(world: World, me: int, thread: Thread, _: Any) -> None:
    perform(world, me, world.machine.give_up(), "next_round")


@step
def next_round(world: World, me: int, thread: Thread, _: Any) -> None:
    if world.machine.counted:
        world.timer = True
    go(world, me, "timer")


@step
def tick(world: World, me: int, thread: Thread, _: Any) -> None:
    """The failure detector has the poller look, then the reader is looked after."""
    world.ticked += 1
    if world.pending:
        perform(world, me, world.machine.watch_again(), "tick_inbox")
    else:
        go(world, me, "tick_inbox")


@step
def tick_inbox(world: World, me: int, thread: Thread, _: Any) -> None:
    write(world, world.lazy)
    world.lazy = frozenset()
    if world.inbox and not world.sorting:
        world.tasks += (("go_on",),)
    if world.answered:
        then(world, me, "pass_answered", "tick_reader")
    else:
        go(world, me, "tick_reader")


@step
def tick_reader(world: World, me: int, thread: Thread, _: Any) -> None:
    perform(world, me, world.machine.tick(role(world) if world.pending else None), "tick")


# The walk.

RULES = Rules(moves, make, key, described)


def explore(scenario: Scenario, most: int = 800_000) -> Finding:
    """Every world that a scenario can lead to."""
    return walk(scenario.name, beginning(scenario), RULES, most)
