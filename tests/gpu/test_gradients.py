"""Distributed autograd, the optimizer and RemoteModule where tensors are on a GPU, with late kernels at every hand-over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.devices.maps import Wishes
from remora.nn import RemoteModule
from remora.optim import DistributedOptimizer
from remora.testing.world import World
from tests.gpu.late import delay, on_another_stream, seen
from tests.workers import Workers

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
N = 1 << 16


class _Late(torch.autograd.Function):
    """The identity, whose gradient takes its time."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        delay()
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        delay()
        return gradient.clone()


def times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return _Late.apply(tensor) * factor  # type: ignore[no-any-return, no-untyped-call]


def late_gradients() -> list[float]:
    found = []
    for number in range(3):
        leaf = torch.ones(N, device=GPU, requires_grad=True)
        other = torch.ones(N, device=GPU, requires_grad=True)
        with autograd.context() as context:

            def forward(leaf: torch.Tensor = leaf, other: torch.Tensor = other) -> torch.Tensor:
                middle = rpc.rpc_sync("worker1", times, (times(leaf, 2.0), 3.0))
                return rpc.rpc_sync("worker2", times, (middle * other, 5.0)).sum()  # type: ignore[no-any-return]

            if number == 1:
                loss = on_another_stream(forward)
                torch.cuda.synchronize()
            else:
                loss = forward()
            autograd.backward(context, [loss])
            gradients = on_another_stream(lambda c=context: autograd.get_gradients(c)) if number == 2 else None
            if gradients is None:
                gradients = autograd.get_gradients(context)
            found += [seen(gradients[leaf]) - 29.0, seen(gradients[other]) - 29.0]
    return found


def test_gradients_are_ready_when_the_pass_is_over(workers: Workers) -> None:
    assert workers.run(0, late_gradients) == [1.0, 1.0] * 3


def mixed() -> list[float]:
    """From the CPU to the GPU and back, on two workers: as PyTorch's own test does."""
    t1, t2 = torch.rand(3, 3, requires_grad=True, device=GPU), torch.rand(3, 3, requires_grad=True)

    def forward(add: Any) -> torch.Tensor:
        t3 = add(t2, t2)
        t4 = t3.cuda(0) + t1
        t5 = add(t4.cpu(), t2)
        t6 = add(t5.cuda(0), t4)
        return add(t6.cpu(), t5).sum()  # type: ignore[no-any-return]

    forward(torch.add).backward()  # type: ignore[no-untyped-call]
    with autograd.context() as context:
        autograd.backward(context, [forward(lambda a, b: rpc.rpc_sync("worker1", torch.add, (a, b)))])
        gradients = autograd.get_gradients(context)
        return [(gradients[t].cpu() - t.grad.cpu()).abs().max().item() for t in (t1, t2)]  # type: ignore[union-attr]


def test_graphs_of_several_devices(workers: Workers) -> None:
    assert max(workers.run(0, mixed)) < 1e-6


@pytest.mark.parametrize("device_map", [{GPU: GPU}, {GPU: CPU}, {GPU: CPU, CPU: GPU}])
def test_gradients_go_back_to_the_device_of_their_tensor(device_map: dict[torch.device, torch.device]) -> None:
    def run() -> list[str]:
        gpu, cpu = torch.ones(3, device=GPU, requires_grad=True), torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            one = rpc.rpc_sync("worker1", times_plain, (gpu, 2.0))
            two = rpc.rpc_sync("worker1", times_plain, (cpu, 3.0))
            autograd.backward(context, [(one.cpu() * two.cpu()).sum()])
            gradients = autograd.get_gradients(context)
            assert torch.equal(gradients[gpu].cpu(), torch.full((3,), 6.0))
            return [str(gradients[gpu].device), str(gradients[cpu].device)]

    with World(2, timeout=20.0, devices=lambda rank: Wishes({"worker1": device_map} if rank == 0 else {})) as world:
        assert world.run(0, run) == ["cuda:0", "cpu"]


def times_plain(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor * factor


def train() -> list[float]:
    """A model in two halves, on other workers and on the GPU, learns what one of a process learns."""
    torch.manual_seed(1)
    halves = [RemoteModule(f"worker{i}/cuda:0", torch.nn.Linear, (8, 8)) for i in (1, 2)]
    weights = [half.remote_parameters() for half in halves]
    local = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(GPU)
    with torch.no_grad():
        for here, there in zip(local.parameters(), [each for half in weights for each in half], strict=True):
            here.copy_(there.to_here())
    optimizer = DistributedOptimizer(torch.optim.SGD, [each for half in weights for each in half], lr=0.1)
    reference = torch.optim.SGD(local.parameters(), lr=0.1)
    differences = []
    for _ in range(4):
        x = torch.randn(16, 8, device=GPU)
        with autograd.context() as context:
            loss = halves[1](halves[0](x)).square().mean()
            autograd.backward(context, [loss])
            optimizer.step(context)
        expected = local(x).square().mean()
        reference.zero_grad()
        expected.backward()
        reference.step()
        assert loss.is_cuda
        differences.append(abs(loss.item() - expected.item()))
    return differences


def test_training(workers: Workers) -> None:
    assert max(workers.run(0, train)) < 1e-4
