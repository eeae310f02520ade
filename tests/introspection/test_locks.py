"""Threads that wait for locks of the program: which lock, and which thread holds it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remora.introspection.locks import Blocked, blocked_at
from remora.introspection.threads import look
from remora.observe import snapshot
from remora.observer.model import WaitKind
from remora.testing.world import World
from tests.eventually import eventually

plain = threading.Lock()
reentrant = threading.RLock()
condition = threading.Condition()


class Keeper:
    """Has locks in its fields."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.touched = False

    @property
    def trap(self) -> Any:
        self.touched = True  # a snapshot must not come here
        return self.lock


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


keeper, slotted = Keeper(), Slotted()


def with_plain(go: Callable[[], object]) -> None:
    with plain:
        go()


def acquire_plain(go: Callable[[], object]) -> None:
    plain.acquire()
    try:
        go()
    finally:
        plain.release()


def with_reentrant(go: Callable[[], object]) -> None:
    with reentrant, reentrant:
        go()


def with_condition(go: Callable[[], object]) -> None:
    with condition:
        go()


def with_attribute(go: Callable[[], object]) -> None:
    with keeper.lock:
        go()


def with_slot(go: Callable[[], object]) -> None:
    with slotted.lock:
        go()


def with_local(go: Callable[[], object]) -> None:
    mine = plain
    with open("/dev/null") as _, mine:
        inner = lambda: go()  # noqa: E731
        inner()


@contextlib.contextmanager
def held(hold: Callable[[Callable[[], object]], None]) -> Iterator[threading.Thread]:
    """A thread that holds a lock, for the time of the block."""
    begun, gate = threading.Event(), threading.Event()

    def go() -> None:
        begun.set()
        gate.wait(30)

    thread = threading.Thread(target=hold, args=(go,), name="holder")
    thread.start()
    assert begun.wait(10)
    try:
        yield thread
    finally:
        gate.set()
        thread.join()


def nothing() -> None:
    """What the thread does that has waited."""


def found(thread: threading.Thread) -> Blocked | None:
    everybody = look("worker0")
    return next((blocked_at(each, everybody) for each in everybody if each.id == thread.ident), None)


@pytest.mark.parametrize(
    ("hold", "wait", "expression"),
    [
        (with_plain, with_plain, "plain"),
        (with_plain, acquire_plain, "plain"),
        (with_local, with_plain, "plain"),
        (with_plain, with_local, "mine"),
        (with_reentrant, with_reentrant, "reentrant"),
        (with_condition, with_condition, "condition"),
        (with_attribute, with_attribute, "keeper.lock"),
        (with_slot, with_slot, "slotted.lock"),
    ],
)
def test_the_lock_and_its_holder_are_found(hold: Any, wait: Any, expression: str) -> None:
    with held(hold) as holder:
        waiter = threading.Thread(target=wait, args=(nothing,))
        waiter.start()
        eventually(lambda: found(waiter) is not None)
        blocked = found(waiter)
        assert blocked is not None
        assert (blocked.expression, blocked.holder) == (expression, holder.ident)
        assert blocked.place.rpartition(":")[0] == __file__
    waiter.join()


def on_one_line(go: Callable[[], object]) -> None:
    with plain: go()  # fmt: skip  # noqa: E701


def test_one_that_waits_on_the_line_of_the_body_holds_nothing() -> None:
    """Two that wait for each other's lock would be a cycle that there is not."""
    with held(acquire_plain):
        waiters = [threading.Thread(target=on_one_line, args=(nothing,)) for _ in range(2)]
        for each in waiters:
            each.start()
        eventually(lambda: all(found(each) is not None for each in waiters))
        assert [found(each).holder for each in waiters] == [None, None]  # type: ignore[union-attr]
    for each in waiters:
        each.join()
    with held(on_one_line) as holder:
        waiter = threading.Thread(target=on_one_line, args=(nothing,))
        waiter.start()
        eventually(lambda: found(waiter) is not None)
        assert found(waiter).holder == holder.ident  # type: ignore[union-attr]
    waiter.join()


def test_a_plain_lock_that_is_held_in_no_with_has_no_known_holder() -> None:
    with held(acquire_plain):
        waiter = threading.Thread(target=with_plain, args=(nothing,))
        waiter.start()
        eventually(lambda: found(waiter) is not None)
        assert found(waiter).holder is None  # type: ignore[union-attr]
    waiter.join()


def wait_behind_a_property() -> None:
    keeper.trap.acquire()
    keeper.lock.release()


def test_no_code_of_the_program_is_run() -> None:
    with held(with_attribute):
        waiter = threading.Thread(target=wait_behind_a_property)
        waiter.start()
        eventually(lambda: keeper.touched)
        keeper.touched = False
        for _ in range(50):
            assert found(waiter) is None
        assert not keeper.touched
    waiter.join()


def test_a_thread_that_waits_for_an_event_waits_for_no_lock() -> None:
    gate = threading.Event()
    waiter = threading.Thread(target=gate.wait, args=(30,))
    waiter.start()
    eventually(lambda: any(each.id == waiter.ident and len(each.frames) > 3 for each in look("worker0")))
    assert found(waiter) is None
    gate.set()
    waiter.join()


def test_code_without_source_is_passed_over() -> None:
    names: dict[str, Any] = {"lock": plain}
    exec(compile("def wait():\n    with lock:\n        pass\n", "<nowhere>", "exec"), names)
    with held(with_plain):
        waiter = threading.Thread(target=names["wait"])
        waiter.start()
        eventually(lambda: any(each.id == waiter.ident and each.frames[0].f_code.co_name == "wait" for each in look("w")))
        assert found(waiter) is None
    waiter.join()


def test_a_snapshot_shows_it_as_a_wait() -> None:
    with World(1) as world, held(with_plain) as holder:
        waiter = threading.Thread(target=with_plain, args=(nothing,))
        waiter.start()
        eventually(lambda: [each for each in world.run(0, snapshot).waits if each.kind is WaitKind.LOCK])
        (wait,) = [each for each in world.run(0, snapshot).waits if each.kind is WaitKind.LOCK]
        assert (wait.thread, wait.holder) == (waiter.ident, holder.ident)
        assert wait.text.startswith("the lock plain at ")
    waiter.join()
