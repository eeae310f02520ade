"""Aliased anywhere: what arrived is its receiver's alone, by whatever road it came and whatever the receiver does with it.

Every road by which a tensor arrives, crossed with every way to hand on its memory that no count shows: fork, sharing,
queues, numpy, DLPack, storages. Then many later messages of the same sizes, which use the same memory again if anything lets
them. Then the bytes are compared.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing  # teaches pickling to share tensors

from remora import rpc
from tests.processes import targets
from tests.thorough import THOROUGH
from tests.workers import Workers

Check = Callable[[], str]  # what is wrong; empty if nothing is

SIZES = {"inline": 500, "beside": 40_000, "pooled or late": 225_000, "large": 600_000}  # floats
AGAIN = 5 if THOROUGH else 2  # later messages of each size


def same(array: Any, value: float) -> bool:
    """(numpy, not torch, whose threads are not there in a forked child.)"""
    return bool((np.asarray(array) == value).all())


def fork(tensor: torch.Tensor, value: float) -> Check:
    """A child keeps what it had, changes it, and none sees the changes of the other."""
    to_child, to_parent = os.pipe(), os.pipe()
    array = tensor.numpy()
    child = os.fork()
    if child == 0:
        try:
            before = same(array, value)
            array += 1
            os.write(to_parent[1], b"x")
            os.read(to_child[0], 1)
            os._exit(0 if before and same(array, value + 1) else 1)
        finally:
            os._exit(2)
    os.read(to_parent[0], 1)
    seen = same(array, value)
    array[:] = -1.0

    def check() -> str:
        os.write(to_child[1], b"x")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for end in (*to_child, *to_parent):
            os.close(end)
        problem = "" if seen else "the parent saw the child's change "
        return problem if code == 0 else f"{problem}the child's is wrong ({code})"

    return check


def fork_and_keep(tensor: torch.Tensor, value: float) -> Check:
    """The parent keeps its own, too."""
    check_child = fork(tensor, value)
    return lambda: check_child() or ("" if same(tensor.numpy(), -1.0) else "the parent's is wrong")


class Consumer:
    """Another process, at the other end of a connection that shares tensors as queues of torch.multiprocessing do."""

    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                self._consume(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def _consume(self, connection: Any) -> None:
        held: dict[float, torch.Tensor] = {}
        while (got := connection.recv()) is not None:
            if isinstance(got, float):
                connection.send(same(held.pop(got).numpy(), got))
            else:
                value, tensor = got
                held[value] = tensor
                connection.send(True)

    def ask(self, what: Any) -> bool:
        self.connection.send(what)
        assert self.connection.poll(20.0), "the consumer does not answer"
        return bool(self.connection.recv())

    def close(self) -> None:
        self.connection.send(None)
        os.waitpid(self.process, 0)
        self.connection.close()


consumers: list[Consumer] = []


def queue(tensor: torch.Tensor, value: float) -> Check:
    if not consumers:
        consumers.append(Consumer())
    consumer = consumers[0]
    assert consumer.ask((value, tensor))  # it has it
    return lambda: "" if consumer.ask(value) else "the consumer's is wrong"


def share(tensor: torch.Tensor, value: float) -> Check:
    """Others map the memory that torch has moved it to."""
    descriptor, size = tensor.share_memory_().untyped_storage()._share_fd_cpu_()  # type: ignore[attr-defined]
    descriptor = os.dup(descriptor)

    def check() -> str:
        with mmap.mmap(descriptor, size) as mapped:
            os.close(descriptor)
            right = same(np.frombuffer(mapped, dtype=np.float32).copy(), value)
        return "" if right else "what was shared is wrong"

    return check


def keep(what: Callable[[torch.Tensor], Any], array: Callable[[Any], Any]) -> Callable[[torch.Tensor, float], Check]:
    def hold(tensor: torch.Tensor, value: float) -> Check:
        held = what(tensor)
        return lambda: "" if same(array(held), value) else "it is wrong"

    return hold


def change_in_place(tensor: torch.Tensor, value: float) -> Check:
    tensor.add_(1)
    return lambda: "" if same(tensor.numpy(), value + 1) else "it is wrong"


def drop(tensor: torch.Tensor, value: float) -> Check:
    return lambda: ""


def leaf_of(made: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = made.grad_fn.next_functions[0][0].variable  # type: ignore[union-attr]
    return found


DANGERS: dict[str, Callable[[torch.Tensor, float], Check]] = {
    "fork": fork,
    "fork and keep": fork_and_keep,
    "queue": queue,
    "share_memory_": share,
    "kept": keep(lambda tensor: tensor, lambda tensor: tensor.numpy()),
    "numpy": keep(lambda tensor: tensor.numpy()[1:], lambda array: array),
    "memoryview": keep(lambda tensor: memoryview(tensor.numpy()), lambda view: view),
    "storage": keep(lambda tensor: tensor.untyped_storage(), lambda storage: torch.empty(0).set_(storage).numpy()),
    "set_": keep(lambda tensor: torch.empty(0).set_(tensor), lambda tensor: tensor.numpy()),
    "dlpack": keep(torch.utils.dlpack.to_dlpack, lambda capsule: torch.utils.dlpack.from_dlpack(capsule).numpy()),
    "view": keep(lambda tensor: tensor[3:7], lambda view: view.numpy()),
    "history": keep(lambda tensor: tensor.requires_grad_() * 1.0, lambda made: leaf_of(made).detach().numpy()),
    "resize_": keep(lambda tensor: tensor.resize_(100), lambda tensor: tensor.numpy()),
    "in place": change_in_place,
    "drop": drop,
}

checks: dict[str, Check] = {}


def endanger(name: str, danger: str, tensors: list[torch.Tensor], value: float) -> None:
    """Do something dangerous with what arrived here."""
    for index, tensor in enumerate(tensors):
        checks[f"{name} {index}"] = DANGERS[danger](tensor, value + index)


def wrong() -> list[str]:
    """What is not as it should be, of all that was endangered here."""
    found = [f"{name}: {what}" for name, check in checks.items() if (what := check())]
    checks.clear()
    return found


def end() -> None:
    for consumer in consumers:
        consumer.close()
    consumers.clear()


def fill(sizes: list[int], value: float) -> list[torch.Tensor]:
    return [torch.full((size,), value + index) for index, size in enumerate(sizes)]


def traffic(to: str, sizes: list[int]) -> None:
    """Later messages of the same sizes. The memory that they come in is whatever is free."""
    for i in range(AGAIN):
        rpc.rpc_sync(to, targets.echo, args=(fill(sizes, 1000.0 + 10 * i),))


def run_every_danger(to: str, danger: str) -> list[str]:
    """By every road: the callee gets it as an argument, the caller as a result, by reference, and within a list."""
    found: list[str] = []
    value = 0.0
    roads = {name: [size] for name, size in SIZES.items()}
    roads["nested"] = [600_000, 20_000, 225_000, 500]
    for name, sizes in roads.items():
        value += 10.0
        rpc.rpc_sync(to, endanger, args=(f"{danger}, argument, {name}", danger, fill(sizes, value), value))
        result = rpc.rpc_sync(to, fill, args=(sizes, value + 5000))
        endanger(f"{danger}, result, {name}", danger, result, value + 5000)
        result = rpc.remote(to, fill, args=(sizes, value + 7000)).to_here()
        endanger(f"{danger}, to_here, {name}", danger, result, value + 7000)
        del result
        traffic(to, sizes)
    gc.collect()
    found += rpc.rpc_sync(to, wrong)
    found += wrong()
    return found


def start_with(init_method: str, rank: int, **settings: Any) -> None:
    options = rpc.RemoraRpcBackendOptions(init_method=init_method, **settings)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)


@pytest.mark.parametrize("shared_memory", [0, 1 << 28], ids=["socket", "shared"])
def test_what_arrived_is_its_receivers_alone(shared_memory: int) -> None:
    with Workers(2, join=False) as workers:
        method = workers.init_method
        for pending in [workers.start(rank, start_with, method, rank, shared_memory=shared_memory) for rank in (0, 1)]:
            pending.result()
        found = [problem for danger in DANGERS for problem in workers.run(0, run_every_danger, "worker1", danger)]
        workers.run_all(end)
        assert found == []
