"""Gives each call the per-thread state of torch and Python that a new thread has.

A function may leave grad mode off, a mode entered or a context variable set. The next function on the same thread belongs to
another caller and must not see that. So each call has a `contextvars.Context` of its own (from the pool or the event loop),
and torch's state is checked after each call: `is_clean` takes half a microsecond, and `make_clean` is seldom needed.

Covered: grad mode, inference mode, forward-mode and multithreading switches of autograd, autocast, the default device,
torch function modes, torch dispatch modes, hooks for saved tensors. Current devices and streams: `remora.devices.streams`.
What belongs to the process, and `threading.local` of the program, is not ours to reset (see docs/calls.md).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode

R = TypeVar("R")

_Guard: Any = torch._C._InferenceMode  # (torch's own wrapper does the same in more steps)
_grad: Callable[[], bool] = torch._C.is_grad_enabled
_inference: Callable[[], bool] = torch._C.is_inference_mode_enabled
_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_forward_grad: Callable[[], bool] = torch._C._is_fwd_grad_enabled
_multithreading: Callable[[], bool] = torch._C._is_multithreading_enabled
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "ipu", "mtia", "privateuseone", "maia")  # with an autocast
_default_dtypes: dict[str, torch.dtype] = {}  # of autocast, on a new thread


class _Switches(NamedTuple):
    grad: bool = True
    inference: bool = False
    forward_grad: bool = True
    multithreading: bool = True

    def set(self) -> None:
        """Set all but inference mode, for which a guard has to be entered first."""
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_grad)
        torch._C._set_multithreading_enabled(self.multithreading)


def is_clean() -> bool:
    """Return True if torch's state of this thread is that of a new thread."""
    return (
        _grad()
        and not _inference()
        and not _autocast()
        and not _function_modes()
        and not _dispatch_modes()
        and _top_hooks(True) is None
        and _forward_grad()
        and _multithreading()
    )


class _Home(threading.local):
    """The saved clean state of each thread of the worker.

    The guard remembers the switches of autograd and the dispatch keys of the thread as they were when it was entered, and
    restores all of them when it is left. It is entered before the thread runs anything of the program.
    """

    def __init__(self) -> None:
        self.guard = _entered(False)
        if not _default_dtypes:
            _default_dtypes.update({kind: torch.get_autocast_dtype(kind) for kind in _DEVICE_TYPES})


def _entered(inference: bool) -> Any:
    guard = _Guard(inference)
    guard.__enter__()
    return guard


_home = _Home()


def begin_thread() -> None:
    """Save the clean state. Each thread of a worker that runs code of the program calls this first."""
    assert _home.guard is not None


def make_clean() -> None:
    """Make this thread, which belongs to a worker, clean again. What a function left is dropped."""
    _take_off()
    _home.guard.__exit__(None, None, None)
    _home.guard = _entered(False)


class _Taken(NamedTuple):
    """The state that was taken off a thread, in the order in which it is restored."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    autocast_depth: int
    default_device: Any
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    hooks: tuple[Any, ...]

    def put_back(self) -> None:
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for _ in range(self.autocast_depth):
            torch.autocast_increment_nesting()
        torch._GLOBAL_DEVICE_CONTEXT.device_context = self.default_device
        for mode in self.function_modes:
            torch._C._push_on_torch_function_stack(mode)
        for mode in self.dispatch_modes:
            _push_mode(mode)
        for pack, unpack in self.hooks:
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _take_off() -> _Taken:
    """Take everything off this thread but the switches of autograd."""
    taken = _Taken(
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES),
        torch.is_autocast_cache_enabled(),
        torch.autocast_increment_nesting() - 1,
        getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        _popped(_function_modes, torch._C._pop_torch_function_stack),
        _popped(_dispatch_modes, _pop_mode),
        _popped(lambda: _top_hooks(True) is not None, _pop_hooks),
    )
    for kind, _, _ in taken.autocast:
        torch.set_autocast_enabled(kind, False)
        if kind in _default_dtypes:
            torch.set_autocast_dtype(kind, _default_dtypes[kind])
    torch.set_autocast_cache_enabled(True)
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()
    torch._GLOBAL_DEVICE_CONTEXT.device_context = None
    return taken


def _popped(there: Callable[[], object], pop: Callable[[], Any]) -> tuple[Any, ...]:
    """Pop all of a stack; return it with the lowest entry first."""
    found: list[Any] = []
    while there():
        found.append(pop())
    return tuple(reversed(found))


def _pop_hooks() -> Any:
    hooks = _top_hooks(True)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    return hooks


# Callbacks: they may run on a thread of the program, which is in a state that the program chose.


def run_clean(callback: Callable[..., R], /, *args: Any) -> R:
    """Call a callback in a clean state, and restore the state of this thread, which may belong to the program."""
    guard = _entered(False)
    taken = None if is_clean() else _take_off()
    try:
        return Context().run(callback, *args)
    finally:
        if not is_clean():
            _take_off()
        if taken is not None:
            taken.put_back()
        guard.__exit__(None, None, None)


# Coroutines: they share a thread, and each may wait in a state of its own, as in `with torch.no_grad(): await …`.


class InItsOwnState(Coroutine[Any, Any, R]):
    """A coroutine that starts in a clean state, and finds the state in which it began to wait when it goes on. It runs on a
    thread of ours, which is clean in between. With `grad_enabled` false it starts under no_grad."""

    __slots__ = ("_steps", "_switches", "_taken")

    def __init__(self, coroutine: Coroutine[Any, Any, R], grad_enabled: bool, inference: bool = False) -> None:
        self._steps = coroutine
        self._switches = _Switches(grad_enabled, inference)
        self._taken: _Taken | None = None

    def _step(self, go_on: Callable[..., Any], *how: Any) -> Any:
        if not is_clean():
            make_clean()  # a callback of the loop left something
        guard = _entered(True) if self._switches.inference else None
        if self._taken is not None:
            self._taken.put_back()
        self._switches.set()
        try:
            return go_on(*how)
        finally:
            self._switches = _Switches(_grad(), _inference(), _forward_grad(), _multithreading())
            self._taken = None
            if not is_clean():
                self._taken = _take_off()
                make_clean()
            del guard  # after that: it restores what was before it, which was clean

    def send(self, value: Any) -> Any:
        return self._step(self._steps.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._steps.throw, *error)

    def close(self) -> None:
        self._step(self._steps.close)

    def __await__(self) -> Generator[Any, Any, R]:
        return self

    def __iter__(self) -> InItsOwnState[R]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)  # for programs that print tasks


def new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **how: Any) -> asyncio.Task[Any]:
    """Make a task (a task factory of asyncio). It begins in the current grad mode and inference mode, otherwise clean."""
    if not isinstance(coroutine, InItsOwnState):
        coroutine = InItsOwnState(coroutine, _grad(), _inference())
    return asyncio.Task(coroutine, loop=loop, **how)
