"""A program as a user of the wheel writes it, for mypy to read; it is not run. See test_types.py.

mypy must find the error that a line ends with, and no other.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch

import remora
from remora import rpc
from remora.rpc.functions import async_execution
from remora.supervision import Supervisor


def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


def total(*numbers: int) -> int:
    return sum(numbers)


def named(number: int, *, name: str) -> str:
    return name * number


def nothing() -> None:
    pass


async def later(number: int) -> str:
    return str(number)


@async_execution
def chained(number: int) -> torch.futures.Future[bytes]:
    return rpc.rpc_async("other", bytes, args=(number,))


def unknown(x, y):  # type: ignore[no-untyped-def]
    return x + y


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count


x = torch.ones(2)
version: str = remora.__version__

# What a call returns is what its function returns, or answers with when it is done.
assert_type(rpc.rpc_sync("other", scale, args=(x,)), torch.Tensor)
assert_type(rpc.rpc_sync("other", scale, args=(x, 3.0), timeout=5), torch.Tensor)
assert_type(rpc.rpc_sync(1, scale, (x,), kwargs={"by": 3.0}), torch.Tensor)
assert_type(rpc.rpc_sync("other", named, kwargs={"number": 1, "name": "a"}), str)
assert_type(rpc.rpc_sync("other", total, args=(1, 2, 3)), int)
assert_type(rpc.rpc_sync("other", total, args=[1, 2]), int)
assert_type(rpc.rpc_sync("other", total), int)
assert_type(rpc.rpc_sync("other", later, args=(1,)), str)
assert_type(rpc.rpc_sync("other", later, kwargs={"number": 1}), str)
assert_type(rpc.rpc_sync("other", chained, args=(1,)), bytes)
assert_type(rpc.rpc_sync("other", lambda: 1), int)
assert_type(rpc.rpc_sync("other", torch.add, args=(x, 1)), torch.Tensor)
assert_type(rpc.rpc_sync("other", torch.zeros, args=(2, 3)), torch.Tensor)
assert_type(rpc.rpc_sync("other", max, args=(3, 4)), int)
assert_type(rpc.rpc_sync("other", unknown, args=(1, 2)), Any)
rpc.rpc_sync("other", nothing)

assert_type(rpc.rpc_async("other", scale, args=(x,)), rpc.Future[torch.Tensor])
assert_type(rpc.rpc_async("other", later, args=(1,)).wait(), str)
assert_type(rpc.rpc_async("other", total).then(lambda done: str(done.value())), rpc.Future[str])
assert_type(rpc.rpc_async("other", total, args=(1,)).result(), int)


async def use_await() -> None:
    assert_type(await rpc.rpc_async("other", total, args=(1,)), int)
    assert_type(await counter, Counter)


# References.
counter = rpc.remote("other", Counter, args=(0,))
assert_type(counter, rpc.RRef[Counter])
assert_type(counter.to_here(), Counter)
assert_type(counter.rpc_sync().add(1), int)
assert_type(counter.rpc_async().add(1), rpc.Future[Any])
assert_type(counter.remote().add(1), rpc.RRef[Any])
assert_type(rpc.RRef(x).local_value(), torch.Tensor)

# Options.
rpc.init_rpc(
    "worker0",
    rank=0,
    world_size=2,
    rpc_backend_options=rpc.RemoraRpcBackendOptions(num_worker_threads=8, host="localhost", heartbeat=0.5, watch=3),
)

# What mypy must object to.
rpc.rpc_sync("other", scale, args=("x",))  # error: arg-type
rpc.rpc_sync("other", scale, args=(x, 1.0, 2))  # error: arg-type
rpc.rpc_sync("other", scale)  # error: arg-type
rpc.rpc_sync("other", scale, args=x)  # error: call-overload
rpc.rpc_sync("other", total, args=5)  # error: call-overload
rpc.rpc_sync("other", named, args=(1,))  # error: arg-type
rpc.rpc_sync("other", later, args=("x",))  # error: arg-type
rpc.rpc_sync("other", Counter, args=("x",))  # error: arg-type
rpc.rpc_sync("other", 5)  # error: call-overload
rpc.rpc_sync(2.5, total)  # error: call-overload
rpc.rpc_async("other", scale, args=("x",))  # error: arg-type
rpc.remote("other", Counter, args=("x",))  # error: arg-type
wrong: str = rpc.rpc_sync("other", total, args=(1,))  # error: assignment
wrong = rpc.rpc_async("other", total, args=(1,)).wait()  # error: assignment
wrong = rpc.rpc_sync("other", later, args=(1,)).strip(1)  # error: arg-type
counter.rpc_sync().add("x")  # error: arg-type
counter.rpc_sync().subtract(1)  # error: attr-defined
counter.to_here().add("x")  # error: arg-type
rpc.RemoraRpcBackendOptions(colour="red")  # error: call-arg
rpc.RemoraRpcBackendOptions(heartbeat="soon")  # error: arg-type
rpc.no_such_name()  # error: attr-defined
Supervisor(restart="some")  # error: arg-type
