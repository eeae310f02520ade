"""Claims: one pass at a time works on a node or a leaf. And `.grad` is lent to a pass where torch's accumulator has to run.

The accumulator of a leaf runs in a pass only where something of the program hangs behind it: a hook after accumulation, or
one on the accumulator itself, as DistributedDataParallel has. Such hooks look at `.grad`. So while it runs, `.grad` is the
gradient of the context, and afterwards it is what it was.

The program may run `backward` of its own through the same leaf meanwhile, on another thread. So such a leaf has a *gate*, a
tensor hook, which torch runs before it adds anything to `.grad`: a local pass waits there while the leaf is lent, and the
leaf is not lent while a local pass has gone through the gate and has not ended. Local passes do not wait for each other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from remora.agent.runtime.current import blocking_region
from remora.autograd.leaves import Gathered

# Reentrant: a local pass may end, and drop its token, in the midst of anything.
_changed = threading.Condition(threading.RLock())  # guards: _claims, _inside and _sleepers
_claims: dict[int, int] = {}  # by the id of a node or leaf: the thread that works on it
_inside: dict[int, dict[int, int]] = {}  # leaves that local passes add to, by id: by the pass's token, its thread
_sleepers = 0
_NONE: Mapping[int, int] = {}

_engine: Any = torch.autograd.Variable._execution_engine
_enter_engine = _engine_run_backward.__code__
_GATE_LIMIT = 2.0  # seconds to wait for local passes that may be past a new gate
_POLL_INTERVAL = 0.0005


class Claim:
    """`with Claim(things):` no other thread works on any of them. A thread may claim what it has already."""

    __slots__ = ("_mine", "_things")

    def __init__(self, things: Iterable[object]) -> None:
        self._things = set(map(id, things))

    def __enter__(self) -> None:
        me = threading.get_ident()
        with _changed:
            # They are taken all at once, so no thread has one while it waits for another.
            _sleep_until(lambda: _free(self._things, me))
            self._mine = self._things - _claims.keys()  # the rest this thread has already, further out
            _claims.update(dict.fromkeys(self._mine, me))

    def __exit__(self, *error: object) -> None:
        with _changed:
            for key in self._mine:
                del _claims[key]
            if _sleepers:
                _changed.notify_all()


def _free(things: set[int], me: int) -> bool:
    return all(_claims.get(key, me) == me and {me}.issuperset(_inside.get(key, _NONE).values()) for key in things)


def _sleep_until(condition: Callable[[], bool]) -> None:
    """For a thread that has `_changed`."""
    global _sleepers
    if condition():
        return
    _sleepers += 1
    try:
        with blocking_region():
            _changed.wait_for(condition)
    finally:
        _sleepers -= 1


class BorrowedGrad:
    """`with BorrowedGrad(leaves, gathered):` `.grad` of the leaves is the gradient that `gathered` has for them; at the end
    it goes back there. The caller has set up the gates of the leaves and claimed them."""

    __slots__ = ("_gathered", "_leaves", "_own")

    def __init__(self, leaves: Sequence[torch.Tensor], gathered: Gathered) -> None:
        self._leaves = leaves
        self._gathered = gathered
        self._own: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        gathered = self._gathered
        try:
            for leaf in self._leaves:
                own = leaf.grad
                known = gathered.get(id(leaf))
                gradient = None if known is None else known[1]
                if gradient is not own:
                    if own is not None:
                        leaf.grad = own  # or raise while nothing is changed: it could not be put back, either
                    leaf.grad = gradient
                self._own.append(own)
        except BaseException:
            self._put_back()
            raise

    def __exit__(self, *error: object) -> None:
        gathered = self._gathered
        for leaf in self._leaves:
            gradient = leaf.grad
            if gradient is not None:
                gathered[id(leaf)] = leaf, gradient
            else:
                gathered.pop(id(leaf), None)  # a hook that has used the gradient may drop it
        self._put_back()

    def _put_back(self) -> None:
        """`.grad` is what it was. If a leaf does not take it any more, because a hook has made something else of the leaf,
        it has none, and the others have theirs all the same."""
        refused: RuntimeError | None = None
        for leaf, own in zip(self._leaves, self._own, strict=False):  # not more than were lent
            if leaf.grad is not own:
                try:
                    leaf.grad = own
                except RuntimeError as error:
                    leaf.grad = None
                    refused = error
        if refused is not None:
            raise refused


def set_up_gate(leaf: torch.Tensor) -> None:
    """Let local passes through the leaf wait while it is lent, from now on. Not on devices: there the hook runs on a thread
    that all passes share, and must not block."""
    hooks = leaf._backward_hooks or {}
    if leaf.device.type == "cpu" and not any(type(hook) is _Gate for hook in hooks.values()):
        leaf.register_hook(_Gate(id(leaf)))  # type: ignore[no-untyped-call]
        _wait_for_passes_under_way()


def _wait_for_passes_under_way() -> None:
    """A local pass that is under way now may be past the place where a gate has just been set up. Not for ever: it may
    itself wait for this thread, in a hook that calls a worker."""
    passes = _local_passes()
    end = time.monotonic() + _GATE_LIMIT
    while passes and time.monotonic() < end:
        with blocking_region():
            time.sleep(_POLL_INTERVAL)
        passes &= _local_passes()


def _local_passes() -> set[FrameType]:
    """The local passes of other threads that are under way: the frames from which they entered the engine."""
    me = threading.get_ident()
    passes = set()
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top if thread != me else None
        while frame is not None:
            if frame.f_code is _enter_engine:
                passes.add(frame)
            frame = frame.f_back
    return passes


class _Gate:
    """The hook of a leaf at which a local pass waits while the leaf is lent."""

    __slots__ = ("_leaf",)

    __torch_unserializable__ = True  # a copy of the leaf needs none, and torch need not warn that it is left out

    def __init__(self, leaf: int) -> None:
        self._leaf = leaf

    def __call__(self, gradient: torch.Tensor) -> None:
        me, leaf = threading.get_ident(), self._leaf
        with _changed:
            if _claims.get(leaf) == me:
                return  # it is this thread that has lent the leaf
            _sleep_until(lambda: leaf not in _claims)
            token = _Inside(leaf)
            _inside.setdefault(leaf, {})[id(token)] = me
        _engine.queue_callback(token)


class _Inside:
    """A local pass that has gone through a gate. The engine has this until the pass ends: it calls it then, or, if the pass
    fails, drops it."""

    __slots__ = ("_leaf",)

    def __init__(self, leaf: int) -> None:
        self._leaf = leaf

    def __call__(self) -> None:
        with _changed:
            threads = _inside.get(self._leaf, {})
            if threads.pop(id(self), None) is None:
                return  # called, and dropped now
            if not threads:
                del _inside[self._leaf]
            if _sleepers:
                _changed.notify_all()

    __del__ = __call__
