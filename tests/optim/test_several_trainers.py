"""Several trainers may update the same parameters at the same time."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, optim

from remora import autograd, rpc
from remora.autograd.leaves import Gathered
from remora.optim import DistributedOptimizer
from remora.optim.local import LocalOptimizer
from remora.rpc import RRef
from remora.testing.world import World
from tests.optim.parts import Watched
from tests.workers import Workers

OWNER = "worker0"
TRAINERS = (1, 2)
STEPS = 20


_shared: list[Tensor] = []


def make_shared() -> None:
    """Give the owner fresh parameters."""
    _shared[:] = [torch.zeros(3, 2).requires_grad_() for _ in range(2)]


def shared() -> list[Tensor]:
    """The parameters of the owner."""
    return _shared


def references_to_shared() -> list[RRef[Tensor]]:
    return [RRef(each) for each in shared()]


@pytest.fixture(autouse=True)
def fresh_parameters() -> None:
    make_shared()


def sum_of(rref: RRef[Tensor]) -> Tensor:
    return rref.local_value().sum()


def cubes_of(rref: RRef[Tensor]) -> Tensor:
    return rref.local_value().pow(3).sum()


def train(steps: int) -> None:
    """Step with gradients of one, by an optimizer of this trainer's own."""
    rrefs = rpc.rpc_sync(OWNER, references_to_shared)
    optimizer = DistributedOptimizer(Watched, rrefs)
    for _ in range(steps):
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync(OWNER, sum_of, args=(rref,)) for rref in rrefs])
            optimizer.step(context_id)


def test_no_update_is_lost() -> None:
    Watched.seen.clear()
    with World(3) as world, ThreadPoolExecutor(len(TRAINERS)) as threads:
        runs = [threads.submit(world.run, trainer, train, STEPS) for trainer in TRAINERS]
        for each in runs:
            each.result(60)
    assert Watched.seen == {1}  # never two in a step at a time
    torch.testing.assert_close(shared(), [torch.full((3, 2), -2.0 * STEPS)] * 2)


def test_no_update_of_other_processes_is_lost() -> None:
    with Workers(3) as workers:
        workers.run(0, make_shared)
        running = [workers.start(trainer, train, STEPS) for trainer in TRAINERS]
        for each in running:
            each.result(60)
        found = workers.run(0, _values_of_shared)
    torch.testing.assert_close(found, [torch.full((3, 2), -2.0 * STEPS)] * 2)


def _values_of_shared() -> list[Tensor]:
    return [each.detach() for each in shared()]


# Who waits for whom.


class Slow(optim.SGD):
    """Stays in `step` until it is let go."""

    entered: ClassVar[threading.Semaphore]
    let_go: ClassVar[threading.Event]

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        Slow.entered, Slow.let_go = threading.Semaphore(0), threading.Event()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Slow.entered.release()
        assert self.let_go.wait(10.0)
        super().step()


def local(cls: Any, *parameters: Tensor, **options: Any) -> LocalOptimizer:
    return LocalOptimizer(cls, [({}, list(parameters))], (), options)


def ones_for(*parameters: Tensor) -> Gathered:
    return {id(each): (each, torch.ones_like(each)) for each in parameters}


def test_optimizers_of_different_parameters_do_not_wait_for_each_other() -> None:
    one, other = shared()
    slow, quick = local(Slow, one), local(optim.SGD, other, lr=1.0)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(slow.step, ones_for(one), None)
        assert Slow.entered.acquire(timeout=10.0)
        quick.step(ones_for(other), None)
        assert not running.done()
        Slow.let_go.set()
        running.result(10)


def test_optimizers_of_one_common_parameter_wait_for_each_other() -> None:
    one, other = shared()
    slow, quick = local(Slow, one, other), local(optim.SGD, other, lr=1.0)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(slow.step, ones_for(one, other), None)
        assert Slow.entered.acquire(timeout=10.0)
        second = threads.submit(quick.step, ones_for(other), None)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        Slow.let_go.set()
        first.result(10), second.result(10)
    torch.testing.assert_close(other.detach(), torch.full((3, 2), -2.0))


def test_optimizers_that_name_their_parameters_in_another_order_never_wait_in_a_circle() -> None:
    one, other = shared()
    first, second = local(optim.SGD, one, other, lr=1.0), local(optim.SGD, other, one, other, lr=1.0)
    assert first._exclusively._locks == second._exclusively._locks


# A step between the forward and the backward pass of somebody else.


def two_trainers(world: World, second_has_an_optimizer: bool) -> None:
    """Trainer 2 goes forward; trainer 1 trains; trainer 2 goes back."""
    rrefs = world.run(2, rpc.rpc_sync, OWNER, references_to_shared)
    optimizer = world.run(2, DistributedOptimizer, optim.SGD, rrefs, lr=0.1) if second_has_an_optimizer else None
    with world.acting(2), autograd.context() as context_id, ThreadPoolExecutor(1) as other:
        loss = rpc.rpc_sync(OWNER, cubes_of, args=(rrefs[0],))
        other.submit(world.run, 1, train, 1).result(30)
        autograd.backward(context_id, [loss])
    assert optimizer is None or repr(optimizer)  # it was there until here


def test_asynchronous_trainers_do_not_disturb_each_other() -> None:
    with World(3) as world:
        two_trainers(world, second_has_an_optimizer=True)


def test_a_graph_from_before_a_step_is_refused_when_there_is_one_optimizer() -> None:
    with World(3) as world, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        two_trainers(world, second_has_an_optimizer=False)


def test_a_parameter_is_no_longer_shared_when_the_other_optimizer_is_gone() -> None:
    one, _ = shared()
    optimizer, other = local(optim.SGD, one, lr=1.0), local(optim.SGD, one, lr=1.0)
    optimizer.step(ones_for(one), None)
    assert one._version == 0
    del other
    gc.collect()
    optimizer.step(ones_for(one), None)
    assert one._version == 1


def test_a_parameter_that_got_other_memory_is_still_updated() -> None:
    one, _ = shared()
    optimizer = local(optim.SGD, one, lr=1.0)
    one.data = torch.full((3, 2), 5.0)
    optimizer.step(ones_for(one), None)
    torch.testing.assert_close(one.detach(), torch.full((3, 2), 4.0))


def test_a_parameter_that_was_cut_or_turned_in_its_own_memory_is_updated_as_it_is() -> None:
    """As by `table.weight.data = table.weight.data[:n]`."""
    one, other = shared()
    optimizer = local(optim.SGD, one, lr=1.0)
    one.data = one.data[:2]
    optimizer.step(ones_for(one), None)
    torch.testing.assert_close(one.detach(), torch.full((2, 2), -1.0))
    other.data = torch.zeros(2, 2)
    optimizer = local(optim.SGD, other, lr=1.0)
    other.data = other.data.t()
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    optimizer.step({id(other): (other, gradient)}, None)
    torch.testing.assert_close(other.detach(), -gradient)


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_gradients_are_neither_kept_nor_put_where_the_program_has_its_own(kind: type[Tensor]) -> None:
    one = shared()[0] if kind is torch.Tensor else torch.nn.Parameter(torch.zeros(3, 2))
    one.grad = mine = torch.full((3, 2), 7.0)
    gradients = ones_for(one)
    kept = weakref.ref(gradients[id(one)][1])
    optimizer = local(optim.SGD, one, lr=1.0)
    optimizer.step(gradients, None)
    gradients.clear()
    assert kept() is None
    assert one.grad is mine
    assert mine.sum() == 7.0 * mine.numel()
