"""Exceptions that crossed a wire: type, arguments, attributes, text and story of the original, and never a way out."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import pickle
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora import errors
from remora.errors import RemoteError
from remora.wire import exceptions
from remora.wire.exceptions import RemoteTraceback, describe, dump, load

WORKER = "WorkerInfo(id=1, name=worker1)"


def caught(raiser: Callable[[], Any] | BaseException) -> BaseException:
    """The exception with a traceback, as a callee has it in hand."""
    try:
        if isinstance(raiser, BaseException):
            raise raiser
        raiser()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def there(raiser: Callable[[], Any] | BaseException, worker: str = WORKER) -> Any:
    """The exception as its caller gets it."""
    return load(dump(describe(caught(raiser), worker)))


class Plain(Exception):
    """An exception of the program's."""


class NeedsOther(Exception):
    """Its constructor wants other arguments than it passes on."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class Refusing(Exception):
    """Cannot be constructed from what it was constructed from."""

    def __init__(self, *args: object) -> None:
        if args != ("first time",):
            raise ValueError("not again")


class Changed(Exception):
    def __init__(self, *args: object) -> None:
        super().__init__(*args, "more")


class WithReduce(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b

    def __reduce__(self) -> Any:
        return make_with_reduce, (self.a, self.b)


def make_with_reduce(a: int, b: int) -> WithReduce:
    return WithReduce(a, b)


class Slotted(ValueError):
    __slots__ = ("extra",)


@dataclass
class Data(Exception):
    code: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Frozen(Exception):
    code: int = 0


# The original type, arguments, text.


@pytest.mark.parametrize(
    "original",
    [
        ValueError("boom"),
        ValueError(),
        ValueError("a", 1, None),
        RuntimeError("already a RuntimeError"),
        Exception("the base"),
        ArithmeticError(1),
        KeyError("missing"),
        IndexError(3),
        StopIteration(42),
        StopAsyncIteration(),
        AssertionError(),
        OSError(13, "Permission denied", "/etc/shadow"),
        FileNotFoundError(2, "No such file", "C:\\Users\\é"),
        ConnectionResetError(104, "reset"),
        TimeoutError("late"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range"),
        SyntaxError("bad", ("file.py", 3, 4, "text")),
        ImportError("no", name="mod", path="/p"),
        ModuleNotFoundError("no", name="mod"),
        json.JSONDecodeError("msg", "doc", 1),
        torch.OutOfMemoryError("no memory left"),
        asyncio.InvalidStateError("state"),
        RecursionError("deep"),
        MemoryError(),
        Plain("mine", 2),
        WithReduce(1, 2),
        Slotted("slots"),
        Data(3, "x"),
        Frozen(4),
        errors.CallTimeout("late"),
        errors.WorkerLost("gone"),
        errors.OwnerDied("gone"),
        errors.CallError("some"),
        errors.RemoraError("ours"),
        errors.SerializationError("bytes"),
        errors.RemoteError("remote of remote"),
        ValueError("non-ASCII é 漢字 and a path C:\\Users\\é\\new\n\x00"),
        ValueError(torch.ones(30_000)),
    ],
    ids=lambda e: f"{type(e).__name__}-{len(e.args)}",
)
def test_the_original_arrives(original: Exception) -> None:
    arrived = there(original)
    cls = type(original)
    assert isinstance(arrived, cls)
    assert isinstance(arrived, RemoteError)
    assert isinstance(arrived, RuntimeError)
    assert (type(arrived).__name__, type(arrived).__qualname__) == (cls.__name__, cls.__qualname__)
    assert type(arrived).__module__ == cls.__module__
    assert str(arrived) == str(original)
    assert repr(arrived.args) == repr(original.args)
    assert arrived.worker == WORKER
    for name in (
        "errno",
        "strerror",
        "filename",
        "value",
        "object",
        "start",
        "name",
        "path",
        "lineno",
        "pos",
        "a",
        "code",
    ):
        assert getattr(arrived, name, None) == getattr(original, name, None)
    with pytest.raises(cls):
        raise arrived


def test_attributes_and_notes_arrive() -> None:
    original = Plain("x")
    original.code = [1, torch.arange(30_000)]  # type: ignore[attr-defined]
    original.add_note("by the way: é")
    arrived = there(original)
    assert arrived.code[0] == 1
    assert torch.equal(arrived.code[1], torch.arange(30_000))
    assert arrived.__notes__ == ["by the way: é"]
    assert "by the way: é" in arrived.remote_traceback


def test_notes_arrive_where_the_exception_itself_drops_them() -> None:
    original = WithReduce(1, 2)
    original.add_note("kept")
    assert there(original).__notes__ == ["kept"]


def test_a_story_is_not_sent_twice() -> None:
    arrived = there(ValueError("x"), worker="w" * 10_000)
    failure = describe(arrived, WORKER)
    assert failure.recipe is not None
    assert len(failure.recipe[0]) < 200
    assert len(pickle.dumps(copy.copy(arrived))) < 2 * 10_000 + len(arrived.remote_traceback)


def test_exception_groups() -> None:
    arrived = there(ExceptionGroup("several", [ValueError("a"), ExceptionGroup("inner", [KeyError("b")])]))
    assert isinstance(arrived, ExceptionGroup)
    assert arrived.message == "several"
    matched, rest = arrived.split(KeyError)
    assert matched is not None
    assert rest is not None
    assert "KeyError: 'b'" in arrived.remote_traceback


def test_two_of_a_type_have_one_type() -> None:
    first, second = there(Plain("a")), there(Plain("b"))
    assert type(first) is type(second)


def test_a_local_class_goes_by_value() -> None:
    class Local(ValueError):
        def twice(self) -> str:
            return 2 * str(self)

    arrived = there(Local("x"))
    assert type(arrived).__name__ == "Local"
    assert arrived.twice() == "xx"
    assert isinstance(arrived, ValueError)


def test_made_types_do_not_pile_up() -> None:
    class Local(Exception):
        pass

    alive = weakref.ref(type(there(Local("x"))))
    gc.collect()
    assert alive() is None


# The story.


def fail_deep() -> None:
    try:
        {}["inner"]
    except KeyError as error:
        raise ValueError("outer") from error


def test_the_remote_story_is_the_cause() -> None:
    arrived = there(fail_deep)
    assert isinstance(arrived.__cause__, RemoteTraceback)
    text = str(arrived.__cause__)
    assert text == f"\n{arrived.remote_traceback}"
    for part in (f"On {WORKER}:", "ValueError('outer')", "in fail_deep", "KeyError: 'inner'", "direct cause"):
        assert part in text
    printed = "".join(traceback.format_exception(arrived))
    assert printed.index("in fail_deep") < printed.rindex("ValueError: outer")
    assert printed.rstrip().endswith("ValueError: outer")


def test_every_hop_shows() -> None:
    def second_hop() -> None:
        raise there(fail_deep, "WorkerInfo(id=2, name=worker2)")

    arrived = there(second_hop, "WorkerInfo(id=1, name=worker1)")
    assert isinstance(arrived, ValueError)
    assert str(arrived) == "outer"
    assert arrived.args == ("outer",)
    assert arrived.worker == "WorkerInfo(id=1, name=worker1)"
    text = arrived.remote_traceback
    assert "On WorkerInfo(id=1, name=worker1):" in text
    assert "On WorkerInfo(id=2, name=worker2):" in text
    assert "in fail_deep" in text
    assert "in second_hop" in text
    third = there(arrived, "WorkerInfo(id=0, name=worker0)")
    assert type(third) is type(arrived)
    assert third.remote_traceback.count("\nOn WorkerInfo") + 1 >= 3


@pytest.mark.parametrize("times", [1, 2])
def test_copying_and_pickling_an_arrival(times: int) -> None:
    original = Plain("x", 1)
    original.code = 7  # type: ignore[attr-defined]
    original.add_note("note")
    arrived = there(original)
    for again in (copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))):
        other = arrived
        for _ in range(times):
            other = again(other)
        assert type(other) is type(arrived)
        assert (other.args, other.code, other.worker) == (("x", 1), 7, WORKER)
        assert other.remote_traceback == arrived.remote_traceback
        assert str(other.__cause__) == str(arrived.__cause__)
        assert other.__notes__ == ["note"]


def test_long_stories_are_shortened_in_the_middle() -> None:
    arrived = there(ValueError("a" * 1_000_000 + "end"))
    assert str(arrived) == "a" * 1_000_000 + "end"
    assert len(arrived.remote_traceback) < 200_000
    assert "characters left out" in arrived.remote_traceback
    assert arrived.remote_traceback.endswith("end\n")


def recurse(n: int) -> int:
    return other_recurse(n + 1) + 1


def other_recurse(n: int) -> int:
    return recurse(n + 1) + 1


def test_recursion_errors() -> None:
    arrived = there(lambda: recurse(0))
    assert isinstance(arrived, RecursionError)
    assert "in other_recurse" in arrived.remote_traceback


# What cannot be rebuilt.


def assert_in_words(arrived: Any, *parts: str) -> None:
    assert isinstance(arrived, RemoteError)
    text = str(arrived)
    for part in ("Failed to create original exception type", "Original exception on remote side was", *parts):
        assert part in text
    assert arrived.worker == WORKER
    assert f"On {WORKER}:" in arrived.remote_traceback
    assert isinstance(arrived.__cause__, RemoteTraceback)


def test_a_constructor_that_wants_other_arguments() -> None:
    arrived = there(NeedsOther(5, reason="because"))
    assert str(arrived) == "5: because"
    assert isinstance(arrived, NeedsOther)
    assert (arrived.code, arrived.reason, arrived.args) == (5, "because", ("5: because",))
    again = there(arrived)
    assert isinstance(again, NeedsOther)
    assert (again.code, str(again), str(copy.copy(arrived))) == (5, "5: because", "5: because")


def test_a_constructor_that_wants_other_arguments_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exceptions, "speaks_like_torch", True)  # as under remora.compat
    arrived = there(NeedsOther(5, reason="because"))
    assert_in_words(arrived, "NeedsOther", "5: because", "reason")
    assert isinstance(arrived, NeedsOther)
    assert_in_words(copy.copy(arrived), "NeedsOther")


def test_a_dataclass_made_from_keywords() -> None:
    arrived = there(Data(code=3, detail="x"))
    assert isinstance(arrived, Data)
    assert (arrived.code, arrived.detail) == (3, "x")


def test_a_constructor_that_refuses() -> None:
    original = Refusing("first time")
    original.args = ("second time",)
    assert_in_words(there(original), "Refusing('second time')", "not again")


def test_a_constructor_that_adds_is_followed_as_pickle_does() -> None:
    assert there(Changed("x")).args == ("x", "more", "more")


def test_attributes_that_cannot_be_pickled_are_left_out() -> None:
    original = Plain("x")
    original.lock, original.code = threading.Lock(), 7  # type: ignore[attr-defined]
    arrived = there(original)
    assert isinstance(arrived, Plain)
    assert arrived.code == 7
    assert not hasattr(arrived, "lock")
    assert "cannot be pickled: lock" in arrived.remote_traceback


def test_arguments_that_cannot_be_pickled() -> None:
    assert_in_words(there(Plain("x", threading.Lock())), "Plain('x', <unlocked _thread.lock")


@pytest.fixture
def vanishing() -> Iterator[types.ModuleType]:
    module = types.ModuleType("vanishing")
    exec("class Gone(Exception): ...", module.__dict__)
    sys.modules["vanishing"] = module
    yield module
    sys.modules.pop("vanishing", None)


def test_a_class_that_is_missing_here(vanishing: types.ModuleType) -> None:
    data = dump(describe(caught(vanishing.Gone("text é")), WORKER))
    del vanishing.Gone
    assert_in_words(load(data), "Gone('text é')", "Can't get attribute 'Gone'")


@pytest.mark.parametrize(
    "original", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseException("base")]
)
def test_what_would_end_this_process_does_not(original: BaseException) -> None:
    arrived = there(original)
    assert_ends_nothing(arrived, repr(original))
    assert not isinstance(arrived, SystemExit | KeyboardInterrupt | GeneratorExit | asyncio.CancelledError)


def test_a_group_with_an_interrupt() -> None:
    assert_ends_nothing(there(BaseExceptionGroup("g", [KeyboardInterrupt()])), "BaseExceptionGroup(")


def assert_ends_nothing(arrived: Any, what: str) -> None:
    """It says what was raised where, and nothing of how exceptions are made again."""
    assert type(arrived) is RemoteError
    assert str(arrived).startswith(what)
    assert f" was raised on {WORKER}. It arrives as a RemoteError, because it would end this process" in str(arrived)
    assert "Failed to create" not in str(arrived)
    assert arrived.worker == WORKER
    assert f"On {WORKER}:" in arrived.remote_traceback
    assert isinstance(arrived.__cause__, RemoteTraceback)


class Sealed(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclass of mine")


def test_a_class_that_allows_no_subclass() -> None:
    assert_in_words(there(Sealed("x")), "Sealed('x')", "no subclass of mine")


# `describe` never raises.


class Hostile(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("no pickle")

    @property
    def __notes__(self) -> Any:
        raise ValueError("no notes")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class ReducesToText(Exception):
    def __reduce__(self) -> str:
        return "a name"


def test_hostile_exceptions_are_described() -> None:
    assert_in_words(there(Hostile()), "Hostile")
    assert_in_words(there(ReducesToText("x")), "ReducesToText('x')")
    arrived = there(Unprintable("x"))
    assert isinstance(arrived, Unprintable)
    assert arrived.args == ("x",)
    assert "Unprintable" in arrived.remote_traceback


def test_a_long_chain_is_described() -> None:
    error: BaseException = ValueError("first")
    for i in range(3000):
        following = ValueError(str(i))
        following.__context__ = error
        error = following
    arrived = there(error)
    assert isinstance(arrived, ValueError)
    assert str(arrived) == "2999"


def test_an_exception_that_was_never_raised() -> None:
    assert str(load(dump(describe(ValueError("x"), WORKER)))) == "x"


@given(st.lists(st.text() | st.integers() | st.binary() | st.none(), max_size=4), st.text())
def test_any_arguments_arrive(args: list[object], worker: str) -> None:
    arrived: Any = load(dump(describe(ValueError(*args), worker)))
    assert arrived.args == tuple(args)
    assert str(arrived) == str(ValueError(*args))
    assert arrived.worker == worker
