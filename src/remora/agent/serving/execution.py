"""Runs what a request asks for: a Python function, a torch operator, a TorchScript function. The last step of a call."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple

import torch

from remora.agent.calls.call import current_serving
from remora.agent.calls.call_context import call_context_for, current_call_context
from remora.agent.calls.future import failure_of, when_done
from remora.agent.runtime.event_loop import Coroutines
from remora.agent.serving.dispatch import Dispatch, Request
from remora.agent.serving.error_log import Raised
from remora.devices import streams
from remora.errors import SerializationError
from remora.names import word
from remora.vocabulary.messages import MessageType
from remora.wire import exceptions
from remora.wire.frames import ASYNC

_set_serving = current_serving.set

Held = list[Any]  # one value, to be taken out: no other keeps it, and memory that came with a call goes back early
Finish = Callable[[Held, BaseException | None], None]


class Deferred(NamedTuple):
    """Returned by a function of ours that called a function marked as asynchronous."""

    function: object
    future: object


class Execution:
    """The handlers of PYTHON_CALL and SCRIPT_CALL."""

    def __init__(self, dispatch: Dispatch, coroutines: Coroutines) -> None:
        self._coroutines = coroutines
        self._now = dispatch.now
        self.raised = Raised()
        self.observer: Callable[..., Any] | None = None  # calls the function in our place: observer(function, *args, …)
        dispatch.on(MessageType.PYTHON_CALL, self.python_call)
        dispatch.on(MessageType.SCRIPT_CALL, self.script_call)

    def python_call(self, request: Request) -> None:
        """Run a Python function and answer with what it returns."""
        self.run_function(request, request.target(), request.answer)

    def script_call(self, request: Request) -> None:
        """Run a torch operator or a TorchScript function."""
        self.run_script(request, request.unpack(), request.answer)

    def run_function(self, request: Request, target: Any, finish: Finish) -> None:
        """Call `target = (function, args, kwargs)` and pass the outcome to `finish`, now or when it is there."""
        function, args, kwargs = target
        request.function = function
        del target
        call = function if self.observer is None else partial(self.observer, function)
        if streams.watched:
            call = partial(streams.restoring, call)
        # (in the context of this call, which ends with it)
        _set_serving((request.deadline, request.caller.name, request.frame.call))
        now = self._now
        request.began = now()
        try:
            if request.context is None:
                result = call(*args, **kwargs)
            else:
                with call_context_for(request.context, request.grad_enabled):
                    result = call(*args, **kwargs)
            del args, kwargs
            if type(result) is CoroutineType:
                self._await(request, result, finish)
                return
        except BaseException as error:
            self.raised.show(error)  # its worker's output is where people look first
            finish([], error)
            return
        if request.frame.flags & ASYNC:
            self._follow(function, result, finish)
        elif type(result) is Deferred:
            self._follow(result.function, result.future, finish)
        else:
            held = [result]
            del result
            finish(held, None)

    def _follow(self, function: object, result: object, finish: Finish) -> None:
        """The function returned a future: its value is the result, when it is there. No thread waits."""
        if not isinstance(result, torch._C.Future):
            kind = type(result)
            finish([], RuntimeError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but got {kind.__module__}.{kind.__qualname__} from {getattr(function, '__qualname__', function)!r}"
            ))  # fmt: skip
            return
        future: torch.futures.Future[Any] = result  # type: ignore[assignment]

        def pass_on(_: object) -> None:
            error = failure_of(future)
            finish([] if error is not None else [future.value()], error)

        when_done(future, pass_on)

    def _await(self, request: Request, coroutine: Any, finish: Finish) -> None:
        context = contextvars.copy_context()
        if request.context is not None:
            context.run(current_call_context.set, request.context)
        if streams.watched:
            coroutine = streams.OnItsOwnStreams(coroutine, streams.stream_point())

        def start() -> None:
            if request.given_up:
                coroutine.close()
                request.drop()
            else:
                flow_control = request.channel.flow_control
                request.cancel_by(self._coroutines.run(coroutine, context, flow_control, finish, request.grad_enabled))

        request.begin(start)

    def run_script(self, request: Request, target: Any, finish: Finish) -> None:
        """Call `target = (kind, name, args, kwargs)`: a torch operator or a compiled function, found by its name."""
        kind, name, args, kwargs = target
        request.function = word(name)
        del target
        call = call_script if self.observer is None else partial(self.observer, call_script)
        # (in the context of this call, which ends with it)
        _set_serving((request.deadline, request.caller.name, request.frame.call))
        now = self._now
        request.began = now()
        try:
            if request.context is None:
                result = call(kind, name, args, kwargs)
            else:
                with call_context_for(request.context, request.grad_enabled):
                    result = call(kind, name, args, kwargs)
            del args, kwargs
        except BaseException as error:
            finish([], error)
            return
        if request.frame.flags & ASYNC:
            if isinstance(result, torch._C.Future):
                self._follow(name, result, finish)
            else:
                finish([], RuntimeError(
                    "Async functions must return an IValue of Future type, but got "
                    f"{torch._C._jit_try_infer_type(result).type().annotation_str} from {name}"
                ))  # fmt: skip
        else:
            held = [result]
            del result
            finish(held, None)


def call_script(kind: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch or a TorchScript function."""
    try:
        return find_script(kind, name)(*args, **kwargs)
    except TypeError as error:
        if kind == "operator" and exceptions.speaks_like_torch:
            error.args = (f"Overloaded torch operator invoked from Python failed to match any schema: {error}",)
        raise


def find_script(kind: str, name: str) -> Callable[..., Any]:
    """A function of torch, as Python knows it, or a TorchScript function of this process."""
    if kind == "operator":
        operator: Callable[..., Any] = getattr(torch, name)
        return operator
    function = torch.jit._state._python_cu.find_function(name)
    if function is None:
        raise SerializationError(
            f"attempted to get undefined function {name}: the TorchScript function is not known to this worker. Import "
            f"the module that defines it on the callee too."
        )
    return function
