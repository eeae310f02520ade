"""The parts of a channel tell `remora.protocol.reader` what happens, and do what it asks: beside a second machine that is
told the same events, the same is asked of the poller. What they decide themselves, inlined, they decide as it does.

One thread plays all roles. A waiter that reads is a real call of `await_reply` or `attend`; while it waits at the link,
the events that follow happen. What happens within a step is not compared, nor are the end and a link that breaks.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.agent.calls.call import Call
from remora.agent.calls.future import Sleeper
from remora.agent.channel import waiter_owned, waiter_reads
from remora.agent.channel.channel import Channel
from remora.agent.channel.pool_reads import PoolReads
from remora.agent.channel.registration import Registration
from remora.agent.channel.waiter_owned import WaiterOwned
from remora.agent.channel.waiter_reads import WaiterReads
from remora.options import FAST_PATHS
from remora.protocol import reader
from remora.protocol.reader import (
    ARM,
    ARM_AGAIN,
    COMPLETE,
    DEFER,
    FLUSH,
    POOL,
    READ,
    ROUND,
    WAKE,
    WRITE,
    Effect,
    Effects,
    Reader,
)
from remora.wire.frames import Frame
from tests.agent.channel.parts import FakeLink

pytestmark = pytest.mark.skipif(not FAST_PATHS.waiter_owned, reason="turned off")
EVENTS = (
    "sent", "async", "notified", "parked", "unparked", "sync", "future", "left", "readable", "request", "room", "full",
    "tick", "round", "later",
)  # fmt: skip
LONG: list[tuple[str, ...]] = [
    ("sync", "tick", "tick", "request", "tick", "tick", "request", "request"),
    ("future", "left", "async", "future", "notified", "left", "request"),
    ("future", "left", "async", "future", "parked", "left", "later", "round", "request"),
    ("future", "left", "async", "future", "left", "request", "later", "round"),
]
CORE = ("sent", "async", "parked", "sync", "future", "left", "request", "tick")


class Link(FakeLink):
    """Waits as the script says."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = meanwhile
        self.frames: list[Frame] = []

    def await_bytes(self, left: float, again: bool) -> bool:
        self._meanwhile()
        return True

    def read(self) -> list[Frame]:
        frames, self.frames = self.frames, []
        return frames

    def read_some(self) -> list[Frame]:
        return []

    def flush(self) -> None:
        self.outbox.clear()


def state(machine: Reader) -> tuple[object, ...]:
    roles = machine.seen, machine.stalled, machine.woken
    return (machine.unwatched, machine.waiter_owned, machine.counted, *[role is None for role in roles])


class Both:
    """A channel beside the machine. In place of poller, pool and timers, it notes what the channel asks."""

    lasts = True
    incoming = None

    def __init__(self, script: Sequence[str]) -> None:
        self.now = 100.0
        self.asked: list[object] = []
        self.expected: list[object] = []
        self._script = iter(script)
        self._waiting: list[Call] = []
        self._requests = 0
        self._others: list[Sleeper] = []
        self.link = Link(self._meanwhile)
        nothing: Any = lambda *args: None  # noqa: E731
        owner: Any = SimpleNamespace(
            incoming=None,
            arrive=nothing,
            requests_on=lambda channel: nothing,
            control_message=nothing,
            lost=nothing,
            connect=nothing,
        )
        self.channel = Channel("peer", "session", False, owner, self, self)  # type: ignore[arg-type]
        registration = self.channel.inbox.registration = Registration(
            self.link,  # type: ignore[arg-type]
            self.channel.pool_reads.ready,
        )
        self.registration = registration
        self.channel.outbox.link = self.link  # type: ignore[assignment]
        self.owned = WaiterOwned(self)  # type: ignore[arg-type]
        self.machine, self.known = Reader(), reader.Registration()
        self.holder: object | None = None
        self.peer: Any = SimpleNamespace(name="peer", incoming=None, now=lambda: self.now, suspicion="", note=None)
        self._add()  # a call that is not answered
        self.channel.reconsider_reading()
        self._perform((ARM,))

    # What the channel asks for.

    def arm(self, source: object, events: int) -> None:
        self.asked.append(events)

    def arm_to_last(self, source: object) -> None:
        self.asked.append(READ)

    def call_soon(self, task: object) -> None:
        self.asked.append(WAKE)

    submit_final = submit_system = call_soon

    def soon(self, seconds: float, task: object) -> Any:
        return SimpleNamespace(pending=True)

    # What the machine asks for.

    def _perform(self, effects: Effects) -> None:
        for effect in effects:
            if effect in (ARM, ARM_AGAIN):
                self.known.again = self.known.again or effect is ARM_AGAIN
                armed, full = self.known.decide(), bool(self.link.outbox)
                events = self.machine.wanted_events(self.holder, False, full, False)
                if self.known.must_ask(events, armed, self.link.unread):
                    self.expected.append(events)
                self.known.armed = events
            elif effect is WAKE and self.holder is not None:
                self.expected.append(WAKE)
            else:
                assert effect in (WAKE, FLUSH, ROUND, reader.PASS_ON)

    # Events.

    def run(self) -> None:
        for event in self._script:
            self._happen(event)

    def _meanwhile(self) -> None:
        call = self._waiting[-1]
        for event in self._script:
            if event == "left":
                break
            self._happen(event)
        self.channel.take(call.id)
        call.reply = Frame(0x203, 0, call.id, 0, 0, 0.0, b"", 0)

    def _happen(self, event: str) -> None:
        getattr(self, "_" + event)()
        self._compare(event)

    def _compare(self, event: str) -> None:
        mine, machine = self.channel.reader, self.machine
        assert self.asked == self.expected, event
        assert state(mine) == state(machine), event
        registered = (self.registration.armed, self.registration.again)
        assert registered == (self.known.armed, self.known.again), event
        assert (self.channel in self.owned._owned) == machine.counted, event

    def _add(self) -> Call:
        call = Call(self.peer, "asked")
        self.channel.pending[call.id] = call
        return call

    def _sent(self) -> None:
        self.channel.pool_reads.unwatch()
        self._perform(self.machine.sent())

    def _async(self) -> None:
        self.owned.expect(self.channel)
        effects = self.machine.sent_async(self.now)
        self._perform(effects)
        if ROUND in effects:
            self._perform(self.machine.owned())

    def _notified(self) -> None:
        call = self._add()
        self.channel.pool_reads.expect(call)
        self.machine.notify_ids.add(call.id)
        self._perform(self.machine.watch())

    def _parked(self) -> None:
        self._others.append(Sleeper())
        self.channel.parked.add(self._others[-1])
        self.channel.watch()
        self.machine.parked.add(self._others[-1])
        self._perform(self.machine.watch())

    def _unparked(self) -> None:
        self.channel.parked.clear()
        self.machine.parked.clear()

    def _wait(self, wait: Callable[[Call], None], is_future: bool) -> None:
        call = self._add()
        self._waiting.append(call)
        is_on_top = self.holder is not None
        if is_future:
            self.machine.came(self.now)
        if not is_on_top:
            self.holder = object()
            if is_future:
                self._perform((ARM,))
        wait(call)
        self._waiting.pop()
        if is_on_top:
            self.holder = object() if is_future else self.holder  # it was renewed
            self._perform(self.machine.left_to_frame_below())
            return
        self.holder = None
        if is_future:
            self._perform(self.machine.left_async(bool(self.link.outbox)))
        else:
            self.machine.pending = self.channel.pending
            self._perform(self.machine.left())

    def _sync(self) -> None:
        self._wait(self.channel.waiter_reads.await_reply, False)

    def _future(self) -> None:
        thread = Sleeper()

        def attend(call: Call) -> None:
            self.channel.attend((call,), float("inf"), lambda: call.settled, thread)
            self.channel.parked.discard(thread)

        self._wait(attend, True)

    def _left(self) -> None: ...

    def _readable(self) -> None:
        has_met = bool(self.link.frames)
        self.known.told(READ, True)
        self.registration.ready(READ)
        if self.holder is not None:
            self.known.again = True
            if not self.machine.may_replace(self.holder):
                self._perform((ARM,))
                return
            self._perform(self.machine.replaced(self.holder, has_met))
        self.machine.pending = self.channel.pending
        self._perform(self.machine.was_read(self.known, False, False, False))

    def _request(self) -> None:
        if self.holder is None or self.machine.may_replace(self.holder):
            self._requests += 1
            self.link.frames.append(Frame(0x102, 0, 7, self._requests, 0, 0.0, b"", 0))
        self._readable()

    def _room(self) -> None:
        self.known.told(WRITE, True)
        self.registration.ready(WRITE)
        self._perform((ARM,))

    def _full(self) -> None:
        self.link.outbox.append(b"x")
        self.channel.reconsider_reading()
        self._perform((ARM,))

    def _tick(self) -> None:
        self.channel.pool_reads.tick()
        self._perform(self.machine.tick(self.holder))

    def _round(self) -> None:
        self.owned._look()
        if self.machine.counted and self.machine.is_deserted(self.now, False):
            self._perform(self.machine.give_up())

    def _later(self) -> None:
        self.now += 1.0


def compare(script: Sequence[str]) -> None:
    both = Both(script)
    with pytest.MonkeyPatch.context() as patch:
        for module in (waiter_owned, waiter_reads):
            patch.setattr(module, "monotonic", lambda: both.now)
        both.run()


def test_all_short_sequences() -> None:
    for script in product(EVENTS, repeat=3):
        compare(script)


def test_sequences_around_a_reader() -> None:
    for script in product(CORE, repeat=4):
        compare(script)


@pytest.mark.parametrize("script", LONG)
def test_long_sequences(script: tuple[str, ...]) -> None:
    compare(script)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=25))
def test_random_sequences(script: list[str]) -> None:
    compare(script)


@pytest.mark.parametrize("flags", list(product((False, True), repeat=6)))
def test_the_disposal_of_a_reply(flags: tuple[bool, ...]) -> None:
    is_quiet, is_empty, is_mine, is_notified, is_owned, is_parked = flags
    both = Both(())
    done: list[Effect] = []
    call: Any = SimpleNamespace(id=1, quiet=is_quiet, has_nothing=is_empty, notified=is_notified)
    call.finish = lambda: done.append(COMPLETE)
    both.channel.reader.waiter_owned = both.machine.waiter_owned = is_owned
    if is_parked:
        both._parked()
    both.asked.clear()
    both.channel.inbox.answered.append(call)
    both.channel.deferred.share_out((call,) if is_mine else ())
    if call.id in both.channel.reader.deferred:
        done.append(DEFER)
    done += [POOL] * len(both.asked)
    assert done == [both.machine.disposal(is_quiet, is_empty, is_mine, is_notified)]


# A test that compares must see a difference: each of these changes of the agent is found.

MUTANTS: list[tuple[type, str, str, str]] = [
    (PoolReads, "unwatch", "self.perform(self._reader.sent())", "self._reader.sent()"),
    (PoolReads, "unwatch", "not self._reader.unwatched", "self._reader.unwatched"),
    (PoolReads, "tick", "self.perform(self._reader.tick(holder))", "self._reader.tick(holder)"),
    (PoolReads, "tick", "if self._calls.waiting else None", "and None"),
    (PoolReads, "perform", "registration.again = True", "pass"),
    (PoolReads, "perform", "self._inbox.look_up()", "pass"),
    (PoolReads, "perform", "self.update(registration)", "pass"),
    (PoolReads, "_read_instead", "self.perform(reader.replaced(", "bool(reader.replaced("),
    (PoolReads, "_read_instead", "!= received", "== received"),
    (PoolReads, "_take_turn", "registration.again = True", "pass"),
    (PoolReads, "ready", "registration.told(events, self._poller.lasts)", "pass"),
    (PoolReads, "ready", "self.update(registration)", "pass"),
    (PoolReads, "_arm", "link.outbox_bytes > 0", "False"),
    (PoolReads, "_arm", "inbox.reading.holder()", "None"),
    (WaiterReads, "_leave", "self._pool_reads.perform(", "bool("),
    (WaiterReads, "await_reply", "reads.perform(effects)", "pass"),
    (WaiterReads, "await_reply", "reads.perform(self._reader.left_to_frame_below())", "pass"),
    (WaiterReads, "attend", "self._pool_reads.perform(self._reader.left_to_frame_below())", "pass"),
    (WaiterReads, "attend", "self._pool_reads.update(registration)", "pass"),
    (WaiterReads, "attend", "self._reader.came(monotonic())", "pass"),
    (WaiterReads, "perform", "self._pool_reads.perform((effect,))", "pass"),
    (WaiterOwned, "expect", "channel.waiter_reads.perform(effects)", "pass"),
    (WaiterOwned, "expect", "channel.waiter_reads.perform(reader.owned())", "pass"),
    (WaiterOwned, "_look", "channel.give_back_to_poller()", "pass"),
]


def compare_all() -> None:
    for script in chain(LONG, product(CORE, repeat=4), product(EVENTS, repeat=3)):
        compare(script)


def compile_again(kind: type, name: str, old: str, new: str) -> Any:
    """The method from its source, changed. Its module is the real one, so the clock of the test is its clock, too."""
    source = textwrap.dedent(inspect.getsource(getattr(kind, name)))
    assert old in source, "there is nothing to change"
    scope: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), vars(sys.modules[kind.__module__]), scope)
    return scope[name]


@pytest.mark.parametrize(("kind", "name", "old", "new"), MUTANTS)
def test_a_change_of_the_agent_is_found(
    kind: type, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = compile_again(kind, name, old, new)
    monkeypatch.setattr(kind, name, mutant)
    with pytest.raises(AssertionError):
        compare_all()


def test_methods_that_are_compiled_again_without_a_change_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the mutants would be found for a reason of the test."""
    for kind, name, old, _ in MUTANTS:
        monkeypatch.setattr(kind, name, compile_again(kind, name, old, old))
        for script in chain(LONG, product(EVENTS, repeat=3)):
            compare(script)
        monkeypatch.undo()
