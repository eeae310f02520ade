"""Small programs for three workers, to be run under every fault: each step notes what came of it.

A step is right if it yields the value it should, and it may fail with an error of ours; nothing else. It may take as long
as a call of this world may. What runs on other workers is counted, so that nothing runs twice unnoticed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from remora import autograd, rpc
from remora.agent.runtime.current import current_worker
from remora.errors import RemoraError
from remora.testing.world import World

_lock = threading.Lock()
ran: Counter[str] = Counter()
kept: dict[str, list[Any]] = {}


def run(key: str, value: Any) -> Any:
    """What workers are asked to do: count that it ran, and give the value back."""
    with _lock:
        ran[key] += 1
    return value


def run_and_fail(key: str) -> None:
    run(key, None)
    raise ValueError(key)


def run_behind(key: str, to: str, value: Any) -> Any:
    """The same on another worker, through this one."""
    run(key, None)
    return rpc.rpc_sync(to, run, args=(f"{key}, behind", value))


def keep(reference: rpc.RRef[Any]) -> None:
    with _lock:
        kept.setdefault(rpc.get_worker_info().name, []).append(reference)


def give(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


def read(key: str, reference: rpc.RRef[Any]) -> Any:
    return run(key, reference.to_here(timeout=rpc.get_rpc_timeout()))


def scale(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by


class Counted:
    """An object on another worker."""

    def __init__(self, value: int) -> None:
        self.value = value

    def plus(self, key: str, n: int) -> int:
        return int(run(key, self.value + n))


@dataclass
class Story:
    """What came of each step: a value, or an error."""

    outcomes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # (what it should be, what it is)
    whose: dict[str, str] = field(default_factory=dict)  # the worker that took the step

    def step(self, name: str, wanted: Any, action: Callable[[], Any]) -> Any:
        """Take a step; its value, or None if it failed."""
        self.whose[name] = current_worker().get_worker_info().name
        try:
            value = action()
        except Exception as error:
            self.outcomes[name] = (wanted, error)
            return None
        self.outcomes[name] = (wanted, value)
        return value

    def problems(self, dead: Collection[str] = ()) -> list[str]:
        """SerialQueue that yielded something wrong; those of the dead do not count."""
        return [
            f"{name}: {got!r} instead of {wanted!r}"
            for name, (wanted, got) in self.outcomes.items()
            if self.whose[name] not in dead and not _right(wanted, got)
        ]


def _right(wanted: Any, got: Any) -> bool:
    if isinstance(got, RemoraError | TimeoutError):
        return True  # (what the function itself raised is a RemoteError, too)
    if isinstance(wanted, torch.Tensor):
        return isinstance(got, torch.Tensor) and torch.equal(wanted, got)
    return bool(wanted == got)


def calls(world: World, story: Story) -> None:
    """Calls of every kind, between all workers."""
    large = torch.arange(60_000.0)

    def start(i: int) -> Any:
        return rpc.rpc_async(f"worker{i}", run, args=(f"async {i}", i), timeout=world.timeout)

    def program() -> None:
        sync = rpc.rpc_sync
        story.step("call", 1, lambda: sync("worker1", run, args=("call", 1), timeout=world.timeout))
        story.step("nested", 2, lambda: sync("worker1", run_behind, args=("nested", "worker2", 2), timeout=world.timeout))
        story.step("async", [1, 2, 1, 2], lambda: torch.futures.wait_all([start(i) for i in (1, 2, 1, 2)]))
        story.step("error", "RemoteError", lambda: sync("worker2", run_and_fail, args=("error",), timeout=world.timeout))
        story.step("large", large, lambda: sync("worker1", run, args=("large", large), timeout=world.timeout))
        story.step("self", 3, lambda: sync("worker0", run, args=("self", 3), timeout=world.timeout))

    world.run(0, program)


def references(world: World, story: Story) -> None:
    """References made, shared, returned, used and dropped."""

    def program() -> None:
        sync = rpc.rpc_sync
        made = story.step("make", None, lambda: _made(rpc.remote("worker1", run, args=("make", 7), timeout=world.timeout)))
        if made is not None:
            story.step("fetch", 7, lambda: made[0].to_here(timeout=world.timeout))
            story.step("share", None, lambda: sync("worker2", keep, args=(made[0],), timeout=world.timeout))
            story.step("read", 7, lambda: sync("worker2", read, args=("read", made[0]), timeout=world.timeout))
            story.step("home", 7, lambda: sync("worker1", read, args=("home", made[0]), timeout=world.timeout))
        given = story.step("give", None, lambda: _made(sync("worker2", give, args=(8,), timeout=world.timeout)))
        if given is not None:
            story.step("given", 8, lambda: given[0].to_here(timeout=world.timeout))
        counted = story.step("object", None, lambda: _made(rpc.remote("worker2", Counted, args=(5,), timeout=world.timeout)))
        if counted is not None:
            story.step("method", 6, lambda: counted[0].rpc_sync(timeout=world.timeout).plus("method", 1))

    world.run(0, program)


class _Made(list[Any]):
    """A reference, which is right whatever it is."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _made(reference: Any) -> _Made:
    return _Made([reference])


def gradients(world: World, story: Story) -> None:
    """A distributed backward pass through two workers."""

    def program() -> None:
        x = torch.ones(4, requires_grad=True)
        story.step("gradient", torch.full((4,), 12.0), lambda: backward(x))

    def backward(x: torch.Tensor) -> torch.Tensor:
        with autograd.context() as context_id:
            two, three = torch.tensor(2.0), torch.tensor(3.0)
            y = rpc.rpc_sync("worker1", scale, args=(x, two), timeout=world.timeout)
            z = rpc.rpc_sync("worker2", scale, args=(y * 2, three), timeout=world.timeout)
            autograd.backward(context_id, [z.sum()])
            return autograd.get_gradients(context_id)[x]

    world.run(0, program)


def shutdown(world: World, story: Story) -> None:
    """References held everywhere, and a graceful end."""

    def program() -> None:
        i = rpc.get_worker_info().id
        there, elsewhere, limit = f"worker{(i + 1) % 3}", f"worker{(i + 2) % 3}", world.timeout
        made = story.step(f"make {i}", None, lambda: _made(rpc.remote(there, run, args=(f"make {i}", i), timeout=limit)))
        if made is not None:
            story.step(f"share {i}", None, lambda: rpc.rpc_sync(elsewhere, keep, args=(made[0],), timeout=limit))
        story.step(f"end {i}", None, lambda: rpc.shutdown(timeout=world.timeout))

    world.run_all(program)


SCENARIOS: dict[str, Callable[[World, Story], None]] = {
    "calls": calls,
    "references": references,
    "gradients": gradients,
    "shutdown": shutdown,
}
