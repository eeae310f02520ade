"""What the caller is told when a call goes wrong; and that the worker lives on after each."""

from __future__ import annotations

import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from remora import rpc
from remora.errors import NotInitialized, RemoraError, RemoteError, SerializationError, WorkerNotFound


class Custom(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())
        self.lock = threading.Lock()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class CannotBeRebuilt:
    """Pickles, and raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return refuse_to_be_rebuilt, ()


def refuse_to_be_rebuilt() -> None:
    raise LookupError("this cannot be rebuilt")


def double(x: int) -> int:
    return 2 * x


def throw(error: BaseException | type[BaseException]) -> None:
    raise error


def throw_custom() -> None:
    error = Custom(7, "custom words")
    error.tensor = torch.ones(2)  # type: ignore[attr-defined]
    error.add_note("a note")
    raise error


def throw_keyword_only() -> None:
    raise KeywordOnly(code=9)


def throw_unpicklable() -> None:
    raise Unpicklable("words that survive")


def throw_unprintable() -> None:
    raise Unprintable


def throw_with_cause() -> None:
    try:
        {}["missing"]  # type: ignore[index]
    except KeyError as error:
        raise ValueError("outer") from error


def throw_nested(to: str) -> None:
    rpc.rpc_sync(to, throw_custom)


def make_lock() -> Any:
    return threading.Lock()


def make_unbuildable() -> CannotBeRebuilt:
    return CannotBeRebuilt()


@rpc.functions.async_execution
def promise_failing(text: str) -> torch.futures.Future[None]:
    future: torch.futures.Future[None] = torch.futures.Future()
    threading.Timer(0.01, lambda: future.set_exception(ValueError(text))).start()  # type: ignore[arg-type]
    return future


@rpc.functions.async_execution
def promise_failing_call(to: str) -> torch.futures.Future[None]:
    return rpc.rpc_async(to, throw_custom)


@rpc.functions.async_execution
def promise_raising() -> torch.futures.Future[None]:
    raise ValueError("before there was a future")


@rpc.functions.async_execution
def promise_nothing() -> int:
    return 5


Call = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, me: str) -> Iterator[Call]:
    def run(func: Any, *args: Any) -> Any:
        if request.param == "sync":
            return rpc.rpc_sync(me, func, args=args, timeout=10)
        return rpc.rpc_async(me, func, args=args, timeout=10).wait()

    yield run
    assert run(double, 4) == 8, "the worker lives on"


# What a function raises.


@pytest.mark.parametrize(
    "error",
    [
        ValueError("words", 3),
        KeyError("key"),
        ZeroDivisionError("division"),
        FileNotFoundError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
        StopIteration(4),
        TimeoutError("mine"),
        RuntimeError("plain"),
        ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_original_type_and_arguments(call: Call, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        call(throw, error)
    assert caught.value.args[:1] == error.args[:1]
    assert str(caught.value) == str(error)
    assert isinstance(caught.value, RemoteError)
    assert isinstance(caught.value, RuntimeError), "programs written for torch.distributed.rpc catch this"


def test_attributes_and_notes_travel(call: Call) -> None:
    with pytest.raises(Custom, match="custom words") as caught:
        call(throw_custom)
    assert caught.value.code == 7
    assert caught.value.tensor.tolist() == [1, 1]  # type: ignore[attr-defined]
    assert caught.value.__notes__ == ["a note"]


def test_an_exception_class_that_wants_keywords(call: Call) -> None:
    with pytest.raises(KeywordOnly) as caught:
        call(throw_keyword_only)
    assert caught.value.code == 9
    assert "code 9" in str(caught.value)


def test_the_remote_traceback_is_the_cause_and_names_the_worker(call: Call) -> None:
    with pytest.raises(Custom) as caught:
        call(throw_custom)
    text = str(caught.value.__cause__)
    assert "On WorkerInfo(id=0, name=alone)" in text
    assert "in throw_custom" in text
    assert "alone" in caught.value.worker  # type: ignore[attr-defined]
    printed = "".join(traceback.format_exception(caught.value))
    assert "in throw_custom" in printed
    assert "direct cause" in printed


def test_the_causes_on_the_remote_side_are_in_the_text(call: Call) -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        call(throw_with_cause)
    assert "KeyError: 'missing'" in str(caught.value.__cause__)


def test_an_error_keeps_its_type_over_several_workers(call: Call) -> None:
    with pytest.raises(Custom, match="custom words") as caught:
        call(throw_nested, "alone")
    assert caught.value.code == 7
    text = str(caught.value.__cause__)
    assert text.count("On WorkerInfo") >= 2
    assert "in throw_nested" in text
    assert "in throw_custom" in text


@pytest.mark.parametrize("text", ["é ü 漢字 🐟", "C:\\Users\\Überall", "\\n is not a line end", "a\x00b", "\ud800"])
def test_words_arrive_as_they_were(call: Call, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        call(throw, ValueError(text))
    assert caught.value.args == (text,)


def test_a_locally_defined_exception(call: Call) -> None:
    class Local(Exception):
        pass

    def throw_local() -> None:
        raise Local("local words")

    with pytest.raises(Exception, match="local words") as caught:
        call(throw_local)
    assert type(caught.value).__name__ == "Local"


def test_an_exception_that_cannot_be_pickled_still_says_what_happened(call: Call) -> None:
    with pytest.raises(RuntimeError, match="words that survive") as caught:
        call(throw_unpicklable)
    assert isinstance(caught.value, RemoteError)
    assert "Unpicklable" in str(caught.value)
    assert "in throw_unpicklable" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_printed(call: Call) -> None:
    with pytest.raises(RemoteError) as caught:
        call(throw_unprintable)
    assert "Unprintable" in type(caught.value).__name__ + str(caught.value.__cause__)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_would_end_a_process_is_an_ordinary_error_for_the_caller(call: Call, kind: type[BaseException]) -> None:
    with pytest.raises(RemoteError, match=kind.__name__):
        call(throw, kind("bye"))
    with pytest.raises(RemoteError, match=kind.__name__):
        call(throw, kind)


def test_sys_exit_does_not_end_the_callee(call: Call) -> None:
    async def leave() -> None:
        sys.exit(3)

    for function, args in ((sys.exit, (3,)), (leave, ())):
        with pytest.raises(RemoteError, match=r"^SystemExit\(3\) was raised on .*that worker goes on\.") as caught:
            call(function, *args)
        assert "Failed to create" not in str(caught.value)
        assert call(len, "abc") == 3


def test_a_remote_recursion_error(call: Call) -> None:
    def recurse() -> None:
        recurse()

    with pytest.raises(RecursionError):
        call(recurse)


# Functions that return futures.


def test_the_error_of_a_promised_future_is_raised(call: Call) -> None:
    with pytest.raises(ValueError, match="promised words"):
        call(promise_failing, "promised words")


def test_the_error_of_a_promised_call_keeps_its_type(call: Call) -> None:
    with pytest.raises(Custom, match="custom words") as caught:
        call(promise_failing_call, "alone")
    assert caught.value.code == 7


def test_raising_instead_of_promising(call: Call) -> None:
    with pytest.raises(ValueError, match="before there was a future"):
        call(promise_raising)


def test_a_promise_must_be_a_future(call: Call) -> None:
    with pytest.raises(RuntimeError, match=r"must return a torch.futures.Future object, but got builtins.int"):
        call(promise_nothing)


# Values that cannot travel.


def test_an_argument_that_cannot_be_pickled_is_an_error_here_and_now(call: Call) -> None:
    with pytest.raises((TypeError, SerializationError), match="pickle") as caught:
        call(double, threading.Lock())
    assert not isinstance(caught.value, RemoteError)


def test_a_result_that_cannot_be_pickled(call: Call) -> None:
    with pytest.raises((TypeError, SerializationError), match="pickle") as caught:
        call(make_lock)
    assert isinstance(caught.value, RemoteError)


def test_an_argument_that_cannot_be_rebuilt_there(call: Call) -> None:
    with pytest.raises(LookupError, match="cannot be rebuilt") as caught:
        call(double, CannotBeRebuilt())
    assert isinstance(caught.value, RemoteError)


def test_a_result_that_cannot_be_rebuilt_here(call: Call) -> None:
    with pytest.raises((LookupError, SerializationError), match="cannot be rebuilt"):
        call(make_unbuildable)


def test_a_future_is_not_an_argument(call: Call, me: str) -> None:
    future = rpc.rpc_async(me, double, args=(1,))
    with pytest.raises((TypeError, RuntimeError), match=r"pickle|Future"):
        call(double, future)
    future.wait()


def test_a_function_missing_on_the_callee(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("here_today")
    exec("def function(): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "here_today", module)

    class GoneWhenUnpickled:
        def __reduce__(self) -> Any:
            sys.modules.pop("here_today", None)
            return double, (1,)

    with pytest.raises((AttributeError, ModuleNotFoundError), match="does not serialize function code"):
        call(module.function, GoneWhenUnpickled())


def test_generators_cannot_travel_and_say_so(call: Call) -> None:
    with pytest.raises((TypeError, SerializationError), match="generator"):
        call(lambda: (i for i in range(3)))


# Calls that make no sense.


@pytest.mark.parametrize("way", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
@pytest.mark.parametrize("target", [5, "double", None, [double]], ids=["5", "double", "None", "list"])
def test_what_is_not_callable_is_refused(me: str, way: Any, target: Any) -> None:
    with pytest.raises(TypeError, match="function should be callable"):
        way(me, target)


@pytest.mark.parametrize("way", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
@pytest.mark.parametrize("to", ["nobody", 7, rpc.WorkerInfo("nobody", 9), ""], ids=repr)
def test_an_unknown_worker(me: str, way: Any, to: Any) -> None:
    with pytest.raises(WorkerNotFound, match="could not find destination") as caught:
        way(to, double, args=(1,))
    assert isinstance(caught.value, RuntimeError)
    assert "alone" in str(caught.value), "it says who there is"


@pytest.mark.parametrize("to", [None, 1.0, b"alone", ("alone", 0), True], ids=repr)
def test_a_destination_of_the_wrong_type(me: str, to: Any) -> None:
    with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
        rpc.rpc_sync(to, double, args=(1,))


def test_the_id_of_a_destination_may_be_a_number_of_numpys(me: str) -> None:
    where = rpc.WorkerInfo(me, np.int64(rpc.get_worker_info().id))  # type: ignore[arg-type]
    assert rpc.rpc_sync(where, double, args=(4,)) == 8


@pytest.mark.parametrize("args", [5, object()], ids=["int", "object"])
def test_arguments_that_are_no_sequence(me: str, args: Any) -> None:
    with pytest.raises(TypeError):
        rpc.rpc_sync(me, double, args=args)
    assert rpc.rpc_sync(me, double, args=(1,)) == 2


def test_a_wrong_number_of_arguments_is_the_functions_error(call: Call) -> None:
    with pytest.raises(TypeError, match="double"):
        call(double, 1, 2)


@pytest.mark.parametrize("way", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_without_a_worker_every_call_says_so(way: Any) -> None:
    with pytest.raises(NotInitialized, match="RPC has not been initialized") as caught:
        way("alone", double, args=(1,))
    assert isinstance(caught.value, RemoraError)


def test_after_shutdown_every_call_says_so(me: str) -> None:
    rpc.shutdown()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.rpc_sync(me, double, args=(1,))
    with pytest.raises(RuntimeError, match=r"not set|not been initialized"):
        rpc.shutdown()


def test_a_name_that_is_nearly_right_gets_a_suggestion(me: str) -> None:
    with pytest.raises(WorkerNotFound, match=r"among 1 workers \(alone\)\. Did you mean 'alone'\?$"):
        rpc.rpc_sync("alnoe", max, args=(1, 2))
    with pytest.raises(WorkerNotFound) as caught:
        rpc.rpc_sync("trainer", max, args=(1, 2))
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", [5, None, b"w0"])
def test_a_name_that_is_no_text_is_named(name: Any) -> None:
    with pytest.raises(TypeError, match="Worker name must be a str, got"):
        rpc.init_rpc(name, rank=0, world_size=1)
