"""A pipeline's step: a remote module is called once for each micro-batch, and one backward pass goes through all calls.

Every call reaches the same parameters, so their gradients can be added as they come, or kept until all are there: that is
what the callee's memory tells. In a pipeline's middle the micro-batches themselves want a gradient, which has to go back to
where they came from ("and back").
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.measure import Reading, Setting, Unit, time_all
from benchmarks.suite.memory import peak, resident

WIDTH, LAYERS = 2048, 5  # 84 MB of parameters
BATCH = 8
CALLS = (16, 64)  # in order: the peak of a process' memory is that of its whole life
STEPS = 3  # of each: memory that grows from one to the next shows


class Network(torch.nn.Sequential):
    """Five layers."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def forward(network: Any, batch: torch.Tensor) -> torch.Tensor:
    """On the owner of the network."""
    output: torch.Tensor = network.local_value()(batch)
    return output


def last_gradient(autograd: str, context_id: int, network: Any) -> torch.Tensor:
    """Of the last bias, on the owner of the network."""
    gradients = importlib.import_module(autograd).get_gradients(context_id)
    if len(gradients) != 2 * LAYERS:
        raise AssertionError(f"{len(gradients)} of {2 * LAYERS} parameters have a gradient")
    gradient: torch.Tensor = gradients[network.local_value()[-1].bias]
    return gradient


def measure(setting: Setting) -> Iterator[Reading]:
    return _measure(setting, back=False)


def measure_back(setting: Setting) -> Iterator[Reading]:
    return _measure(setting, back=True)


def _measure(setting: Setting, back: bool) -> Iterator[Reading]:
    rpc, (peer, *_) = setting.rpc, setting.peers
    network = rpc.remote(peer, Network)
    _step(setting, network, 1, back)
    before = rpc.rpc_sync(peer, resident)
    for calls in setting.effort(CALLS, CALLS[:1]):
        steps = [_step(setting, network, calls, back) for _ in range(setting.effort(STEPS, 2))]
        seconds, busy = (statistics.median(each) for each in zip(*steps, strict=True))
        yield Reading(f"{calls} calls", seconds, Unit.SECONDS)
        yield Reading(f"{calls} calls, callee's CPU", busy, Unit.SECONDS)
        yield Reading(f"{calls} calls, callee's memory", rpc.rpc_sync(peer, peak) - before, Unit.BYTES)


def _step(setting: Setting, network: Any, calls: int, back: bool) -> tuple[float, float]:
    """The seconds of its backward pass, and of the callee's processors in it. `back`: the micro-batches want a gradient."""
    rpc, (peer, *_) = setting.rpc, setting.peers
    name = setting.module.replace("rpc", "autograd")
    autograd = importlib.import_module(name)
    batches = [torch.randn(BATCH, WIDTH, requires_grad=back) for _ in range(calls)]
    with autograd.context() as context_id:
        loss = torch.stack([rpc.rpc_sync(peer, forward, args=(network, batch)).sum() for batch in batches]).sum()
        begun = rpc.rpc_sync(peer, time.process_time)
        seconds = time_all(lambda: autograd.backward(context_id, [loss]))
        busy = rpc.rpc_sync(peer, time.process_time) - begun
        gradient = rpc.rpc_sync(peer, last_gradient, args=(name, context_id, network))
        if back and len(autograd.get_gradients(context_id)) != calls:
            raise AssertionError(f"not all of {calls} micro-batches have a gradient")
    if not torch.equal(gradient, torch.full((WIDTH,), float(calls * BATCH))):  # every output counts once in the loss
        raise AssertionError(f"a gradient after {calls} calls is {gradient[0]:g}, not {calls * BATCH}")
    return seconds, busy
