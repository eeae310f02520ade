"""The part of a DistributedOptimizer that lives where the parameters are: one torch optimizer on one worker. No calls.

**Shadows.** The torch optimizer is not given the parameters themselves but shadows of them: tensors of its own that use
the parameters' memory. So the gradients of a pass can be put where a torch optimizer looks for them, in `.grad`, and the
`.grad` of the parameters is not touched: neither that of a program that trains on the same worker in the usual way, nor
that which a backward pass is using at this moment.

**Claims.** Several trainers may update the same parameters, each by an optimizer of its own. What they share is one claim
per parameter: its lock makes them step one after the other, so that no update is lost, and it knows how many they are.

**Stale graphs.** A step changes parameters in place. In one process, a backward pass through a graph that was recorded
before fails then, because its gradients would be wrong; and so it does here, as long as there is one optimizer. Several
optimizers that share a parameter train asynchronously: a step by one between the forward and the backward pass of the
other is what they want. So the change is not announced to autograd then.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import finalize

import torch
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakTensorKeyDictionary

from remora.autograd.leaves import ByLeaf

Options = dict[str, Any]
Group = tuple[Options, list[torch.Tensor]]  # what is special about these parameters, and the parameters
Found = Sequence[tuple[torch.Tensor, torch.Tensor] | None]  # for each parameter: itself and its gradient, if it has one


class LocalOptimizer:
    """A torch optimizer of `optimizer_class` for parameters of this worker.

    Without options it gets a plain list of parameters, as a program would give it; some optimizers take nothing else.
    """

    def __init__(
        self, optimizer_class: Callable[..., Any], groups: Sequence[Group], args: tuple[Any, ...], kwargs: Options
    ) -> None:
        self._parameters = [parameter for _, parameters in groups for parameter in parameters]
        for parameter in self._parameters:
            _check_parameter(parameter)
        self._ids = [id(parameter) for parameter in self._parameters]
        # One for each parameter, however often it is there: what torch says of that, it says by the object.
        shadow_of = {id(parameter): _shadow(parameter) for parameter in self._parameters}
        self._shadows = [shadow_of[key] for key in self._ids]
        shadows = iter(self._shadows)
        shadowed = [{**options, "params": [next(shadows) for _ in parameters]} for options, parameters in groups]
        plain = len(groups) == 1 and not groups[0][0]
        self._optimizer = optimizer_class(self._shadows if plain else shadowed, *args, **kwargs)
        self._memory = [_memory(shadow) for shadow in self._shadows]  # (nothing else can be there while they use it)
        self._claims = _claims_on(self._parameters, self)
        # The same order for all, or they could wait for each other in a circle.
        locks = [claim.lock for claim in sorted(set(self._claims), key=lambda claim: claim.number)]
        self._exclusively = _All(locks)  # no other thread steps on any of our parameters

    @property
    def defaults(self) -> Options:
        return dict(getattr(self._optimizer, "defaults", {}))

    @property
    def options(self) -> list[Options]:
        """The options of each group."""
        return [options_of(group) for group in self._optimizer.param_groups]

    def step(self, gathered: ByLeaf, changed: Sequence[Options] | None) -> None:
        """Update the parameters, after taking note of options that have changed."""
        found = list(map(gathered.get, self._ids))
        with self._exclusively:
            if changed is not None:
                self._learn(changed)
            try:
                self._take(found)
                self._optimizer.step()
            finally:
                self._hand_over(found)

    def state_dict(self) -> dict[str, Any]:
        with self._exclusively:
            state: dict[str, Any] = self._optimizer.state_dict()
            return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._exclusively:
            self._optimizer.load_state_dict(state)

    def _learn(self, changed: Sequence[Options]) -> None:
        for group, options in zip(self._optimizer.param_groups, changed, strict=True):
            group.update(options)

    def _take(self, found: Found) -> None:
        for i, (parameter, shadow, gathered) in enumerate(zip(self._parameters, self._shadows, found, strict=True)):
            place, shape, stride = self._memory[i]
            if parameter.data_ptr() != place or parameter.shape != shape or parameter.stride() != stride:
                shadow.data = parameter.data  # the program gave it other memory: `module.to(device)`
                self._memory[i] = _memory(parameter)
            shadow.grad = None if gathered is None else gathered[1]

    def _hand_over(self, found: Found) -> None:
        """Let the parameters have what the shadows have become; see "Stale graphs" above."""
        changed = []
        for i, (parameter, shadow, gathered) in enumerate(zip(self._parameters, self._shadows, found, strict=True)):
            shadow.grad = None
            if shadow.data_ptr() != self._memory[i][0]:
                parameter.data = shadow.data  # the optimizer gave it other memory
                self._memory[i] = _memory(shadow)
            if gathered is not None and len(self._claims[i].optimizers) == 1:
                changed.append(parameter)
        if changed:
            _announce(changed)


class _All:
    """`with _All(locks):` holds them all."""

    __slots__ = ("_locks",)

    def __init__(self, locks: Sequence[threading.Lock]) -> None:
        self._locks = locks

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()

    def __exit__(self, *error: object) -> None:
        for lock in self._locks:
            lock.release()


class _Claim:
    """One parameter of this worker, and the optimizers that update it."""

    __slots__ = ("lock", "number", "optimizers")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()  # guards: the parameter; steps of several trainers come one after the other
        self.optimizers: set[int] = set()  # their ids, for as long as they live

    def enter(self, optimizer: LocalOptimizer) -> None:
        self.optimizers.add(id(optimizer))
        finalize(optimizer, self.optimizers.discard, id(optimizer))


_claims: MutableMapping[torch.Tensor, _Claim] = WeakTensorKeyDictionary()
_claiming = threading.Lock()  # guards: _claims
_numbers = itertools.count()


def _claims_on(parameters: Sequence[torch.Tensor], optimizer: LocalOptimizer) -> list[_Claim]:
    with _claiming:
        claims = []
        for parameter in parameters:
            claim = _claims.get(parameter)
            if claim is None:
                claim = _claims[parameter] = _Claim(next(_numbers))
            claims.append(claim)
        for claim in set(claims):
            claim.enter(optimizer)
        return claims


def _announce_each(changed: list[torch.Tensor]) -> None:
    for tensor in changed:
        increment_version(tensor)


def _takes_many() -> bool:
    try:
        increment_version([torch.zeros(())])
    except (TypeError, RuntimeError, AttributeError):
        return False
    return True


# Have autograd know that these have been changed in place.
_announce: Callable[[list[torch.Tensor]], None] = increment_version if _takes_many() else _announce_each


def _check_parameter(parameter: object) -> None:
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"an optimizer takes references to tensors, and this is one to a {type(parameter).__qualname__}")
    if not parameter.is_leaf:
        raise ValueError("can't optimize a non-leaf Tensor: give the parameter that it was computed from")


def _shadow(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory and kind, with a `.grad` and a version of its own."""
    data = parameter.data
    if isinstance(parameter, torch.nn.Parameter):
        return torch.nn.Parameter(data, parameter.requires_grad)
    return data.requires_grad_(parameter.requires_grad)


def _memory(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the place and the order of its numbers in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def options_of(group: Options) -> Options:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}
