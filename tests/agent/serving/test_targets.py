"""What can be called on another worker, and how it is named there."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from remora import rpc
from remora.rpc import WorkerInfo


def double(x: int, plus: int = 0) -> int:
    return 2 * x + plus


def running_on_pool() -> bool:
    return threading.current_thread().name.startswith("remora-")


class Counter:
    made = 0

    def __init__(self, start: int = 0) -> None:
        self.n = start

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @staticmethod
    def triple(x: int) -> int:
        return 3 * x

    def __call__(self, x: int) -> int:
        return self.n * x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.n == self.n

    class Inner:
        @staticmethod
        def depth() -> int:
            return 2


@torch.jit.script
def scripted(x: torch.Tensor, k: int) -> torch.Tensor:
    return x * k + 1


@rpc.functions.async_execution
def promised(x: int) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(x + 1)
    return future


class Promises:
    @staticmethod
    @rpc.functions.async_execution
    def static(x: int) -> torch.futures.Future[int]:
        return promised(x)

    @classmethod
    @rpc.functions.async_execution
    def on_class(cls, x: int) -> torch.futures.Future[str]:
        return rpc.rpc_async("alone", double, args=(x,)).then(lambda done: f"{cls.__name__} {done.value()}")

    @rpc.functions.async_execution
    def bound(self, x: int) -> torch.futures.Future[int]:
        return promised(x)


def make_closure(k: int) -> Callable[[int], int]:
    return lambda x: x * k


Call = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, me: str) -> Call:
    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        if request.param == "sync":
            return rpc.rpc_sync(me, func, args=args, kwargs=kwargs)
        return rpc.rpc_async(me, func, args=args, kwargs=kwargs).wait()

    return run


def test_a_function_runs_on_a_thread_of_the_callee(call: Call) -> None:
    assert call(double, 4) == 8
    assert call(double, 4, plus=1) == 9
    assert call(running_on_pool)


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (len, ([1, 2],), 2),
        (operator.add, (1, 2), 3),
        (str.upper, ("é",), "É"),
        (int.__add__, (1, 2), 3),
        (print, (), None),
    ],
)
def test_builtin_functions_and_methods(call: Call, function: Any, args: tuple[Any, ...], expected: object) -> None:
    assert call(function, *args) == expected


@pytest.mark.parametrize("function", [torch.add, torch.Tensor.add, torch.ops.aten.add, torch.ops.aten.add.Tensor])
def test_torch_operators(call: Call, function: Any) -> None:
    assert torch.equal(call(function, torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))


def test_a_torch_operator_with_keyword_arguments(call: Call) -> None:
    assert torch.equal(call(torch.add, torch.ones(2), torch.ones(2), alpha=3), torch.full((2,), 4.0))


def test_a_torch_operator_that_refuses_its_arguments_says_so(call: Call) -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        call(torch.add, torch.ones(2), torch.ones(3))
    assert call(double, 1) == 2


@pytest.mark.parametrize("how", ["call", "remote"])
def test_what_torchscript_has_its_own_version_of_is_still_pythons(me: str, call: Call, how: str) -> None:
    run = call if how == "call" else lambda f, *args, **kwargs: rpc.remote(me, f, args, kwargs).to_here()
    assert run(math.factorial, 25) == math.factorial(25)
    with pytest.raises(ValueError, match="math domain error"):
        run(math.sqrt, -1)
    assert run(dict, a=1) == {"a": 1}
    largest = run(torch.topk, torch.arange(4.0), 2)
    assert (largest.values.tolist(), largest.indices.tolist()) == ([3.0, 2.0], [3, 2])
    assert run(torch.einsum, "i,i", torch.ones(2), torch.ones(2)).item() == 2
    with pytest.raises(TypeError, match="must be Tensor, not str"):  # as a call here would
        run(torch.relu, "x")


def test_an_unbound_method_gets_its_self_from_the_arguments(call: Call) -> None:
    assert call(Counter.add, Counter(1), 2) == 3


def test_a_bound_method_works_on_a_copy_of_its_object(call: Call) -> None:
    counter = Counter(1)
    assert call(counter.add, 2) == 3
    assert counter.n == 1


def test_a_class_is_called_and_its_instance_sent_back(call: Call) -> None:
    assert call(Counter, 5) == Counter(5)


def test_class_static_and_nested_methods(call: Call) -> None:
    assert call(Counter.named) == "Counter"
    assert call(Counter.triple, 4) == 12
    assert call(Counter.Inner.depth) == 2


def test_callable_objects_and_partials(call: Call) -> None:
    assert call(Counter(7), 6) == 42
    assert call(functools.partial(double, plus=1), 3) == 7
    assert call(functools.partial(Counter(7)), 6) == 42
    assert call(functools.partial(torch.add, alpha=2), torch.zeros(1), torch.ones(1)).item() == 2


def test_a_module_is_called(call: Call) -> None:
    layer = torch.nn.Linear(2, 1)
    sample = torch.ones(3, 2)
    assert torch.equal(call(layer, sample).detach(), layer(sample).detach())


def test_a_scripted_function_is_found_by_its_name(call: Call) -> None:
    assert torch.equal(call(scripted, torch.ones(2), 3), torch.full((2,), 4.0))


def test_a_scripted_module_is_called(call: Call) -> None:
    scripted_layer = torch.jit.script(torch.nn.ReLU())
    assert call(scripted_layer, torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_lambdas_and_closures_travel_by_value(call: Call) -> None:
    assert call(lambda x: x + 1, 1) == 2
    assert call(make_closure(5), 6) == 30
    offset = [10]
    assert call(lambda: offset[0]) == 10


def test_a_closure_over_a_tensor(call: Call) -> None:
    weight = torch.arange(4.0)
    assert call(lambda x: (weight * x).sum().item(), 2.0) == 12.0


def test_a_local_function_may_call_itself(call: Call) -> None:
    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    assert call(factorial, 10) == 3628800


def test_instances_of_a_local_class_go_both_ways(call: Call) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def moved(self) -> Point:
            return Point(self.x + 1)

    assert call(Point(1).moved).x == 2
    assert call(Point.moved, Point(2)).x == 3
    assert call(Point, 4).x == 4


def test_a_lambda_as_result_can_be_called_here(call: Call) -> None:
    assert call(make_closure, 3)(4) == 12


def test_functions_marked_as_asynchronous(call: Call) -> None:
    assert call(promised, 1) == 2
    assert call(Promises.static, 2) == 3
    assert call(Promises.on_class, 3) == "Promises 6"
    assert call(Promises().bound, 4) == 5


def test_the_functions_of_rpc_itself(call: Call) -> None:
    assert call(rpc.is_available) is True
    assert call(rpc.get_worker_info) == WorkerInfo("alone", 0)
    assert call(rpc.rpc_sync, "alone", double, (1,)) == 2


@pytest.mark.parametrize("to", ["alone", 0, WorkerInfo("alone", 0)], ids=["name", "id", "WorkerInfo"])
def test_a_destination_is_a_name_an_id_or_a_worker_info(me: str, to: Any) -> None:
    assert rpc.rpc_sync(to, double, args=(1,)) == 2
    assert rpc.rpc_async(to, double, args=(1,)).wait() == 2


def test_arguments_are_none_a_tuple_or_a_list(me: str) -> None:
    assert rpc.rpc_sync(me, Counter) == Counter(0)
    assert rpc.rpc_sync(me, Counter, args=None, kwargs=None) == Counter(0)
    assert rpc.rpc_sync(me, double, args=(2,)) == 4
    assert rpc.rpc_sync(me, double, args=[2], kwargs={"plus": 1}) == 5


def test_arguments_are_copies_even_in_one_process(me: str) -> None:
    def append(items: list[int]) -> list[int]:
        items.append(4)
        return items

    mine = [1, 2, 3]
    assert rpc.rpc_sync(me, append, args=(mine,)) == [1, 2, 3, 4]
    assert mine == [1, 2, 3]


def test_an_object_that_occurs_twice_in_a_call_is_one_object_there(me: str) -> None:
    shared: list[int] = []
    assert rpc.rpc_sync(me, operator.is_, args=(shared, shared)) is True
