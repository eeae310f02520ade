"""A short program of two workers that takes every fast path, run by `tests.fast_path_server` with some turned off."""

from __future__ import annotations

import dataclasses
import os

import torch

from remora import autograd, rpc
from remora.optim import DistributedOptimizer
from remora.options import FAST_PATHS

LARGE = 1_000_000  # bytes: in shared memory, filled late
LARGER = 4_000_000  # … and filled before it is sent


def run(folder: str) -> list[str]:
    """On both workers; worker0 returns the names of the fast paths that were off, if all results were right."""
    child = os.fork()  # before any thread is started
    rank = 0 if child else 1
    options = rpc.RemoraRpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=60)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        make_calls()
        use_references()
        train()
    rpc.shutdown()
    if rank == 1:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return [name for name, on in dataclasses.asdict(FAST_PATHS).items() if not on]


def make_calls() -> None:
    """Without arguments, with arguments of all sizes, one at a time and many at once."""
    for _ in range(20):
        assert rpc.rpc_sync("worker1", nothing) is None
        assert rpc.rpc_sync("worker1", add, args=(1, 2)) == 3
        assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(4), torch.ones(4))), torch.full((4,), 2.0))
    assert rpc.rpc_sync("worker1", descend, args=(6,)) == 6
    nested = {"batch": [torch.arange(3.0), (torch.ones(2), "text")], "more": {"mask": torch.zeros(2, dtype=torch.bool)}}
    came = rpc.rpc_sync("worker1", same, args=(nested,), kwargs={})
    assert torch.equal(came["batch"][0], torch.arange(3.0))
    assert came["batch"][1][1] == "text"
    for size in (100, LARGE, LARGER):
        sent = torch.arange(size, dtype=torch.int32).to(torch.uint8)
        for _ in range(3):
            assert torch.equal(rpc.rpc_sync("worker1", same, args=(sent,)), sent)
    under_way = [rpc.rpc_async("worker1", add, args=(n, 1)) for n in range(200)]
    for n in range(200):  # 200 are kept in flight
        assert under_way[n].wait() == n + 1
        under_way.append(rpc.rpc_async("worker1", nothing))
    assert torch.futures.wait_all(under_way[200:]) == [None] * 200


def use_references() -> None:
    for n in range(20):
        value = rpc.remote("worker1", add, args=(n, n))
        assert value.to_here() == 2 * n
        assert rpc.rpc_sync("worker1", value_of, args=(value,)) == 2 * n
    words = rpc.remote("worker1", list, args=("words",))
    assert words.rpc_sync().count("w") == 1
    own = rpc.RRef(torch.ones(3))
    assert torch.equal(rpc.rpc_sync("worker1", fetched, args=(own,)), torch.ones(3))


def train() -> None:
    """The gradients of one process, and its parameters after a step; with one call, and with one that calls back."""
    weight = rpc.remote("worker1", make_parameter)
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
    expected = torch.ones(2, requires_grad=True)
    batch = torch.tensor([1.0, 2.0])
    for function in (multiply, multiply, multiply_and_return, multiply_and_return):
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("worker1", function, args=(weight, batch)).sum()])
            optimizer.step(context)
        (expected * batch).sum().backward()
        with torch.no_grad():
            assert expected.grad is not None
            expected -= 0.5 * expected.grad
        expected.grad = None
        assert torch.equal(weight.to_here().detach(), expected.detach())


def nothing() -> None:
    pass


def add(a: int, b: int) -> int:
    return a + b


def same(value: object) -> object:
    return value


def descend(depth: int) -> int:
    """Calls back and forth."""
    me = rpc.get_worker_info().id
    return 0 if depth == 0 else 1 + rpc.rpc_sync(1 - me, descend, args=(depth - 1,))


def value_of(reference: rpc.RRef[int]) -> int:
    return reference.local_value()


def fetched(reference: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return reference.to_here()


def make_parameter() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def multiply(weight: rpc.RRef[torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return weight.local_value() * batch


def multiply_and_return(weight: rpc.RRef[torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """The product goes to the caller and back before it is returned."""
    returned: torch.Tensor = rpc.rpc_sync("worker0", torch.clone, args=(multiply(weight, batch),))
    return returned
