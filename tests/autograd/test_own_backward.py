"""A worker runs `backward` of its own while distributed passes go through the same leaves. The numbers are integers, so
every sum is exact: one gradient in the wrong place is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import own, wait_for_no_contexts

SIZE = 512  # large enough for the engine to work outside the interpreter's lock
LOCAL_PASSES = 1500
CONTEXTS = 60  # of each of two other workers


def scale() -> Tensor:
    """The leaf that all share. It is worker 1's."""
    return own("scale", lambda: torch.ones(SIZE, dtype=torch.float64).requires_grad_())


def scaled(x: Tensor) -> Tensor:
    return x * scale()


def look_at(leaf: Tensor) -> None:
    leaf.register_hook(lambda gradient: None)


def double(leaf: Tensor) -> None:
    leaf.register_hook(lambda gradient: 2 * gradient)


def look_after_accumulation(leaf: Tensor) -> None:
    leaf.register_post_accumulate_grad_hook(lambda leaf: None)


def look_at_accumulator(leaf: Tensor) -> None:
    node = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda found, given: None)
    own("accumulator", lambda: node)


def plain(leaf: Tensor) -> None:
    pass


def wrong_gradients(world: World, worker: int, factor: int) -> list[str]:
    """Make passes through worker 1's leaf from some worker; what was wrong with the gradients there."""
    wrong = []
    with world.acting(worker):
        for number in range(1, CONTEXTS + 1):
            x = torch.full((SIZE,), float(number), dtype=torch.float64)
            with autograd.context() as context_id:
                calls = 1 + number % 3
                results = [rpc.rpc_sync("worker1", scaled, args=(x.requires_grad_(),)) for _ in range(calls)]
                autograd.backward(context_id, [torch.stack(results).sum()])
                found = world.run(1, autograd.get_gradients, context_id)[world.run(1, scale)]
                if not bool((found == factor * calls * number).all()):
                    wrong.append(f"{found.unique().tolist()} instead of {factor * calls * number}")
    return wrong


Hang = Callable[[Tensor], None]


def run_beside_others(world: World, local_pass: Callable[[], None], factor: int) -> int:
    """Make local passes while two other workers make passes through the same leaf; how many were made."""
    failures: list[str] = []

    def others(worker: int) -> None:
        try:
            failures.extend(wrong_gradients(world, worker, factor))
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=others, args=(worker,)) for worker in (0, 2)]
    for thread in threads:
        thread.start()
    passes = 0
    try:
        while passes < LOCAL_PASSES or any(thread.is_alive() for thread in threads):
            local_pass()
            passes += 1
    finally:
        for thread in threads:
            thread.join()
    assert failures == []
    return passes


@pytest.mark.parametrize(
    ("hang", "factor"),
    [(plain, 1), (look_at, 1), (double, 2), (look_after_accumulation, 1), (look_at_accumulator, 1)],
)
def test_local_and_distributed_passes_at_once(world: World, hang: Hang, factor: int) -> None:
    leaf = world.run(1, scale)
    hang(leaf)

    def local_pass() -> None:
        leaf.sum().backward()  # type: ignore[no-untyped-call]

    passes = run_beside_others(world, local_pass, factor)
    assert leaf.grad is not None
    assert (leaf.grad == factor * passes).all(), f"{leaf.grad.unique().tolist()} instead of {factor * passes}"
    wait_for_no_contexts(world)


@pytest.mark.parametrize(("hang", "factor"), [(plain, 1), (double, 2)])
def test_the_program_uses_grad_as_it_likes_meanwhile(world: World, hang: Hang, factor: int) -> None:
    """As an optimizer does: it looks at `.grad` between two passes, and drops it. If only tensor hooks hang on a leaf, a
    distributed pass never puts anything there."""
    leaf = world.run(1, scale)
    hang(leaf)
    wrong = []

    def local_pass() -> None:
        leaf.sum().backward()  # type: ignore[no-untyped-call]
        if leaf.grad is None or not bool((leaf.grad == factor).all()):
            wrong.append(leaf.grad)
        leaf.grad = None

    run_beside_others(world, local_pass, factor)
    assert wrong == []
    assert leaf.grad is None
