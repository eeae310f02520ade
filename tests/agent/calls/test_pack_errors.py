"""Errors that name the place: which argument, which result, whose deadline, which worker."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from remora import rpc
from remora.agent.calls import call as calls
from remora.agent.calls import call_context
from remora.agent.serving import dispatch
from remora.errors import CallTimeout, NotInitialized, RemoteError, SerializationError
from remora.testing.world import World
from remora.wire import exceptions
from tests.agent.alone import NAME
from tests.eventually import eventually

HERE = "tests.agent.calls.test_pack_errors"
lock = threading.Lock()


def train(*args: Any, **kwargs: Any) -> Any:
    return args


def make_lock() -> Any:
    return {"model": [1, threading.Lock()]}


class Config:
    def __init__(self) -> None:
        self.parts = [0] * 100 + [{"guard": threading.Lock()}]


@dataclasses.dataclass
class Slotted:
    __slots__ = ("guard", "name")
    name: str
    guard: Any


ways: Any = pytest.mark.parametrize("way", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])


@ways
@pytest.mark.parametrize(
    ("args", "kwargs", "place"),
    [
        (({"cfg": [threading.Lock()]},), {}, "args[0]['cfg'][0]"),
        ((1, Config()), {}, "args[1].parts[100]['guard']"),
        ((), {"x": Slotted("a", threading.Lock())}, "kwargs['x'].guard"),
        ((lambda: lock,), {}, "args[0]'s variable 'lock'"),
        (({1: {("a", threading.Lock())}},), {}, "args[0][1] (one of its elements)[1]"),
    ],
    ids=["containers", "attributes", "slots", "functions", "sets"],
)
def test_the_argument_that_cannot_be_pickled(me: str, way: Any, args: Any, kwargs: Any, place: str) -> None:
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object: ") as caught:
        way(me, train, args, kwargs)
    assert f": {place} of {HERE}.train on {NAME} is a lock. " in str(caught.value)
    assert "rpc.RRef(x)" in str(caught.value)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@ways
@pytest.mark.parametrize("function", [train, lambda *args: None], ids=["by name", "by value"])
def test_the_argument_that_is_nested_too_deeply(me: str, way: Any, function: Any) -> None:
    with pytest.raises((RecursionError, pickle.PicklingError)) as caught:
        way(me, function, (1, {"tree": nested(100_000)}))
    assert "args[1]['tree'][0][0]… of " in str(caught.value)
    assert f" on {NAME} is nested too deeply to be pickled: send it in a flat form" in str(caught.value)


def test_the_result_that_is_nested_too_deeply(me: str) -> None:
    with pytest.raises(RecursionError, match=r"the result\[0\]\[0\]\[0\]\[0\]… of .*nested on alone is nested too deeply"):
        rpc.rpc_sync(me, nested, (100_000,))


def test_functions_of_torch_have_the_name_that_programs_use(me: str) -> None:
    with pytest.raises(TypeError, match=r"args\[1\] of torch\.add on alone is a lock"):
        rpc.rpc_sync(me, torch.add, (torch.ones(1), threading.Lock()))


def test_what_a_function_takes_along(me: str) -> None:
    with pytest.raises(TypeError, match=r"the function's variable 'lock' of .*<lambda> on alone is a lock"):
        rpc.rpc_sync(me, lambda: lock)


def test_the_result_that_cannot_be_pickled(me: str) -> None:
    with pytest.raises(TypeError, match=rf"the result\['model'\]\[1\] of {HERE}.make_lock on alone is a lock"):
        rpc.rpc_sync(me, make_lock)


def test_the_value_of_a_reference_that_cannot_be_pickled() -> None:
    with World(2) as world:
        rref = world.run(0, rpc.remote, "worker1", make_lock)
        with pytest.raises(TypeError, match=r"the value\['model'\]\[1\] of a reference to a value of worker1 is a lock"):
            world.run(0, rref.to_here)


class Counter:
    def add(self, *args: Any, **kwargs: Any) -> Any:
        gate.wait()


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
def test_a_method_of_a_value_is_named_as_the_program_names_it(way: str, world: World) -> None:
    counter = world.run(0, rpc.remote, "worker1", Counter)
    proxy = getattr(counter, way)
    with pytest.raises(TypeError, match=r"args\[1\]\['cfg'\] of add\(\) on worker1 is a lock"):
        world.run(0, lambda: proxy().add(1, {"cfg": threading.Lock()}))
    with pytest.raises(TypeError, match=r"kwargs\['x'\] of add\(\) on worker1 is a lock"):
        world.run(0, lambda: proxy().add(x=threading.Lock()))


def test_a_timeout_of_a_method_names_it(world: World) -> None:
    counter = world.run(0, rpc.remote, "worker1", Counter)
    late = world.run(0, lambda: counter.rpc_async(timeout=5.0).add(1))
    assert repr(late) == "<Future of call of add() on worker1: pending>"
    world.clock.advance(6.0)
    assert "will now be marked with an error: call of add() on worker1. " in outcome(late)


def test_an_error_of_our_own_names_the_place_too(me: str) -> None:
    wrapped: list[torch.Tensor] = []
    torch.func.vmap(lambda x: wrapped.append(x) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    with pytest.raises(SerializationError, match=r"Cannot send .*: args\[0\]\['w'\]\[0\] of .* is a Tensor\.$"):
        rpc.rpc_sync(me, train, ({"w": wrapped},))


def yielding() -> Iterator[int]:
    yield 1


async def waiting() -> None: ...


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (yielding, "send a list of what it yields"),
        (torch.futures.Future, "A future stays where it was made: send its value"),
        (concurrent.futures.Future, "A future stays where it was made: send its value"),
        (lambda: asyncio.Future(loop=asyncio.new_event_loop()), "A future stays where it was made"),
        (lambda: open(__file__, "rb"), "send its name, or what is in it"),  # noqa: SIM115 (it is closed below)
        (lambda: open(__file__), "send its name, or what is in it"),  # noqa: SIM115
        (lambda: iter(DataLoader([1, 2])), "send batches, or the dataset"),  # type: ignore[arg-type]
    ],
    ids=["generator", "torch", "concurrent", "asyncio", "file", "text file", "DataLoader"],
)
def test_what_helps_is_said(me: str, make: Callable[[], Any], sentence: str) -> None:
    value = make()
    try:
        with pytest.raises((TypeError, RuntimeError)) as caught:
            rpc.rpc_sync(me, train, ([value],))
        assert f"args[0][0] of {HERE}.train on {NAME} is a" in str(caught.value)
        assert sentence in str(caught.value)
    finally:
        if isinstance(value, asyncio.Future):
            value.get_loop().close()
        elif hasattr(value, "close"):
            value.close()


def test_looking_for_the_place_leaves_no_reference_behind() -> None:
    with World(2) as world:
        rref = world.run(0, rpc.remote, "worker1", train)
        world.run(0, rref.to_here)
        with pytest.raises(TypeError, match=r"args\[1\] of"):
            world.run(0, rpc.rpc_sync, "worker1", train, (rref, threading.Lock()))
        del rref
        eventually(lambda: not world.unrest())


class Huge(list[Any]):
    """Too much to be looked through."""


def test_the_search_has_an_end(me: str) -> None:
    value: Any = threading.Lock()
    for _ in range(900):
        value = [value, 1]
    with pytest.raises((TypeError, RecursionError), match=r"lock|recursion"):
        rpc.rpc_sync(me, train, (Huge([value]),))


class Rude:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("of the program")


def test_what_the_program_raises_stays_what_it_is(me: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        rpc.rpc_sync(me, train, ([Rude()],))
    assert str(caught.value) == "of the program"
    assert f"args[0][0] of {HERE}.train on alone is a Rude" in caught.value.__notes__[0]


# Arguments that are not a tuple.


@ways
@pytest.mark.parametrize("args", [5, torch.ones(3), "a", b"a", {"a": 1}, {1}, object()], ids=lambda a: type(a).__name__)
def test_a_single_argument_is_not_taken_apart(me: str, way: Any, args: Any) -> None:
    with pytest.raises(TypeError, match=rf"args of the call of {HERE}.train on alone .* did you mean args=\(x,\)\?"):
        way(me, train, args)
    with pytest.raises(TypeError, match=r"did you mean args=\(x,\)\?"), torch.autograd.profiler.profile():
        way(me, train, args)


@ways
def test_named_arguments_are_a_dict(me: str, way: Any) -> None:
    with pytest.raises(TypeError, match=r"kwargs of the call of .*train on alone .* did you mean kwargs="):
        way(me, train, (), 5)


@pytest.mark.parametrize("args", [[1, 2], (1, 2), deque([1, 2]), torch.Size([1, 2]), iter([1, 2])], ids=type)
def test_lists_and_other_sequences_are(me: str, args: Any) -> None:
    assert rpc.rpc_sync(me, train, args) == (1, 2)


# Deadlines.

gate = threading.Event()


def wait_at_gate() -> None:
    assert gate.wait(20.0)


def call_on(to: str) -> None:
    rpc.rpc_sync(to, wait_at_gate)


@pytest.fixture
def world() -> Iterator[World]:
    gate.clear()
    with World(3, threads=1, clock="virtual", timeout=30.0) as world:
        try:
            yield world
        finally:
            gate.set()


def outcome(future: Any) -> str:
    with pytest.raises(CallTimeout) as caught:
        future.wait()
    return str(caught.value)


def test_whether_the_function_had_begun(world: World) -> None:
    first = world.run(0, rpc.rpc_async, "worker1", wait_at_gate, timeout=5.0)
    eventually(lambda: world[1].agent.pool.counts()[2] == 1)
    second = world.run(0, rpc.rpc_async, "worker1", wait_at_gate, timeout=5.0)
    eventually(lambda: world[1].agent.dispatch.counts() == 2)
    world.clock.advance(6.0)
    assert "It had begun on worker1, and may still be running." in outcome(first)
    assert "It had not begun on worker1 0." in outcome(second)


def test_whose_deadline_it_was(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    default = world.run(0, rpc.rpc_async, "worker2", wait_at_gate)
    eventually(lambda: world[2].agent.dispatch.counts() == 1)
    world.clock.advance(10.0)
    given = world.run(0, rpc.rpc_async, "worker1", call_on, ("worker2",), timeout=5.0)
    eventually(lambda: world[2].agent.dispatch.counts() == 2)
    world.clock.advance(21.0)
    assert "(30000 ms)" in outcome(default)
    assert "That is the default of this worker (rpc_timeout)." in outcome(default)
    assert "(5000 ms)" in outcome(given)
    assert "default" not in outcome(given)
    eventually(lambda: "CallTimeout" in (said := capfd.readouterr().err) and noted.append(said) is None)
    nested = noted[0]
    assert "set timeout (5000 ms)" in nested
    assert f"It had the deadline of {HERE}.call_on, which worker0 called with 5000 ms, of which 5000 ms were left" in nested


noted: list[str] = []


# Memory.


def no_memory(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize(
    ("where", "name", "kind", "words"),
    [
        (dispatch, "unpack", SerializationError, r"the arguments \(\d+ bytes\) do not fit .* of alone, the callee"),
        (calls, "unpack", SerializationError, r"train on alone: the result \(\d+ bytes\) .* of alone, the caller"),
        (call_context, "pack_simply", MemoryError, r"alone has no memory to pack the arguments of .*train on alone"),
    ],
    ids=["callee", "caller", "packing"],
)
def test_memory_that_one_end_lacks(
    me: str, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, kind: type[Exception], words: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, name, no_memory)
        with pytest.raises(kind, match=words):
            rpc.rpc_sync(me, train, (1,))


# The text of an exception.


class Refusing(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Pointing(Exception):
    def __str__(self) -> str:
        return f"at {self.guard.locked()}"  # type: ignore[attr-defined]


def refuse() -> None:
    raise Refusing(5, "its own text")


def point() -> None:
    error = Pointing("plain")
    error.guard = threading.Lock()  # type: ignore[attr-defined]
    raise error


def test_an_exception_has_its_own_text(me: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refusing) as caught:
        rpc.rpc_sync(me, refuse)
    assert (str(caught.value), caught.value.code) == ("its own text", 5)
    with pytest.raises(Pointing) as other:
        rpc.rpc_sync(me, point)
    assert str(other.value) == "plain", "what its text needs was not sent"
    monkeypatch.setattr(exceptions, "speaks_like_torch", True)  # as under remora.compat
    with pytest.raises(Refusing, match="Original exception on remote side was Refusing") as third:
        rpc.rpc_sync(me, refuse)
    assert isinstance(third.value, RemoteError)


# Forks.


class Remote(Dataset[Any]):
    """Makes calls where it is used."""

    def __init__(self, rref: Any = None) -> None:
        self.rref = rref

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return rpc.rpc_sync(NAME, train, (index,)) if self.rref is None else self.rref.to_here()



def take_one(data: Remote, parent: str) -> None:
    batches = iter(DataLoader(data, num_workers=1))
    try:
        with pytest.raises(NotInitialized, match=rf"forked from the process of {parent}(?s:.*)set num_workers=0"):
            next(batches)
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_worker_of_a_dataloader(me: str) -> None:
    take_one(Remote(), me)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_worker_of_a_dataloader_with_a_reference() -> None:
    with World(2) as world:
        data = Remote(world.run(0, rpc.remote, "worker1", train))
        take_one(data, "worker0")
