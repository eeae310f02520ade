"""Passes over workers in processes of their own: one is killed in the middle, and the others are told and clean."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from tests.autograd.belongings import STARTING, leaf, my_weight, run_a_first_pass
from tests.workers import Workers

SOON = 20.0  # seconds: much less than the timeout of a call, which is what a pass without an end would take
armed = True


class Fatal(torch.autograd.Function):
    """A function whose backward is the end of its process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if armed:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)
        return gradient * 2


def fatal(x: Tensor) -> Tensor:
    result: Tensor = Fatal.apply(x) * my_weight()
    return result


def weigh(x: Tensor) -> Tensor:
    return x * my_weight()


def weigh_and_go_on(x: Tensor, to: str) -> Tensor:
    return rpc.rpc_sync(to, fatal, args=(weigh(x),)) + weigh(x)


def warm_up() -> None:
    """A pass that goes to all of them: each has met the others, and knows the functions."""
    with autograd.context() as context_id:
        results = [rpc.rpc_sync(to, weigh, args=(leaf(0),)) for to in ("worker1", "worker2")]
        autograd.backward(context_id, [torch.stack(results).sum()])


def run_into_death(mode: Any) -> tuple[float, str, str, float]:
    """(how long the pass took to fail, its error, its words, the value of a pass in the same context that avoids it)."""
    x = leaf(0)
    with autograd.context() as context_id:
        survives = rpc.rpc_sync("worker1", weigh, args=(x,))
        result = rpc.rpc_sync("worker1", weigh_and_go_on, args=(x, "worker2"))
        started = time.monotonic()
        try:
            autograd.backward(context_id, [result.sum() + survives.sum()], retain_graph=True, mode=mode)
        except RuntimeError as error:
            seconds, kind, words = time.monotonic() - started, type(error).__name__, str(error)
        else:
            raise AssertionError("the pass should have failed")
        autograd._retrieve_context(context_id).gradients.pop(id(x), None)  # of the part that went well
        autograd.backward(context_id, [survives.sum()])
        return seconds, kind, words, float(autograd.get_gradients(context_id)[x].sum())


def debug_info() -> dict[str, int]:
    return {key: int(value) for key, value in autograd._get_debug_info().items()}


def wait_until_clean(workers: Workers, ranks: list[int]) -> None:
    end = time.monotonic() + SOON
    while any(any(workers.run(rank, debug_info).values()) for rank in ranks):
        assert time.monotonic() < end, [workers.run(rank, debug_info) for rank in ranks]
        time.sleep(0.01)


@pytest.mark.parametrize("mode", ["smart"])
def test_a_worker_is_killed_in_the_middle_of_a_pass(mode: str) -> None:
    with Workers(3, timeout=STARTING) as workers:
        workers.run_all(run_a_first_pass)
        workers.run(0, warm_up)
        seconds, kind, words, total = workers.run(0, run_into_death, mode)
        assert seconds < SOON
        assert kind in ("WorkerLost", "CallNotSent"), words
        assert "worker2" in words
        assert total == pytest.approx(float(workers.run(1, my_weight).detach().sum()))
        wait_until_clean(workers, [0, 1])
        workers.kill(2)  # it is dead; now our book says so, too


def open_a_context_and_die() -> None:
    manager = autograd.context()
    manager.__enter__()
    rpc.rpc_sync("worker1", weigh_and_go_on, args=(leaf(0), "worker0"))


def test_the_contexts_of_a_killed_worker_are_released() -> None:
    with Workers(3, timeout=STARTING) as workers:
        workers.run_all(run_a_first_pass)
        workers.run(2, open_a_context_and_die)
        assert [workers.run(rank, debug_info)["num_autograd_contexts"] for rank in (0, 1, 2)] == [1, 1, 1]
        workers.kill(2)
        wait_until_clean(workers, [0, 1])
