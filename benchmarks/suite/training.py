"""One step of training a network that lives on the other worker: forward call, backward pass, optimizer step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Reading, Setting, latencies, time_each

WIDTH = 256
BATCH = 32


class Network(torch.nn.Sequential):
    """Three layers."""

    def __init__(self) -> None:
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        super().__init__(*layers, torch.nn.Linear(WIDTH, WIDTH))


def forward(network: Any, batch: torch.Tensor) -> torch.Tensor:
    """On the owner of the network."""
    output: torch.Tensor = network.local_value()(batch)
    return output


def parameters(rpc: str, network: Any) -> list[Any]:
    """References to the parameters, on the owner of the network."""
    make = importlib.import_module(rpc).RRef
    return [make(parameter) for parameter in network.local_value().parameters()]


def measure(setting: Setting) -> list[Reading]:
    step = prepared(setting)
    time_each(step, setting.effort(40, 20))
    return latencies(time_each(step, setting.effort(250, 150)))


def prepared(setting: Setting) -> Callable[[], None]:
    """A step, and all that it needs."""
    rpc, (peer, *_) = setting.rpc, setting.peers
    autograd = importlib.import_module(setting.module.replace("rpc", "autograd"))
    optim = importlib.import_module(setting.module.replace("rpc", "optim"))
    network = rpc.remote(peer, Network)
    references = rpc.rpc_sync(peer, parameters, args=(setting.module, network))
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, references, lr=0.001)
    batch, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def step() -> None:
        with autograd.context() as context_id:
            output = rpc.rpc_sync(peer, forward, args=(network, batch))
            loss = torch.nn.functional.mse_loss(output, target)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    return step
