"""A DistributedOptimizer does on many workers what a torch optimizer does in one process."""

from __future__ import annotations

import gc
import importlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

from remora import autograd, rpc
from remora.errors import CallError, RemoteError
from remora.optim import DistributedOptimizer
from remora.testing.world import World
from tests.optim.parts import (
    Broken,
    Counting,
    Meeting,
    Remembering,
    Replacing,
    Unbuildable,
    parameters_here,
    parameters_on,
    remote_distance,
    step_once,
    train_here,
    train_remotely,
    values_of,
)

STEPS = range(1, 5)


@pytest.fixture
def world() -> Iterator[World]:
    """Three workers; the test acts for the first."""
    with World(3) as made, made.acting(0):
        yield made


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.05}),
    (optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (optim.Adam, {"lr": 0.05, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.05}),
    (optim.Adagrad, {"lr": 0.05}),
    (optim.Adadelta, {"rho": 0.9}),
    (optim.RMSprop, {"lr": 0.05}),
    (optim.Rprop, {"lr": 0.05}),
    (optim.Adamax, {"lr": 0.05}),
    (optim.NAdam, {"lr": 0.05}),
    (optim.RAdam, {"lr": 0.05}),
    (optim.ASGD, {"lr": 0.05}),
    (Replacing, {"lr": 0.05}),
]


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", ""))
def test_it_takes_any_class_and_does_what_that_does(
    world: World, cls: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    rrefs, here = parameters_on("worker1", "worker2", "worker1", "worker0"), parameters_here(4)
    found = train_remotely(DistributedOptimizer(cls, rrefs, **options), rrefs, STEPS)
    assert_same(found, train_here(cls(here, **options), here, STEPS))


def test_a_parameter_without_a_gradient_stays_as_it_is(world: World) -> None:
    rrefs = parameters_on("worker1", "worker1", "worker2")
    before = values_of(rrefs)
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.1, weight_decay=0.5)
    train_remotely(optimizer, rrefs[:1], range(1))
    after = values_of(rrefs)
    assert not torch.equal(before[0], after[0])
    assert_same(after[1:], before[1:])


def test_gradients_of_the_program_are_left_alone(world: World) -> None:
    rrefs = parameters_on("worker1")
    rpc.rpc_sync("worker1", _set_gradient, args=(rrefs[0],))
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.1)
    train_remotely(optimizer, rrefs, STEPS)
    assert rpc.rpc_sync("worker1", _gradient_is, args=(rrefs[0], 7.0))


def _set_gradient(rref: rpc.RRef[torch.Tensor]) -> None:
    rref.local_value().grad = torch.full((3, 2), 7.0)


def _gradient_is(rref: rpc.RRef[torch.Tensor], value: float) -> bool:
    gradient = rref.local_value().grad
    return gradient is not None and bool((gradient == value).all())


# Parameter groups.


def test_groups_have_options_of_their_own_and_may_be_on_many_workers(world: World) -> None:
    rrefs, here = parameters_on("worker1", "worker2", "worker2", "worker1"), parameters_here(4)

    def groups(of: list[Any]) -> list[dict[str, Any]]:
        return [{"params": of[:2]}, {"params": of[2:3], "lr": 0.5}, {"params": of[3], "momentum": 0.9}]

    optimizer = DistributedOptimizer(optim.SGD, groups(rrefs), lr=0.01)
    found = train_remotely(optimizer, rrefs, STEPS)
    assert_same(found, train_here(optim.SGD(groups(here), lr=0.01), here, STEPS))
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5, 0.01]
    assert [group["params"] for group in optimizer.param_groups] == [rrefs[:2], rrefs[2:3], rrefs[3:]]


def test_changed_options_reach_all_owners_with_the_next_step(world: World) -> None:
    rrefs, here = parameters_on("worker1", "worker2"), parameters_here(2)
    remote = DistributedOptimizer(optim.SGD, rrefs, lr=0.01)
    local = optim.SGD(here, lr=0.01)
    for optimizer, train in ((remote, lambda: train_remotely(remote, rrefs, STEPS)),
                             (local, lambda: train_here(local, here, STEPS))):  # fmt: skip
        train()
        optimizer.param_groups[0]["lr"] = 0.002
        optimizer.param_groups[0]["momentum"] = 0.5
        train()
    assert_same(values_of(rrefs), here)


def test_a_learning_rate_that_is_a_tensor_may_be_changed_in_place(world: World) -> None:
    rrefs, here = parameters_on("worker1", "worker2"), parameters_here(2)
    remote, local = DistributedOptimizer(optim.SGD, rrefs, lr=torch.tensor(0.01)), optim.SGD(here, lr=0.01)
    train_remotely(remote, rrefs, STEPS)
    train_here(local, here, STEPS)
    remote.param_groups[0]["lr"].fill_(0.5)
    local.param_groups[0]["lr"] = 0.5
    assert_same(train_remotely(remote, rrefs, STEPS), train_here(local, here, STEPS))


def test_what_an_optimizer_keeps_in_its_groups_is_its_own(world: World) -> None:
    rrefs, here = parameters_on("worker1", "worker2"), parameters_here(2)
    remote, local = DistributedOptimizer(Counting, rrefs, lr=0.001), Counting(here, lr=0.001)
    for optimizer, train in ((remote, lambda: train_remotely(remote, rrefs, STEPS)),
                             (local, lambda: train_here(local, here, STEPS))):  # fmt: skip
        train()
        optimizer.param_groups[0]["lr"] = 0.002
        train()
    assert_same(values_of(rrefs), here)
    local.param_groups[0]["lr"] = remote.param_groups[0]["lr"] = 0.003  # not told yet
    assert remote.state_dict() == local.state_dict()


def test_options_that_are_many_numbers(world: World) -> None:
    rrefs, here, rates = parameters_on("worker1", "worker2"), parameters_here(2), torch.tensor([0.001, 0.002])
    remote, local = DistributedOptimizer(Counting, rrefs, lr=rates.clone()), Counting(here, lr=rates)
    for optimizer, train in ((remote, lambda: train_remotely(remote, rrefs, STEPS)),
                             (local, lambda: train_here(local, here, STEPS))):  # fmt: skip
        train()
        optimizer.param_groups[0]["lr"].mul_(2)
        train()
    assert_same(values_of(rrefs), here)


def test_a_parameter_that_is_there_twice_is_treated_as_by_torch(world: World) -> None:
    [rref], [here] = parameters_on("worker1"), parameters_here(1)
    again = rpc.rpc_sync("worker1", _another_reference, args=(rref,))  # as tied modules would give
    with pytest.warns(UserWarning, match="duplicate parameters"):
        remote = DistributedOptimizer(optim.SGD, [rref, again], lr=0.01, momentum=0.9)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        local = optim.SGD([here, here], lr=0.01, momentum=0.9)
    assert_same(train_remotely(remote, [rref], STEPS), train_here(local, [here], STEPS))
    with pytest.raises(ValueError, match="more than one parameter group"):
        DistributedOptimizer(optim.SGD, [{"params": rref}, {"params": again}], lr=0.01)


def _another_reference(rref: rpc.RRef[torch.Tensor]) -> rpc.RRef[torch.Tensor]:
    return rpc.RRef(rref.local_value())


# Learning-rate schedulers.

SCHEDULERS: list[Callable[[optim.Optimizer], Any]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (step + 1), lambda step: 0.9**step]),
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(STEPS)),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    ),
]


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_torch_schedulers_take_it(world: World, schedule: Callable[[optim.Optimizer], Any]) -> None:
    rrefs, here = parameters_on("worker1", "worker2"), parameters_here(2)
    remote = DistributedOptimizer(optim.SGD, [{"params": rrefs[:1]}, {"params": rrefs[1:], "lr": 0.02}], 0.01, 0.9)
    local = optim.SGD([{"params": here[:1]}, {"params": here[1:], "lr": 0.02}], 0.01, 0.9)
    remote_schedule, local_schedule = schedule(remote), schedule(local)
    found = train_remotely(remote, rrefs, STEPS[:-1], remote_schedule.step)
    assert_same(found, train_here(local, here, STEPS[:-1], local_schedule.step))
    assert remote_schedule.get_last_lr() == local_schedule.get_last_lr()


def test_a_scheduler_that_looks_at_the_loss_takes_it(world: World) -> None:
    rrefs = parameters_on("worker1")
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.5)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    train_remotely(optimizer, rrefs, STEPS, lambda: schedule.step(1.0))
    assert optimizer.param_groups[0]["lr"] < 0.01


# State.


def test_its_state_is_that_of_one_optimizer_over_all_parameters(world: World) -> None:
    rrefs, here = parameters_on("worker1", "worker2", "worker1"), parameters_here(3)
    remote = DistributedOptimizer(optim.Adam, [{"params": rrefs[:2]}, {"params": rrefs[2:], "lr": 0.5}], lr=0.1)
    local = optim.Adam([{"params": here[:2]}, {"params": here[2:], "lr": 0.5}], lr=0.1)
    train_remotely(remote, rrefs, STEPS)
    train_here(local, here, STEPS)
    torch.testing.assert_close(remote.state_dict(), local.state_dict(), rtol=0, atol=0)


def test_training_goes_on_from_a_loaded_state_even_elsewhere(world: World) -> None:
    here = parameters_here(3)
    local = optim.Adam(here, lr=0.1)
    train_here(local, here, STEPS)
    first = parameters_on("worker1", "worker2", "worker1")
    saved = DistributedOptimizer(optim.Adam, first, lr=0.1)
    train_remotely(saved, first, STEPS)

    rrefs = parameters_on("worker2", "worker2", "worker1")
    for rref, value in zip(rrefs, values_of(first), strict=True):
        rpc.rpc_sync(rref.owner(), _set_value, args=(rref, value))
    loaded = DistributedOptimizer(optim.Adam, rrefs, lr=77.0)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.param_groups[0]["lr"] == 0.1
    assert_same(train_remotely(loaded, rrefs, STEPS), train_here(local, here, STEPS))


def _set_value(rref: rpc.RRef[torch.Tensor], value: torch.Tensor) -> None:
    rref.local_value().data.copy_(value)


def test_a_local_optimizer_and_a_distributed_one_load_the_state_of_each_other(world: World) -> None:
    rrefs, here = parameters_on("worker1", "worker2"), parameters_here(2)
    remote, local = DistributedOptimizer(optim.Adam, rrefs), optim.Adam(here)
    train_here(local, here, STEPS)
    remote.load_state_dict(local.state_dict())
    torch.testing.assert_close(remote.state_dict(), local.state_dict())
    train_remotely(remote, rrefs, STEPS)
    local.load_state_dict(remote.state_dict())
    torch.testing.assert_close(remote.state_dict(), local.state_dict())


def test_state_that_belongs_to_no_parameter(world: World) -> None:
    rrefs, here = parameters_on("worker1", "worker2"), parameters_here(2)
    remote = DistributedOptimizer(Remembering, rrefs, lr=0.01, momentum=0.9)
    local = Remembering(here, lr=0.01, momentum=0.9)
    for _ in range(2):
        train_remotely(remote, rrefs, STEPS)
        train_here(local, here, STEPS)
        torch.testing.assert_close(remote.state_dict(), local.state_dict(), rtol=0, atol=0)
        remote.load_state_dict(local.state_dict())


def test_the_state_of_other_groups_is_refused(world: World) -> None:
    rrefs = parameters_on("worker1", "worker1")
    state = DistributedOptimizer(optim.SGD, rrefs[:1], lr=0.1).state_dict()
    with pytest.raises(ValueError, match="groups of other sizes"):
        DistributedOptimizer(optim.SGD, rrefs, lr=0.1).load_state_dict(state)


# How it is called, and calls.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's is full of TorchScript
@pytest.mark.parametrize("method", ["__init__", "step"])
def test_it_is_used_like_that_of_torch(method: str) -> None:
    of_torch = importlib.import_module("torch.distributed.optim").DistributedOptimizer
    ours, theirs = (
        [(each.name, each.kind, each.default) for each in inspect.signature(getattr(cls, method)).parameters.values()]
        for cls in (DistributedOptimizer, of_torch)
    )
    assert ours == theirs


def test_all_owners_step_at_the_same_time(world: World) -> None:
    Meeting.barrier = threading.Barrier(3)
    rrefs = parameters_on("worker0", "worker1", "worker2")
    step_once(DistributedOptimizer(Meeting, rrefs, lr=0.1), rrefs)


def test_it_can_be_used_by_another_worker(world: World) -> None:
    rrefs = parameters_on("worker1", "worker2")
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.01)
    lr_scheduler.StepLR(optimizer, 1)  # puts something into it that cannot be pickled
    rpc.rpc_sync("worker2", train_remotely, args=(optimizer, rrefs, STEPS))
    here = parameters_here(2)
    assert_same(values_of(rrefs), train_here(optim.SGD(here, lr=0.01), here, STEPS))


def test_the_optimizers_on_the_owners_go_when_it_goes(world: World) -> None:
    rrefs = parameters_on("worker1")
    values_of(rrefs)  # they are there
    counts = world[1].references.table.counts
    before = counts()
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.01)
    step_once(optimizer, rrefs)
    assert counts() != before
    del optimizer
    world.wait_until(lambda: counts() == before)


# Errors.


def test_an_optimizer_that_cannot_be_made_says_where_and_why(world: World) -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        DistributedOptimizer(Unbuildable, parameters_on("worker2"))
    assert isinstance(caught.value, RemoteError)
    assert caught.value.__notes__ == ["making it: Unbuildable for 1 parameter(s) on worker2"]


def test_a_step_that_fails_says_where_and_why(world: World) -> None:
    rrefs = parameters_on("worker1", "worker2", "worker1")
    optimizer = DistributedOptimizer(Broken, rrefs)
    with pytest.raises(ValueError, match="out of order on worker1") as caught:
        step_once(optimizer, rrefs)
    ours, others = caught.value.__notes__
    assert ours == "step: Broken for 2 parameter(s) on worker1"
    assert others.startswith("worker2 failed, too: ValueError")


def test_an_error_keeps_nothing_alive(world: World) -> None:
    rrefs = parameters_on("worker1", "worker2")
    optimizer = DistributedOptimizer(Broken, rrefs)
    with pytest.raises(ValueError) as caught:
        step_once(optimizer, rrefs)
    error = weakref.ref(caught.value)
    gc.disable()
    try:
        del caught
        assert error() is None
    finally:
        gc.enable()


def test_after_a_failed_step_the_next_one_tells_the_options_again(world: World) -> None:
    rrefs = parameters_on("worker1")
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.01)
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(TypeError):
        step_once(optimizer, rrefs)
    optimizer.param_groups[0]["lr"] = 0.01
    before = values_of(rrefs)
    step_once(optimizer, rrefs)
    assert not torch.equal(values_of(rrefs)[0], before[0])


def test_a_context_that_is_over_is_refused(world: World) -> None:
    rrefs = parameters_on("worker1")
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.01)
    with autograd.context() as context_id:
        pass
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        optimizer.step(context_id)


def test_a_dead_owner_is_an_error_that_names_it(world: World) -> None:
    rrefs = parameters_on("worker1", "worker2")
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.01)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", remote_distance, args=(rrefs[0], 1))])
        world.kill(2)
        with pytest.raises(CallError) as caught:
            optimizer.step(context_id)
    assert any("SGD for 1 parameter(s) on worker2" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("parameters", "error"),
    [([], ValueError), ([{"params": []}], ValueError), ([torch.ones(1)], TypeError), ([{"params": [1]}], TypeError)],
)
def test_what_is_no_reference_is_refused(world: World, parameters: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        DistributedOptimizer(optim.SGD, parameters, lr=0.1)


def test_what_is_no_parameter_is_refused(world: World) -> None:
    with pytest.raises(TypeError, match="references to tensors"):
        DistributedOptimizer(optim.SGD, [rpc.remote("worker1", str)], lr=0.1)
    with pytest.raises(ValueError, match="non-leaf"):
        DistributedOptimizer(optim.SGD, [rpc.remote("worker1", remote_distance, (parameters_on("worker1")[0], 1))], lr=0.1)


def test_groups_cannot_be_added_and_there_is_nothing_to_zero(world: World) -> None:
    optimizer = DistributedOptimizer(optim.SGD, parameters_on("worker1"), lr=0.1)
    optimizer.zero_grad()
    with pytest.raises(NotImplementedError):
        optimizer.add_param_group({"params": []})
    assert repr(optimizer) == "<DistributedOptimizer SGD on worker1>"
