"""DistributedOptimizer: one optimizer for parameters of many workers, with a torch optimizer on each of them.

    optimizer = DistributedOptimizer(torch.optim.SGD, [rref1, rref2], lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss()])
        optimizer.step(context_id)
    scheduler.step()

This file is the trainer's side; what happens where the parameters are is in `remora.optim.local`. Every worker that owns
a parameter has all the groups, some of them empty perhaps, so that "group 1" means the same everywhere.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from remora import autograd, rpc
from remora.agent.calls.call_context import current_call_context
from remora.optim.local import LocalOptimizer, Options, options_of
from remora.optim.ownership import Share, groups_of, numbered, shares_of
from remora.rpc import RRef

State = dict[str, Any]

_INCOMPARABLE = (RuntimeError, ValueError)  # what tensors and arrays of many numbers raise when one asks if they are equal


class DistributedOptimizer(torch.optim.Optimizer):
    """Updates parameters where they live, with the gradients of a distributed autograd context.

    `params_rref` are references to parameters, or dictionaries of such references ("params") and options, as for a torch
    optimizer; `args` and `kwargs` go to `optimizer_class`. It is a `torch.optim.Optimizer` in that learning-rate schedulers
    take it and `param_groups` may be changed: the owners are told of changed options with the next step.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Any],
        params_rref: Iterable[RRef[Any]] | Iterable[Options],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Not super().__init__: it takes tensors only, and wraps `step` in what happens on the owners anyway.
        self.param_groups = groups_of(params_rref)
        self._name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        self._shares = shares_of(self.param_groups)
        options = self._options()
        made = self._on_owners(
            "making it", _make, [(optimizer_class, options, share.parameters, args, kwargs) for share in self._shares]
        )
        self.remote_optimizers: list[RRef[LocalOptimizer]] = [local for local, _, _, _ in made]
        self._numbers = [number for _, number, _, _ in made]
        _, _, self.defaults, complete = made[0]
        self._adopt(complete)
        self._told: list[Options] = copy.deepcopy(complete)  # what, to our knowledge, all owners know of our options

    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Have every owner update its parameters with the gradients that the context has collected there.

        The owners work at the same time. Two trainers may step the same parameters at the same time: one update follows
        the other. A parameter without a gradient stays as it is.
        """
        autograd._retrieve_context(context_id)  # or say that there is none
        changed = None if self._know_options() else self._changed_options()
        recording = current_call_context.set(None)  # a step has no gradients of its own
        try:
            if changed is not None:
                after = self._forget(changed)
            self._on_owners("step", _step, [(number, context_id, changed) for number in self._numbers])
            if changed is not None:
                self._told = after
        finally:
            current_call_context.reset(recording)

    def _know_options(self) -> bool:
        """Return True if all owners know the options as they are now. Every step asks, so nothing is copied for it."""
        if len(self._told) != len(self.param_groups):
            return False
        try:
            for group, told in zip(self.param_groups, self._told, strict=True):
                if len(group) != len(told) + 1 or not told.items() <= group.items():  # a group has its parameters, too
                    return False
        except _INCOMPARABLE:
            return False
        return True

    def _changed_options(self) -> list[Options]:
        """Return the options of each group that not all owners know. No more than that: an optimizer may keep in its groups
        what it has found out, and that is not to be undone."""
        return [
            {name: value for name, value in options.items() if name not in told or not _are_equal(told[name], value)}
            for options, told in zip(self._options(), self._told, strict=True)
        ]

    def _forget(self, changed: Sequence[Options]) -> list[Options]:
        """These are about to be told: from here on, some owners may know them, and others what was before. What all will
        know when they have been told. (Nothing is changed in its place: another thread may be in a step, too.)"""
        certain = []
        for group, told, new in zip(self.param_groups, self._told, changed, strict=True):
            certain.append({name: value for name, value in told.items() if name in group and name not in new})
        self._told = certain
        return [{**told, **new} for told, new in zip(certain, copy.deepcopy(changed), strict=True)]

    def state_dict(self) -> State:
        """The state of all owners, as one torch optimizer would give it that had all the parameters, in this order."""
        parts = self._on_owners("state_dict", _state_dict, [(local,) for local in self.remote_optimizers])
        state: State = {}
        for share, part in zip(self._shares, parts, strict=True):
            state.update(share.placed(part["state"]))
        groups = numbered(self._options_of(parts), [group["params"] for group in self.param_groups])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: State) -> None:
        """Take over what `state_dict` of such an optimizer returned, or of a torch optimizer with the same parameters."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("this state is of an optimizer with other parameter groups, or with groups of other sizes")
        options = [options_of(group) for group in groups]
        places = {number: place for place, number in enumerate(itertools.chain(*(group["params"] for group in groups)))}
        saved = state_dict["state"].items()
        state = {places.get(key, key): each for key, each in saved if key in places or not isinstance(key, int)}
        parts = [
            (local, {"state": share.part_of(state), "param_groups": numbered(options, share.parameters)})
            for local, share in zip(self.remote_optimizers, self._shares, strict=True)
        ]
        self._told = [{} for _ in groups]
        self._on_owners("load_state_dict", _load_state_dict, parts)
        self._adopt(copy.deepcopy(options))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients belong to a context, and a new context has none."""

    def add_param_group(self, param_group: Options) -> NoReturn:
        """Refused: parameters that come later can have an optimizer of their own."""
        raise NotImplementedError("make another DistributedOptimizer for parameters that come later")

    def _options(self) -> list[Options]:
        return [options_of(group) for group in self.param_groups]

    def _options_of(self, parts: Sequence[State]) -> list[Options]:
        """Return the options of each group as an owner of its parameters has them, with those that changed since."""
        found = []
        for number, changed in enumerate(self._changed_options()):
            owners = [part for share, part in zip(self._shares, parts, strict=True) if share.parameters[number]]
            found.append({**options_of((owners or parts)[0]["param_groups"][number]), **changed})
        return found

    def _adopt(self, options: Sequence[Options]) -> None:
        for group, each in zip(self.param_groups, options, strict=True):
            group.update(each)

    def _on_owners(self, doing: str, function: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the function on every owner, all at once. When all have answered, raise the first error."""
        *others, last = zip(self._shares, args, strict=True)
        begun = [_attempt(rpc.rpc_async, share.owner, function, each) for share, each in others] if others else []
        # This thread can read one reply itself, which is faster than to be woken by another; and often it is the only one.
        done = _attempt(rpc.rpc_sync, last[0].owner, function, last[1])
        outcomes = [done]
        if begun:
            outcomes[:0] = [each if isinstance(each, _Failed) else _attempt(each.wait) for each in begun]
        if _Failed not in map(type, outcomes):
            return outcomes
        failed = [(share, each) for share, each in zip(self._shares, outcomes, strict=True) if isinstance(each, _Failed)]
        try:
            raise self._explained(doing, failed)
        finally:
            del begun, done, outcomes, failed  # or the error would keep itself, and all that it saw, through this frame

    def _explained(self, doing: str, failed: Sequence[tuple[Share, _Failed]]) -> Exception:
        """The first error, with a note that says whose it is and what else went wrong."""
        (share, first), *others = failed
        first.error.add_note(f"{doing}: {self._name} for {len(share.positions)} parameter(s) on {share.owner.name}")
        for share, other in others:
            first.error.add_note(f"{share.owner.name} failed, too: {other.error!r}")
        return first.error

    def __getstate__(self) -> State:
        return {name: value for name, value in vars(self).items() if name != "step"}  # schedulers put a counter there

    def __setstate__(self, state: State) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"<DistributedOptimizer {self._name} on {', '.join(share.owner.name for share in self._shares)}>"


class _Failed:
    """In place of a result."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


def _are_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except _INCOMPARABLE:
        return False


def _attempt(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return _Failed(error)


# What follows runs on the owners.


def _make(
    optimizer_class: Callable[..., Any],
    options: Sequence[Options],
    parameters: Sequence[Sequence[RRef[torch.Tensor]]],
    args: tuple[Any, ...],
    kwargs: Options,
) -> tuple[RRef[LocalOptimizer], int, Options, list[Options]]:
    values = [[rref.local_value() for rref in group] for group in parameters]
    local = LocalOptimizer(optimizer_class, list(zip(options, values, strict=True)), args, kwargs)
    number = next(_next_number)
    _of_this_process[number] = local
    return RRef(local), number, local.defaults, local.options


# A step is the one call that is made again and again, and a reference among its arguments costs as much as all the rest:
# the trainer's reference keeps the optimizer here alive, and its number finds it.
_of_this_process: WeakValueDictionary[int, LocalOptimizer] = WeakValueDictionary()
_next_number = itertools.count()


def _step(number: int, context_id: int, changed: list[Options] | None) -> None:
    local = _of_this_process.get(number)
    if local is None:
        raise RuntimeError(f"there is no optimizer of number {number} here: the worker that had it was started again")
    context = autograd._known_context(context_id)  # if nothing of it has come to this worker, there are no gradients
    local.step({} if context is None else context.ready_gradients(), changed)


def _state_dict(local: RRef[LocalOptimizer]) -> State:
    return local.local_value().state_dict()


def _load_state_dict(local: RRef[LocalOptimizer], state: State) -> None:
    local.local_value().load_state_dict(state)
