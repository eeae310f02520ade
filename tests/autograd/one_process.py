"""The meaning of a program: every worker in this process, calls are function calls, PyTorch's own engine.

What goes from worker to worker is a copy, made by `clone`, so that gradients flow back through it. It is the reference
for everything: gradients, how often hooks run and what they see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.autograd.interpreter import Place, SerialQueue, place_for, run
from tests.autograd.language import Backward, Call, Program
from tests.autograd.outcome import Gradients, Outcome
from tests.autograd.parcels import pack_arguments, pack_results, unpack_arguments, unpack_results


class OneProcess:
    """A conductor for whom a call is a function call."""

    def __init__(self, program: Program) -> None:
        self.places = [place_for(program, number) for number in range(program.workers)]
        self.passes: list[Gradients] = []
        self._messages: list[bool] = []  # one for each that carried gradients' paths: was it reached in this pass?
        self.every_message_reached = True

    def call(self, place: Place, call: Call, inputs: list[Tensor], path: str) -> list[Tensor]:
        with torch.no_grad() if call.no_grad else nullcontext():
            parcel = pack_arguments(call, inputs)
            if call.style != "lent" or call.to != place.number:  # fetching what one has oneself takes no message
                parcel = self._carry(parcel)
            steps = run(call.body, unpack_arguments(parcel), self.places[call.to], path, self)
            reply = pack_results(call.shape, call.baggage, _finish(steps))
            return self._returned(place, call, reply)

    def _returned(self, place: Place, call: Call, reply: Any) -> list[Tensor]:
        def fetched(by: int) -> Any:
            return reply if by == call.to else self._carry(reply)

        match call.style:
            case "sync" | "async" | "lent":
                return unpack_results(call, self._carry(reply))
            case "remote":
                return unpack_results(call, fetched(place.number))
            case "passed":
                third = (call.to + 1) % place.workers
                return unpack_results(call, self._carry(fetched(third)))
            case "twice":
                both = [unpack_results(call, fetched(place.number)) for _ in range(2)]
                return [x + y for x, y in zip(*both, strict=True)]

    def backward(self, place: Place, step: Backward, roots: list[Tensor]) -> None:
        if not roots:
            return
        if step.at is None:
            losses = [root.sum() for root in roots]
        else:
            losses = [total(roots if step.at == place.number else self._carry(roots))]
        self._messages[:] = [False] * len(self._messages)
        torch.autograd.backward(losses, retain_graph=step.retain)
        self.every_message_reached &= all(self._messages)
        self.passes.append({
            f"worker{each.number} parameter {index}": None if parameter.grad is None else parameter.grad.clone()
            for each in self.places
            for index, parameter in enumerate(each.parameters)
        })

    def _carry(self, parcel: Any) -> Any:
        """Copies, as they would arrive: a tensor that is in a message twice is one tensor when it arrives."""
        arrived: dict[int, Tensor] = {}
        number = len(self._messages)

        def reached(gradient: Tensor | None) -> None:
            self._messages[number] = True

        def carried(tensor: Tensor) -> Tensor:
            if id(tensor) not in arrived:
                copy = arrived[id(tensor)] = tensor.clone()
                if copy.requires_grad:
                    copy.register_hook(reached)
            return arrived[id(tensor)]

        copied = _each_tensor(parcel, carried)
        if any(copy.requires_grad for copy in arrived.values()):
            self._messages.append(False)
        return copied


def _each_tensor(parcel: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(parcel, Tensor):
        return change(parcel)
    if isinstance(parcel, dict):
        return {key: _each_tensor(value, change) for key, value in parcel.items()}
    if isinstance(parcel, (list, tuple)):
        return type(parcel)(_each_tensor(value, change) for value in parcel)
    return parcel


def _finish(steps: SerialQueue) -> list[Tensor]:
    """Run a body whose calls are done when they are begun."""
    try:
        done = steps.send(None)  # type: ignore[arg-type]
        while True:
            done = steps.send(done)
    except StopIteration as end:
        results: list[Tensor] = end.value
        return results


def total(values: list[Tensor]) -> Tensor:
    """The loss that another worker computes."""
    return torch.stack([value.sum() for value in values]).sum()


def run_in_one_process(program: Program) -> tuple[Outcome, bool]:
    """What a program yields, and whether each message that could carry gradients back did so in each pass."""
    conductor = OneProcess(program)
    results = _finish(run(program.body, [], conductor.places[0], "", conductor))
    seen = [each for place in conductor.places for each in place.seen]
    return Outcome.of(results, conductor.passes, seen), conductor.every_message_reached
