"""Forked anywhere: a fork at lines all over a call. The child has its tensors, and the parent's call and connections go on.

Each child looks at what its parent had received before, changes it, and ends. Some wait until the parent has dropped its own
and received many others in the same memory.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from remora import rpc
from tests.processes import targets
from tests.workers import Workers

HELD = {"late": 60_000, "large": 600_000}  # floats
EVERY = int(os.environ.get("REMORA_FORK_EVERY", "8"))  # 1: at every line, which takes a minute
OURS = os.sep + "remora" + os.sep


class Forks:
    """Forks at lines of our code that the main thread runs."""

    def __init__(self, held: dict[float, Any]) -> None:
        self.held = held
        self.children: list[int] = []
        self.seen: set[tuple[str, int]] = set()
        self.wait_here, self.go_on = os.pipe()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if OURS not in place[0]:
            return None
        if event == "line" and place not in self.seen:
            self.seen.add(place)
            if len(self.seen) % EVERY == 0:
                self.fork(patient=len(self.children) % 8 == 0)
        return self.trace

    def fork(self, patient: bool) -> None:
        child = os.fork()
        if child:
            self.children.append(child)
            return
        try:
            os.close(self.go_on)
            for array in self.held.values():
                array += 1.0
            if patient:
                os.read(self.wait_here, 1)  # until the parent closes its end
            os._exit(0 if all((array == value + 1.0).all() for value, array in self.held.items()) else 1)
        finally:
            os._exit(2)

    def end(self) -> list[int]:
        """The exit codes of the children that found something wrong."""
        os.close(self.wait_here)
        os.close(self.go_on)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in self.children]
        return [code for code in codes if code]


def call_and_fork(to: str, size: int) -> tuple[int, list[int], bool]:
    """(how often it was forked, what children found wrong, whether all was right here)."""
    kept = {float(i): rpc.rpc_sync(to, fill, args=(floats, float(i))) for i, floats in enumerate(HELD.values())}
    forks = Forks({value: tensor.numpy() for value, tensor in kept.items()})
    sent = torch.arange(size, dtype=torch.float32)
    sys.settrace(forks.trace)
    try:
        back = rpc.rpc_sync(to, targets.echo, args=(sent,))
    finally:
        sys.settrace(None)
    right = np.array_equal(back.numpy(), sent.numpy())
    right = right and all(bool((array == value).all()) for value, array in forks.held.items())
    kept.clear()
    forks.held.clear()
    for i in range(6):
        for floats in HELD.values():
            right = right and bool((rpc.rpc_sync(to, fill, args=(floats, 100.0 + i)).numpy() == 100.0 + i).all())
    return len(forks.children), forks.end(), right


def fill(size: int, value: float) -> torch.Tensor:
    return torch.full((size,), value)


def start_with(init_method: str, rank: int, **settings: Any) -> None:
    options = rpc.RemoraRpcBackendOptions(init_method=init_method, **settings)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)


@pytest.mark.parametrize("size", [60_000, 600_000], ids=["late", "large"])
def test_a_fork_anywhere_in_a_call_harms_neither_child_nor_parent(size: int) -> None:
    with Workers(2) as workers:
        forked, wrong, right = workers.run(0, call_and_fork, "worker1", size)
        assert forked > 100 // EVERY
        assert wrong == []
        assert right
        assert workers.run(1, targets.call, "worker0", targets.double, 2) == 4, "the other direction works, too"
