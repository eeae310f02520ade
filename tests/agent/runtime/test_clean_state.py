"""Every call starts from the same state, whatever the calls before it left behind, and on whichever thread it runs."""

from __future__ import annotations

import asyncio
import decimal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remora import rpc
from remora.agent.runtime.clean_state import is_clean
from remora.testing.world import World
from tests.agent.alone import worker_alone

SOON = 20.0

variable: ContextVar[str] = ContextVar("variable", default="unset")
kept: list[Any] = []  # modes that were entered; for ever, since one that is dropped restores what was before, here
gate = threading.Event()


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def enter(mode: Any) -> None:
    kept.append(mode)
    mode.__enter__()


CHANGES: dict[str, Callable[[], Any]] = {
    "grad mode": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: enter(torch.inference_mode()),
    "autocast": lambda: enter(torch.autocast("cpu", dtype=torch.float16, cache_enabled=False)),
    "default device": lambda: torch.set_default_device("meta"),
    "function mode": lambda: enter(Functions()),
    "dispatch mode": lambda: enter(Dispatches()),
    "saved tensors": lambda: enter(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
    "multithreading": lambda: torch._C._set_multithreading_enabled(False),
    "context variable": lambda: variable.set("set"),
    "decimal": lambda: setattr(decimal.getcontext(), "prec", 3),
}


def leave(*changes: str) -> None:
    for change in changes or CHANGES:
        CHANGES[change]()


def look() -> dict[str, object]:
    """The state of this thread."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled() or torch.ones(1).is_inference(),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()],
        "default device": [torch.get_default_device(), torch.ones(1).device],
        "function mode": torch._C._len_torch_function_stack(),
        "dispatch mode": torch._C._len_torch_dispatch_stack(),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "multithreading": torch._C._is_multithreading_enabled(),
        "context variable": variable.get(),
        "decimal": decimal.getcontext().prec,
    }


def on_new_thread() -> dict[str, object]:
    found: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


def leave_and_look(*changes: str) -> dict[str, object]:
    before = look()
    leave(*changes)
    return before


async def leave_and_look_later(*changes: str) -> dict[str, object]:
    before = look()
    leave(*changes)
    after = look()
    await asyncio.sleep(0.001)
    assert look() == after, "a coroutine finds its own state again"
    return before


@rpc.functions.async_execution
def leave_and_look_by_future(*changes: str) -> torch.futures.Future[Any]:
    return done(leave_and_look(*changes))


def done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


class Leaving:
    """A value that leaves things behind when it is pickled, or unpickled."""

    def __init__(self, pickled: bool) -> None:
        self.pickled = pickled

    def __getstate__(self) -> dict[str, Any]:
        if self.pickled:
            leave()
        return {"pickled": self.pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pickled = True
        if not state["pickled"]:
            leave()


def look_beside(value: Leaving) -> dict[str, object]:
    return {**look(), "context variable": "unset", "decimal": 28}  # those are the call's own already


def make_leaving(pickled: bool) -> Leaving:
    return Leaving(pickled)


@pytest.fixture
def me() -> Iterator[str]:
    """A worker with one thread for functions: what one leaves behind, the next one would find."""
    with worker_alone(num_worker_threads=1) as name:
        yield name


def everything(me: str) -> list[dict[str, object]]:
    """What calls of each kind find, some of each: they may run on different threads."""
    found = [rpc.rpc_sync(me, look) for _ in range(8)]
    found += [future.wait() for future in [rpc.rpc_async(me, look) for _ in range(8)]]
    found += [rpc.remote(me, look).to_here() for _ in range(2)]
    found += [rpc.rpc_sync(me, leave_and_look_later) for _ in range(2)]
    found += [rpc.rpc_async(me, look).then(lambda _: look()).wait() for _ in range(4)]
    found += [rpc.rpc_sync(me, look_beside, args=(Leaving(False),))]
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", [leave_and_look, leave_and_look_later, leave_and_look_by_future])
def test_what_a_function_leaves_does_not_reach_later_calls(
    me: str, change: str, way: Callable[..., dict[str, object]]
) -> None:
    clean = on_new_thread()
    for _ in range(3):
        assert rpc.rpc_sync(me, way, args=(change,)) == clean
    assert rpc.remote(me, way, args=(change,)).to_here() == clean
    assert everything(me) == [clean] * 25
    assert torch.is_grad_enabled()


def test_nor_does_what_a_failing_function_leaves(me: str) -> None:
    clean = on_new_thread()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync(me, leave_and_fail)
    assert everything(me) == [clean] * 25


def leave_and_fail() -> None:
    leave()
    raise ZeroDivisionError


def wait_at_gate() -> None:
    assert gate.wait(SOON)


def test_nor_does_what_a_callback_leaves(me: str) -> None:
    clean = on_new_thread()
    for _ in range(3):
        gate.clear()
        future = rpc.rpc_async(me, wait_at_gate)
        following = future.then(lambda _: leave_and_look())
        gate.set()
        assert following.wait() == clean
    assert everything(me) == [clean] * 25


def test_nor_what_pickling_and_unpickling_leave(me: str) -> None:
    clean = on_new_thread()
    for _ in range(3):
        assert rpc.rpc_sync(me, look_beside, args=(Leaving(False),)) == clean
        assert everything(me) == [clean] * 25
    with World(2) as world, world.acting(0):
        for _ in range(3):
            rpc.rpc_sync("worker1", make_leaving, args=(True,))
            assert rpc.rpc_sync("worker1", look) == clean
            there = rpc.remote("worker1", make_leaving, args=(True,))
            there.to_here()
            assert [rpc.rpc_sync("worker1", look) for _ in range(4)] == [clean] * 4


# The program's own threads.


def test_a_callback_on_a_thread_of_the_program_starts_clean_and_leaves_it_as_it_was(me: str) -> None:
    clean = on_new_thread()
    future = rpc.rpc_async(me, look)
    future.wait()
    found = []
    variable.set("mine")
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        before = look()
        found.append(future.then(lambda _: leave_and_look()).wait())  # at once, on this thread
        assert look() == before
    with torch.inference_mode():
        before = look()
        found.append(future.then(lambda _: leave_and_look()).wait())
        assert look() == before
    assert found == [clean] * 2
    variable.set("unset")
    assert look() == clean


def test_the_thread_of_a_caller_keeps_its_state(me: str) -> None:
    variable.set("mine")
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("cpu"):
        before = look()
        rpc.rpc_sync(me, leave)
        rpc.rpc_async(me, leave).wait()
        torch.futures.wait_all([rpc.rpc_async(me, leave) for _ in range(3)])
        rpc.remote(me, look).to_here()
        assert look() == before
    variable.set("unset")
    assert is_clean()


def make_tensor(n: int) -> torch.Tensor:
    return torch.ones(n)


@pytest.mark.parametrize("n", [3, 1 << 18])
def test_what_is_received_under_inference_mode_is_a_normal_tensor(n: int) -> None:
    with World(2) as world, world.acting(0):
        with torch.inference_mode():
            rref = rpc.remote("worker1", make_tensor, args=(n,))
            received = [
                rpc.rpc_sync("worker1", make_tensor, args=(n,)),
                rpc.rpc_async("worker1", make_tensor, args=(n,)).wait(),
                *torch.futures.wait_all([rpc.rpc_async("worker1", make_tensor, args=(n,)) for _ in range(3)]),
                rref.to_here(),
                rpc.rpc_sync("worker1", torch.add, args=(torch.ones(n), 1)),
            ]
            sent = torch.ones(n)
        assert [each.is_inference() for each in received] == [False] * len(received)
        assert rpc.rpc_sync("worker1", is_normal, args=(sent,))
        weight = torch.ones(n, requires_grad=True)
        for each in received:
            (each * weight).sum().backward()  # which inference tensors forbid


def is_normal(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference()


# Coroutines.


async def in_state(step: int) -> list[bool]:
    """Under a mode of its own, while others run."""
    found = []
    for _ in range(3):
        with torch.set_grad_enabled(step % 2 == 0), torch.autocast("cpu", enabled=step % 3 == 0):
            await asyncio.sleep(0)
            found += [torch.is_grad_enabled() == (step % 2 == 0), torch.is_autocast_enabled("cpu") == (step % 3 == 0)]
        if step % 4 == 1:
            with torch.inference_mode():
                await asyncio.sleep(0)
                found.append(torch.is_inference_mode_enabled())
        await asyncio.sleep(0)
        found.append(is_clean())
    return found


def test_coroutines_do_not_see_the_modes_of_others(me: str) -> None:
    for found in torch.futures.wait_all([rpc.rpc_async(me, in_state, args=(step,)) for step in range(12)]):
        assert all(found)


async def start_task() -> list[bool]:
    async def inner() -> list[bool]:
        found = [torch.is_grad_enabled()]
        torch.set_grad_enabled(True)
        await asyncio.sleep(0)
        return [*found, torch.is_grad_enabled()]

    with torch.no_grad():
        task = asyncio.create_task(inner())
    return [*await task, torch.is_grad_enabled()]


def test_a_task_begins_in_the_grad_mode_in_which_it_was_started(me: str) -> None:
    assert rpc.rpc_sync(me, start_task) == [False, True, True]


async def wait_in_state() -> None:
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        await asyncio.sleep(60)


def test_a_coroutine_that_is_given_up_in_a_state_of_its_own_leaves_nothing(me: str) -> None:
    clean = on_new_thread()
    for _ in range(3):
        future = rpc.rpc_async(me, wait_in_state)
        assert rpc.rpc_sync(me, leave_and_look_later) == clean
        future.cancel()
        assert rpc.rpc_sync(me, leave_and_look_later) == clean
    assert everything(me) == [clean] * 25
