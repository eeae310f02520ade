"""Values, code, scopes and failures of packing: what arrives, what is refused, and what is taken back."""

from __future__ import annotations

import copyreg
import gc
import math
import pickle
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import SerializationError
from remora.wire import pickler
from remora.wire.pickler import (
    PackScope,
    UnpackScope,
    current_unpack_scope,
    pack,
    register_reducer,
    unpack,
)
from remora.wire.raw_memory import fingerprint, from_bytes, unchanged

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def there(value: Any) -> Any:
    packed = pack(value)
    return unpack(packed.body, [from_bytes(buffer) for buffer in packed.buffers])


# Values.

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple) | st.frozensets(st.integers())
    ),
    max_leaves=30,
)


@given(values)
def test_any_plain_value(value: object) -> None:
    packed = pack(value)
    assert packed.buffers == packed.keepalive == packed.tensors == []
    assert unpack(packed.body) == value
    assert unpack(memoryview(packed.body + b"what follows the pickle does not matter")) == value


def test_large_values_of_many_frames() -> None:
    value = {"bytes": b"x" * 300_000, "list": list(range(50_000)), "text": "é" * 100_000}
    assert there(value) == value
    assert there(1) == 1


def test_identity_within_a_message() -> None:
    shared: list[object] = []
    shared.append(shared)
    a, b = there((shared, shared))
    assert a is b
    assert a[0] is a


@dataclass
class Point:
    x: int
    tensor: torch.Tensor


def test_objects_with_tensors_inside() -> None:
    arrived = there([Point(1, torch.ones(3)), Point(2, torch.zeros(50_000))])
    assert (arrived[0].x, arrived[1].x) == (1, 2)
    assert torch.equal(arrived[0].tensor, torch.ones(3))
    assert torch.equal(arrived[1].tensor, torch.zeros(50_000))


# Buffers of other types.


@pytest.mark.parametrize("size", [3, 100_000])
def test_numpy_arrays_beside_tensors(size: int) -> None:
    first, second = np.arange(size), np.arange(size, dtype="f4").reshape(1, -1)
    sent = [first, torch.arange(size), second, torch.full((size,), 2), "x", np.asfortranarray(np.ones((2, size)))]
    arrived = there(sent)
    for a, s in zip(arrived, sent, strict=True):
        assert type(a) is type(s)
        assert (a == s) is True if isinstance(s, str) else bool((a == s).all())
    arrived[0][0] = 7  # writable
    assert first[0] == 0
    packed = pack(first)
    assert len(packed.buffers) == (size > 3)
    assert unchanged(packed, fingerprint(packed)) == (size == 3), "nobody counts the writes to an array"


def test_a_numpy_array_outlives_the_message() -> None:
    packed = pack(np.arange(10_000))
    storage = from_bytes(packed.buffers[0])
    alive = weakref.ref(storage)
    arrived = unpack(packed.body, [storage])[5:]
    del storage
    gc.collect()
    assert alive() is not None
    assert arrived[0] == 5
    del arrived
    gc.collect()
    assert alive() is None


def test_a_read_only_buffer_stays_read_only() -> None:
    array = np.arange(10_000)
    array.flags.writeable = False
    assert not there(array).flags.writeable
    assert bytes(there(pickle.PickleBuffer(b"x" * 10_000))) == b"x" * 10_000


# Code.


def by_name(x: int) -> int:
    return x + 1


class Adder:
    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, x: int) -> int:
        return x + self.n

    @classmethod
    def make(cls) -> Adder:
        return cls(1)

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x


def test_what_has_a_name_goes_by_name() -> None:
    for code in (by_name, Adder, Adder.twice, Adder.__call__, math.sin, len, int, threading.Thread, torch.nn.Linear):
        assert there(code) is code
        assert len(pack(code).body) < 150
    assert there(Adder.make)().n == 1
    assert there(Adder(3).__call__)(1) == 4


def test_what_has_a_name_goes_by_name_also_next_to_code_without_one() -> None:
    nameless = lambda x: x  # noqa: E731
    named, arrived, cls = there((by_name, nameless, Adder))
    assert named is by_name
    assert cls is Adder
    assert arrived(5) == 5


def test_code_of_the_main_program_goes_by_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> None: ...

    function.__module__, function.__qualname__ = "__main__", "a_function_of_main"
    monkeypatch.setattr(sys.modules["__main__"], "a_function_of_main", function, raising=False)
    assert there((function, lambda: 0))[0] is function


def test_torch_functions_and_operators() -> None:
    functions = [torch.add, torch.ones, torch.Tensor.add_, torch.nn.functional.gelu, torch.fft.fft, torch.relu_]
    operators = [torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.ops.aten.relu.default]
    for code in functions + operators:
        assert there(code) is code
    assert there(torch.ones(2).add)(1).tolist() == [2, 2]


def test_code_without_a_name_goes_by_value() -> None:
    offset = torch.full((30_000,), 2.0)
    captured = [1]

    def local(x: torch.Tensor) -> torch.Tensor:
        captured.append(2)
        return x + offset

    class Local:
        def value(self) -> int:
            return 42

    function, instance, cls = there((local, Local(), Local))
    assert torch.equal(function(torch.ones(1)), torch.full((30_000,), 3.0))
    assert instance.value() == cls().value() == 42
    assert type(instance) is cls
    assert len(pack(local).buffers) == 1, "the tensor it closes over is not in the pickle"
    assert captured == [1]


def test_code_by_value_can_be_refused() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pack(lambda: 0, by_value=False)


def test_script_modules() -> None:
    scripted = torch.jit.script(torch.nn.Linear(200, 200))
    traced = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
    holder = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2)))
    packed = pack(scripted)
    assert len(packed.buffers) == 1
    assert unchanged(packed, fingerprint(packed)), "an archive is nobody else's"
    for module, x in ((scripted, torch.ones(200)), (traced, torch.ones(2)), (holder, torch.ones(2))):
        assert torch.equal(there(module)(x), module(x))


@torch.jit.script
def scripted_function(x: torch.Tensor) -> torch.Tensor:
    return x


# What cannot be packed.


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (torch.futures.Future(), RuntimeError, "Can not pickle torch.futures.Future"),
        (scripted_function, pickle.PickleError, "ScriptFunction cannot be pickled"),
        (threading.Lock(), TypeError, "cannot pickle '_thread.lock' object"),
        ((i for i in ()), TypeError, "cannot pickle 'generator' object"),
        ([lambda: 0, threading.Lock()], TypeError, "cannot pickle '_thread.lock' object"),
        (lambda lock=threading.Lock(): lock, TypeError, "cannot pickle '_thread.lock' object"),
    ],
)
def test_what_cannot_be_packed_says_so_itself(value: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        pack(value)
    assert not isinstance(caught.value, SerializationError)
    assert there([1]) == [1]


def test_the_second_obstacle_is_told_with_the_first_as_its_cause() -> None:
    with pytest.raises(TypeError) as caught:
        pack([lambda: 0, threading.Lock()])
    assert "lambda" in str(caught.value.__cause__)
    with pytest.raises(TypeError) as caught:
        pack(threading.Lock())
    assert caught.value.__cause__ is None


class Refuses:
    def __reduce__(self) -> Any:
        raise KeyError("not today")


def test_errors_of_the_program_pass_unchanged() -> None:
    with pytest.raises(KeyError, match="not today"):
        pack((torch.ones(50_000), Refuses()))


def test_nothing_is_held_after_a_failure() -> None:
    tensor = torch.ones(50_000)
    alive = weakref.ref(tensor)
    with pytest.raises(KeyError):
        pack((tensor, Refuses()))
    del tensor
    gc.collect()
    assert alive() is None


def test_nothing_is_held_after_success() -> None:
    small, large, plain = torch.ones(3), torch.ones(50_000), Adder(1)
    alive = [weakref.ref(value) for value in (small, large, plain)]
    packed = pack((small, large, plain))
    del small, plain
    assert alive[0]() is alive[2]() is None
    del large, packed
    assert alive[1]() is None


# What is missing on this side.


@pytest.fixture
def vanishing() -> Iterator[types.ModuleType]:
    module = types.ModuleType("vanishing")
    exec("def function(): ...", module.__dict__)
    sys.modules["vanishing"] = module
    yield module
    sys.modules.pop("vanishing", None)


def test_a_missing_function_is_explained(vanishing: types.ModuleType) -> None:
    body = pack(vanishing.function).body
    del vanishing.function
    with pytest.raises(AttributeError, match=r"function.*RPC pickler does not serialize function code") as caught:
        unpack(body)
    assert "Ensure that UDFs are defined on both caller and callee modules." in str(caught.value)


def test_a_missing_module_is_explained(vanishing: types.ModuleType) -> None:
    body = pack(vanishing.function).body
    del sys.modules["vanishing"]
    with pytest.raises(ModuleNotFoundError, match=r"vanishing.*RPC pickler does not serialize function code") as caught:
        unpack(body)
    assert caught.value.name == "vanishing"


class Stubborn:
    def __setstate__(self, state: object) -> None:
        raise AttributeError("an error of its own")


def test_other_errors_are_not_explained_away() -> None:
    sent = Stubborn()
    sent.x = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"^an error of its own$"):
        there(sent)


# Scopes and registered reducers.


class Counted:
    """Packing one has a side effect, which an undo takes back."""

    outstanding: list[object] = []

    def __init__(self, name: str = "") -> None:
        self.name = name


def reduce_counted(obj: Counted, scope: PackScope) -> Any:
    token = (obj.name, scope.peer)
    Counted.outstanding.append(token)
    scope.attachments.append(token)
    scope.undo.append(lambda: Counted.outstanding.remove(token))
    return rebuild_counted, (obj.name,)


def rebuild_counted(name: str) -> Any:
    return name, current_unpack_scope()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    known = dict(pickler._registered)
    register_reducer(Counted, reduce_counted)
    Counted.outstanding.clear()
    yield
    pickler._registered.clear()
    pickler._registered.update(known)
    pickler._idle.clear()


def test_a_reducer_sees_the_scope() -> None:
    scope = PackScope(peer="worker1")
    packed = pack([Counted("a"), Counted("b")], scope)
    assert Counted.outstanding == [("a", "worker1"), ("b", "worker1")]
    assert len(scope.undo) == 2
    scope.roll_back()
    assert Counted.outstanding == []
    arriving = UnpackScope(peer="worker0")
    assert unpack(packed.body, (), arriving) == [("a", arriving), ("b", arriving)]


def test_a_reducer_without_a_scope_gets_an_empty_one() -> None:
    assert unpack(pack(Counted("a")).body) == ("a", None)
    assert Counted.outstanding == [("a", None)]


def test_the_first_registration_wins() -> None:
    assert not register_reducer(Counted, lambda obj, scope: (str, ("second",)))
    assert register_reducer(Counted, reduce_counted)
    assert not register_reducer(torch.Tensor, reduce_counted)
    assert there(Counted("x"))[0] == "x"


class Late:
    """Gets its reducer while a message is being packed."""


class Registers:
    def __reduce__(self) -> Any:
        register_reducer(Late, lambda obj, scope: (str, ("late",)))
        return str, ("registered",)


def test_a_registration_reaches_picklers_in_use() -> None:
    assert there(Registers()) == "registered"
    assert there(Late()) == "late"


class Foreign:
    """Gets its reducer from `copyreg`, and then another."""


def test_copyreg_is_respected_at_any_time() -> None:
    try:
        for answer in ("first", "second"):
            copyreg.pickle(Foreign, lambda obj, answer=answer: (str, (answer,)))  # type: ignore[arg-type]
            assert there(Foreign()) == answer  # by a pickler that the next round finds idle
        assert there([Foreign(), lambda: 0])[0] == "second"
    finally:
        del copyreg.dispatch_table[Foreign]


@pytest.mark.parametrize("obstacle", [Refuses(), threading.Lock(), (i for i in ()), torch.futures.Future()])
@pytest.mark.parametrize("given", [True, False])
def test_a_failure_takes_everything_back(obstacle: object, given: bool) -> None:
    scope = PackScope("worker1") if given else None
    with pytest.raises((KeyError, TypeError, RuntimeError)):
        pack([Counted("a"), Counted("b"), obstacle], scope)
    assert Counted.outstanding == []
    assert scope is None or scope.undo == scope.attachments == []


def test_the_plain_attempt_is_taken_back_before_the_one_by_value() -> None:
    scope = PackScope()
    pack([Counted("a"), lambda: 0], scope)
    assert Counted.outstanding == scope.attachments == [("a", None)]
    assert len(scope.undo) == 1


def test_undos_run_last_first_and_leave_earlier_ones_alone() -> None:
    order: list[int] = []
    scope = PackScope()
    scope.undo.append(lambda: order.append(0))

    class Traced:
        def __init__(self, number: int) -> None:
            self.number = number

    def reduce_traced(obj: Traced, scope: PackScope) -> Any:
        scope.undo.append(lambda: order.append(obj.number))
        return str, ("x",)

    register_reducer(Traced, reduce_traced)
    with pytest.raises(KeyError):
        pack([Traced(1), Traced(2), Refuses()], scope)
    assert order == [2, 1]
    assert len(scope.undo) == 1


def test_an_undo_that_raises_is_noted_and_does_not_stop_the_others() -> None:
    scope, undone = PackScope(), []

    class Bad:
        pass

    def reduce_bad(obj: Bad, scope: PackScope) -> Any:
        scope.undo.extend([lambda: undone.append(1), lambda: 1 // 0])  # type: ignore[list-item,return-value]
        return str, ("x",)

    register_reducer(Bad, reduce_bad)
    with pytest.raises(KeyError) as caught:
        pack([Bad(), Refuses()], scope)
    assert undone == [1]
    assert "ZeroDivisionError" in caught.value.__notes__[0]


# Nesting and threads.


class Nests:
    """Packs while it is being packed, unpacks while it is being unpacked."""

    def __reduce__(self) -> Any:
        inner = pack((Counted("inner"), torch.arange(50_000)), PackScope("inner peer"))
        return rebuild_nests, (inner.body, [bytes(buffer) for buffer in inner.buffers], Counted("outer"))


def rebuild_nests(body: bytes, buffers: list[bytes], outer: object) -> Any:
    scope = current_unpack_scope()
    inner = unpack(body, [from_bytes(buffer) for buffer in buffers], UnpackScope("inner"))
    assert current_unpack_scope() is scope
    return inner, outer


def test_packing_and_unpacking_nest() -> None:
    packed = pack([Nests(), torch.arange(60_000)], PackScope("outer peer"))
    assert sorted(Counted.outstanding) == [("inner", "inner peer"), ("outer", "outer peer")]
    arriving = UnpackScope("outer")
    ((inner_name, inner_scope), tensor), (outer_name, outer_scope) = unpack(
        packed.body, [from_bytes(buffer) for buffer in packed.buffers], arriving
    )[0]
    assert (inner_name, inner_scope.peer, outer_name, outer_scope) == ("inner", "inner", "outer", arriving)
    assert torch.equal(tensor, torch.arange(50_000))
    assert current_unpack_scope() is None


def test_a_failing_unpack_restores_the_scope() -> None:
    sent = Stubborn()
    sent.x = 1  # type: ignore[attr-defined]
    body = pack(sent).body
    with pytest.raises(AttributeError):
        unpack(body, (), UnpackScope())
    assert current_unpack_scope() is None


def test_many_threads_at_once() -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        for i in range(100):
            sent = (number, i, torch.full((4,), float(i)), torch.full((30_000,), float(number)), Counted(str(number)))
            packed = pack(sent, PackScope(number))
            arriving = UnpackScope(number)
            n, j, small, large, (name, scope) = unpack(packed.body, [from_bytes(b) for b in packed.buffers], arriving)
            if (n, j, name, scope) != (number, i, str(number), arriving) or small[0] != i or large[-1] != number:
                failures.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_garbage_collection_in_a_destructor_does_no_harm_to_the_pickler() -> None:
    """In a process of its own: what is guarded against is a crash."""
    program = """
import gc
from remora.wire.pickler import pack

gc.freeze()  # or each collection looks at all of torch once more

class Temporary:
    def __reduce__(self):
        return list, ()
    def __del__(self):
        junk = [bytes(k) for k in range(200)]
        gc.collect()

class Value:
    def __reduce__(self):
        return list, ([Temporary() for _ in range(3)],)

for _ in range(20):
    pack([Value()])
print("survived")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "survived"), done.stderr
