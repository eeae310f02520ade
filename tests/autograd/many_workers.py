"""Runs a program on real workers: calls are remote calls, passes are distributed ones. The meaning is `one_process`.

Everything here is run on a worker: of a world in one process, or of a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from remora import autograd, rpc
from tests.autograd.interpreter import Place, Seen, SerialQueue, place_for, run
from tests.autograd.language import Backward, Body, Call, Program, Shape
from tests.autograd.one_process import total
from tests.autograd.outcome import Gradients, Outcome
from tests.autograd.parcels import pack_arguments, pack_results, unpack_arguments, unpack_results

Mode = Literal["smart", "fast"]
Instructions = tuple[Body, str, Shape, bool]  # what to run, the path to it, how to pack what it returns, and with baggage?
Begun = tuple[Call, list[Any]]  # a call, and the futures of what it returns

_places: dict[str, Place] = {}  # by worker: a process may be several


def my_place() -> Place:
    """The place of the worker that runs this."""
    return _places[rpc.get_worker_info().name]


def settle(program: Program) -> None:
    """Make this worker's parameters anew."""
    me = rpc.get_worker_info()
    _places[me.name] = place_for(program, me.id)


def gradients_here(context_id: int) -> Gradients:
    """Copies of this worker's gradients, by name of the parameter."""
    place, found = my_place(), autograd.get_gradients(context_id)
    named: Gradients = {}
    for index, parameter in enumerate(place.parameters):
        gradient = found.get(parameter)
        named[f"worker{place.number} parameter {index}"] = None if gradient is None else gradient.clone()
    assert len(found) == sum(gradient is not None for gradient in named.values()), f"gradients of strangers: {found}"
    return named


def seen_here() -> list[Seen]:
    """What the hooks on this worker saw, at the end."""
    place = my_place()
    assert all(parameter.grad is None for parameter in place.parameters), "a distributed pass leaves .grad alone"
    return place.seen


# What is called.


def plain(instructions: Instructions, parcel: Any) -> Any:
    """A function that waits for the calls it makes."""
    return _packed(instructions, _wait(_steps(instructions, parcel, blocking=True)))


async def coroutine(instructions: Instructions, parcel: Any) -> Any:
    """A function that awaits them."""
    steps = _steps(instructions, await parcel if isinstance(parcel, rpc.RRef) else parcel, blocking=False)
    try:
        begun = steps.send(None)  # type: ignore[arg-type]
        while True:
            begun = steps.send([_results(call, [await each for each in pending]) for call, pending in begun])
    except StopIteration as end:
        return _packed(instructions, end.value)


@rpc.functions.async_execution
def future(instructions: Instructions, parcel: Any) -> torch.futures.Future[Any]:
    """A function that goes on in the callbacks of the calls it makes."""
    steps = _steps(instructions, parcel, blocking=False)
    promised: torch.futures.Future[Any] = torch.futures.Future()

    def go_on(results: list[list[Tensor]] | None) -> None:
        begun: list[Begun] = steps.send(results)  # type: ignore[arg-type]
        gather(begun, [pending for _, each in begun for pending in each], [])

    def gather(begun: list[Begun], pending: list[Any], parcels: list[Any]) -> None:
        if pending:
            pending[0].then(lambda done: safely(gather, begun, pending[1:], [*parcels, done.wait()]))
        else:
            arrived = iter(parcels)
            safely(go_on, [_results(call, list(islice(arrived, len(each)))) for call, each in begun])

    def safely(function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except StopIteration as end:
            promised.set_result(_packed(instructions, end.value))
        except Exception as error:
            promised.set_exception(error)  # type: ignore[arg-type]

    safely(go_on, None)
    return promised


def fetch(reference: rpc.RRef[Any]) -> Any:
    """A third worker's part: the value of somebody's reference."""
    return reference.to_here()


TARGETS = {"plain": plain, "coroutine": coroutine, "future": future}


def _steps(instructions: Instructions, parcel: Any, blocking: bool) -> SerialQueue:
    body, path, _, _ = instructions
    given = parcel.to_here() if isinstance(parcel, rpc.RRef) else parcel
    return run(body, unpack_arguments(given), my_place(), path, ManyWorkers(blocking))


def _packed(instructions: Instructions, results: list[Tensor]) -> Any:
    _, _, shape, baggage = instructions
    return pack_results(shape, baggage, results)


def _wait(steps: SerialQueue) -> list[Tensor]:
    try:
        begun = steps.send(None)  # type: ignore[arg-type]
        while True:
            begun = steps.send([_results(call, [each.wait() for each in pending]) for call, pending in begun])
    except StopIteration as end:
        results: list[Tensor] = end.value
        return results


def _results(call: Call, parcels: list[Any]) -> list[Tensor]:
    """The values that a call adds: those of its parcel; of two, their sums."""
    unpacked = [unpack_results(call, parcel) for parcel in parcels]
    with torch.no_grad() if call.no_grad else nullcontext():
        return unpacked[0] if len(unpacked) == 1 else [x + y for x, y in zip(*unpacked, strict=True)]


# Who calls.


class ManyWorkers:
    """A conductor for whom a call is a remote call. In coroutines and callbacks it must not block."""

    def __init__(self, blocking: bool, context_id: int = -1, mode: Mode = "smart") -> None:
        self.blocking = blocking
        self.context_id = context_id
        self.mode: Mode = mode
        self.passes: list[Gradients] = []

    def call(self, place: Place, call: Call, inputs: list[Tensor], path: str) -> Begun:
        with torch.no_grad() if call.no_grad else nullcontext():
            return call, self._begin(place, call, inputs, path)

    def _begin(self, place: Place, call: Call, inputs: list[Tensor], path: str) -> list[Any]:
        to, target = f"worker{call.to}", TARGETS[call.target]
        parcel: Any = pack_arguments(call, inputs)
        args = ((call.body, path, call.shape, call.baggage), rpc.RRef(parcel) if call.style == "lent" else parcel)
        match call.style:
            case "sync" | "lent" if self.blocking:
                return [Done(rpc.rpc_sync(to, target, args=args))]
            case "sync" | "async" | "lent":
                return [rpc.rpc_async(to, target, args=args)]
            case "passed":
                third = f"worker{(call.to + 1) % place.workers}"
                return [rpc.rpc_async(third, fetch, args=(rpc.remote(to, target, args=args),))]
            case "remote" | "twice":
                reference = rpc.remote(to, target, args=args)
                times = range(2 if call.style == "twice" else 1)
                return [Done(reference.to_here()) if self.blocking else reference.to_here_async() for _ in times]

    def backward(self, place: Place, step: Backward, roots: list[Tensor]) -> None:
        if not roots:
            return
        if step.at is None:
            autograd.backward(self.context_id, [root.sum() for root in roots], step.retain, mode=self.mode)
        elif step.at == place.number:
            rpc.RRef(total(roots)).backward(self.context_id, step.retain)
        else:
            rpc.remote(f"worker{step.at}", total, args=(roots,)).backward(self.context_id, step.retain)
        found = [rpc.rpc_sync(f"worker{i}", gradients_here, args=(self.context_id,)) for i in range(place.workers)]
        self.passes.append({name: gradient for each in found for name, gradient in each.items()})


class Done:
    """A result that is there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


def conduct(program: Program, mode: Mode = "smart") -> Outcome:
    """Run a program; worker 0 calls this."""
    settle_all(program)
    results, passes = conduct_once(program, mode)
    seen = [each for i in range(program.workers) for each in rpc.rpc_sync(f"worker{i}", seen_here)]
    return Outcome.of(results, passes, seen)


def settle_all(program: Program) -> None:
    """Have all workers make their parameters anew."""
    for i in range(program.workers):
        rpc.rpc_sync(f"worker{i}", settle, args=(program,))


def conduct_once(program: Program, mode: Mode = "smart") -> tuple[list[Tensor], list[Gradients]]:
    """Run a program with the parameters that are there, in a context of its own."""
    with autograd.context() as context_id:
        conductor = ManyWorkers(blocking=True, context_id=context_id, mode=mode)
        return _wait(run(program.body, [], my_place(), "", conductor)), conductor.passes
