"""Everything a tensor has arrives with it, by whichever road; and the road is the one it should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.memory.device import tidy
from remora.devices.maps import Wishes
from remora.rpc.api import _get_current_rpc_agent
from remora.testing.world import World
from tests.gpu.late import SIZE
from tests.workers import Workers

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


def echo(value: Any) -> Any:
    return value


def described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return str(tensor.device), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad


def samples() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32, device=GPU).reshape(4, 6)
    large = torch.randn(SIZE, device=GPU)
    return {
        "small": base,
        "scalar": torch.tensor(3.5, device=GPU),
        "empty": torch.empty(0, 3, device=GPU),
        "transposed": base.t(),
        "view of a large one": large[5:9],
        "every other of a large one": large[::2],
        "expanded": torch.ones(1, 3, device=GPU).expand(5, 3),
        "half": base.half(),
        "bool": base > 3,
        "complex": torch.complex(base, base).conj(),
        "neg": torch.complex(base, base).conj().imag,
        "needs a gradient": base.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(base.clone()),
        "sparse": torch.eye(4, device=GPU).to_sparse(),
        "csr": torch.eye(4, device=GPU).to_sparse_csr(),
        "on the host": torch.arange(5.0),
        "large": large,
        "a large one on the host": torch.arange(float(SIZE)),
    }


def travel(to: str) -> list[str]:
    wrong = []
    for _ in range(2):  # by the second time it is known whether memory can be lent
        for name, sent in samples().items():
            back = rpc.rpc_sync(to, echo, (sent,))
            if back.layout is torch.strided and described(back)[2:4] != described(sent)[2:4] and "every" not in name:
                wrong.append(f"{name}: {described(back)} for {described(sent)}")
            if (back.device, back.dtype, back.requires_grad, type(back)) != (
                sent.device, sent.dtype, sent.requires_grad, type(sent)
            ):  # fmt: skip
                wrong.append(f"{name}: {described(back)} for {described(sent)}")
            if not torch.equal(back.detach().to_dense(), sent.detach().to_dense()):
                wrong.append(f"{name}: other values")
    return wrong


def sharing(to: str) -> list[bool]:
    whole = torch.zeros(SIZE, device=GPU)
    a, b, c, d = rpc.rpc_sync(to, echo, ((whole, whole[10:20], torch.zeros(8, device=GPU), whole.untyped_storage()),))
    b.fill_(7.0)
    same = a.untyped_storage().data_ptr() == d.data_ptr()
    return [a[12].item() == 7.0, a[9].item() == 0.0, c.sum().item() == 0.0, same, len(whole) == len(a)]


def road(to: str) -> str:
    agent = _get_current_rpc_agent().agent
    return str(agent.peers.find(to).shared_memory.device_exchange._state)


def test_everything_arrives(workers: Workers, request: pytest.FixtureRequest) -> None:
    assert workers.run(0, travel, "worker1") == []
    assert workers.run(0, sharing, "worker1") == [True] * 5
    assert workers.run(0, travel, "worker0") == []
    assert workers.run(0, sharing, "worker0") == [True] * 5
    lent = "lent" in request.node.name
    assert workers.run(0, road, "worker1") == ("proven" if lent else "unknown")


def test_everything_arrives_within_a_process() -> None:
    with World(2, timeout=20.0, devices=lambda rank: Wishes({"worker1": {GPU: GPU}})) as world:
        assert world.run(0, travel, "worker1") == []
        assert world.run(0, sharing, "worker1") == [True] * 5


def nothing_is_left(to: str) -> int:
    """Device memory after many calls, beyond what it was."""
    for _ in range(3):
        rpc.rpc_sync(to, echo, (torch.ones(SIZE, device=GPU),))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        rpc.rpc_sync(to, echo, (torch.ones(SIZE, device=GPU),))
    torch.cuda.synchronize()
    tidy([_get_current_rpc_agent().agent.peers.find(to).shared_memory.device_exchange], 0.0)
    return torch.cuda.memory_allocated() - before


def test_lent_memory_comes_back(workers: Workers) -> None:
    assert workers.run(0, nothing_is_left, "worker1") <= 4 * SIZE * 4


def gigabyte(to: str) -> bool:
    sent = torch.arange(1 << 27, device=GPU)
    return torch.equal(rpc.rpc_sync(to, echo, (sent,)), sent)


def test_a_gigabyte(workers: Workers) -> None:
    assert workers.run(0, gigabyte, "worker1")
