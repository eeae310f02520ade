"""A value that a numbered function makes without arguments: its request is the number and a header."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.agent.calls.call_trace import tracing
from remora.options import FAST_PATHS
from remora.testing.world import World
from tests.faults.trials import QUICK, quick_time

pytestmark = pytest.mark.skipif(not FAST_PATHS.function_numbers, reason="turned off")


def five() -> int:
    return 5


@rpc.functions.async_execution
def six() -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(6)
    return future


def grad() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def made(to: str, function: Any) -> Any:
    return rpc.remote(to, function).to_here()


@pytest.mark.parametrize("deed", ["drop", "duplicate", "reorder", "corrupt", "delay"])
@pytest.mark.parametrize("kind", ["FUNCTION", "PYTHON_REMOTE_CALL"])
def test_whatever_happens_to_the_request_it_is_made(deed: str, kind: str) -> None:
    def make() -> list[Any]:
        return [each.to_here() for each in [rpc.remote("worker1", five) for _ in range(20)]]

    seconds = " 50ms" if deed == "delay" else ""
    with quick_time(), World(2, faults=f"{deed} {kind} *{seconds} #1", **QUICK) as world:
        assert world.run(0, make) == [5] * 20


def test_a_broken_link() -> None:
    with quick_time(), World(2, faults="cut worker0-worker1 after 1 PYTHON_REMOTE_CALL for 100ms", **QUICK) as world:
        assert [world.run(0, made, "worker1", five) for _ in range(5)] == [5] * 5


def test_a_request_that_is_not_sent_leaves_nothing() -> None:
    def refused() -> Any:
        rref = rpc.remote("worker1", five)
        with pytest.raises(Exception, match="intentionally"):
            rref.to_here()

    with quick_time(), World(2, faults="fail PYTHON_REMOTE_CALL * #2", **QUICK) as world:
        assert world.run(0, made, "worker1", five) == 5
        world.run(0, refused)
        assert world.run(0, made, "worker1", five) == 5
        owner = world[1].references.table
        world.wait_until(lambda: not owner.counts()["num_owner_rrefs"] and not owner.counts()["num_forks"])


class Tracer:
    """Carries a text along, and hears of it."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def outgoing(self) -> str:
        return "a trace"

    def arrived(self, caller: str, call: int, trace: str) -> None:
        self.heard.append(trace)


def test_a_trace_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer()
    with World(2) as world:
        assert world.run(0, made, "worker1", five) == 5  # from here on it has a number
        monkeypatch.setattr(tracing, "tracer", tracer)
        assert world.run(0, made, "worker1", five) == 5
    assert tracer.heard == ["a trace"]


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_marked_recorded_and_to_itself(to: str) -> None:
    def recorded() -> Any:
        with autograd.context():
            return made(to, five)

    def backward() -> Any:
        with autograd.context() as context:
            got = made(to, grad)
            autograd.backward(context, [got.sum()])
            return got.requires_grad

    with World(2) as world:
        for _ in range(2):
            assert world.run(0, made, to, six) == 6
            assert world.run(0, made, to, five) == 5
            assert world.run(0, recorded) == 5
            assert world.run(0, backward)
