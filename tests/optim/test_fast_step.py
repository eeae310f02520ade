"""A step without torch's ceremony is the same step, and whoever watches sees what torch shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim import optimizer as torchs
from torch.profiler import ProfilerActivity, profile

from remora.optim import fast_step
from remora.options import FAST_PATHS


class Plain:
    """No torch optimizer, but it has a step."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


class Doubling(torch.optim.SGD):
    """A torch optimizer whose step is its own."""

    @torch.no_grad()  # type: ignore[misc]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(2)


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(3))
    made.grad = torch.ones(3)
    return made


@pytest.fixture
def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([parameter()], lr=0.25)


def value(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["params"][0].detach()[0])


@pytest.fixture
def ceremonies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that torch gave to steps, as it does in its ceremony."""
    names: list[str] = []

    class Named(torch.autograd.profiler.record_function):
        def __init__(self, name: str, args: str | None = None) -> None:
            names.append(name)
            super().__init__(name, args)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Named)
    return names


@pytest.mark.skipif(not FAST_PATHS.fast_step, reason="turned off")
def test_nobody_watches(sgd: torch.optim.SGD, ceremonies: list[str]) -> None:
    fast_step.step(sgd)
    assert value(sgd) == 0.75
    assert ceremonies == []
    sgd.step()
    assert value(sgd) == 0.5
    assert ceremonies == ["Optimizer.step#SGD.step"]  # else the line above shows nothing


def test_a_step_of_its_own_runs_as_it_is_decorated() -> None:
    doubling = Doubling([parameter()], lr=0.25)
    fast_step.step(doubling)
    assert value(doubling) == 2.0  # under no_grad: torch would not let a leaf be changed else


def test_whatever_has_a_step() -> None:
    plain = Plain()
    fast_step.step(plain)
    assert plain.steps == 1


class Delegating:
    """No torch optimizer, and its step is that of another."""

    def __init__(self, inner: Plain) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_step_that_its_class_does_not_know_of() -> None:
    plain = Plain()
    fast_step.step(Delegating(plain))
    assert plain.steps == 1


def test_a_wrapper_around_the_step_of_a_class_runs(sgd: torch.optim.SGD, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, steps = torch.optim.SGD.step, []

    @functools.wraps(plain)
    def counting(self: torch.optim.SGD, *args: Any) -> Any:
        steps.append(self)
        return plain(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", counting)
    fast_step.step(sgd)
    assert steps == [sgd]
    assert value(sgd) == 0.75


def test_a_step_of_its_own_may_carry_the_name_and_words_of_another(sgd: torch.optim.SGD) -> None:
    class Tripling(torch.optim.SGD):
        @functools.wraps(type(sgd).step)  # which torch has wrapped by now
        @torch.no_grad()  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].mul_(3)

    tripling = Tripling([parameter()], lr=0.25)
    fast_step.step(tripling)
    assert value(tripling) == 3.0


@pytest.mark.parametrize(
    "register", [torchs.register_optimizer_step_pre_hook, torchs.register_optimizer_step_post_hook]
)
def test_hooks_of_all_optimizers_run(sgd: torch.optim.SGD, register: Callable[..., Any]) -> None:
    seen: list[object] = []
    handle = register(lambda optimizer, args, kwargs: seen.append(optimizer))
    try:
        fast_step.step(sgd)
    finally:
        handle.remove()
    assert seen == [sgd]
    fast_step.step(sgd)
    assert seen == [sgd]
    assert value(sgd) == 0.5


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_one_optimizer_run(sgd: torch.optim.SGD, register: str) -> None:
    seen: list[object] = []
    getattr(sgd, register)(lambda optimizer, args, kwargs: seen.append(optimizer))
    fast_step.step(sgd)
    assert seen == [sgd]
    assert value(sgd) == 0.75


def test_where_torch_keeps_hooks_is_not_known(
    sgd: torch.optim.SGD, ceremonies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_step, "_OWN_HOOKS", ("_somewhere_else",))
    fast_step.step(sgd)
    assert value(sgd) == 0.75
    assert ceremonies == ["Optimizer.step#SGD.step"]


def test_a_scheduler_sees_the_steps(sgd: torch.optim.SGD) -> None:
    scheduler = lr_scheduler.StepLR(sgd, 1)
    fast_step.step(sgd)
    assert value(sgd) == 0.75
    assert getattr(sgd, "_opt_called", False)  # or torch warns that the scheduler was first
    scheduler.step()


def test_a_profile_shows_the_step(sgd: torch.optim.SGD) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as made:
        fast_step.step(sgd)
    assert "Optimizer.step#SGD.step" in {event.key for event in made.key_averages()}
    assert value(sgd) == 0.75
