"""Maps between a GPU and the CPU, tensors without a map, and what is done without one if the program says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remora import rpc
from remora.devices.maps import Wishes
from remora.testing.world import World
from tests.workers import Workers

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


def devices_of(*tensors: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
    return [str(each.device) for each in tensors], [each + 1 for each in tensors]


def on_the_gpu() -> torch.Tensor:
    return torch.ones(3, device=GPU)


@pytest.mark.parametrize(
    ("device_map", "sent", "there", "back"),
    [
        ({GPU: GPU}, [GPU, CPU], ["cuda:0", "cpu"], ["cuda:0", "cpu"]),
        ({CPU: GPU}, [CPU, CPU], ["cuda:0", "cuda:0"], ["cpu", "cpu"]),
        ({GPU: CPU}, [GPU, GPU], ["cpu", "cpu"], ["cuda:0", "cuda:0"]),
        ({GPU: CPU, CPU: GPU}, [GPU, CPU], ["cpu", "cuda:0"], ["cuda:0", "cpu"]),
    ],
)
def test_requests_go_by_the_map_and_replies_by_its_inverse(
    device_map: dict[torch.device, torch.device], sent: list[torch.device], there: list[str], back: list[str]
) -> None:
    with World(2, timeout=20.0, devices=lambda rank: Wishes({"worker1": device_map} if rank == 0 else {})) as world:
        for size in (2, 100_000):
            tensors = tuple(torch.arange(size, device=device) for device in sent)
            seen, returned = world.run(0, rpc.rpc_sync, "worker1", devices_of, tensors)
            assert (seen, [str(each.device) for each in returned]) == (there, back)
            assert all(torch.equal(each.cpu(), torch.arange(size) + 1) for each in returned)


def test_without_a_map_nothing_is_sent() -> None:
    with World(2, timeout=20.0) as world:
        with pytest.raises(RuntimeError, match=r"only supports CPU tensors by default.*`set_device_map` on"):
            world.run(0, rpc.rpc_sync, "worker1", devices_of, (torch.ones(2, device=GPU),))
        with pytest.raises(RuntimeError, match="Response device mapping is not available"):
            world.run(0, rpc.rpc_sync, "worker1", on_the_gpu)
        assert world.run(0, rpc.rpc_sync, "worker1", torch.add, (torch.ones(2), 1)).sum() == 4


def test_an_automatic_map_goes_to_the_same_device() -> None:
    with World(2, timeout=20.0, auto_device_map=True) as world:
        seen, back = world.run(0, rpc.rpc_sync, "worker1", devices_of, (torch.ones(2, device=GPU),))
        assert (seen, str(back[0].device)) == (["cuda:0"], "cuda:0")
        assert world.run(0, rpc.rpc_sync, "worker1", on_the_gpu).is_cuda


@pytest.mark.parametrize("index", [torch.cuda.device_count(), 99])
def test_devices_that_do_not_exist(index: int) -> None:
    wrong: Any = torch.device("cuda", index)
    refusal = "Node worker0 has {} devices with invalid indices in its device map for worker1"
    with pytest.raises(ValueError, match=refusal.format("source")):
        World(2, devices=lambda rank: Wishes({f"worker{1 - rank}": {wrong: GPU}}))
    with pytest.raises(ValueError, match=refusal.format("target")):
        World(2, devices=lambda rank: Wishes({f"worker{1 - rank}": {GPU: wrong}}))


def cuda_is_started_by_a_call() -> bool:
    assert rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).sum() == 4
    return torch.cuda.is_initialized()


def test_a_worker_that_sends_no_tensors_on_devices_starts_none() -> None:
    maps = {f"worker{other}": {"cuda:0": "cuda:0"} for other in range(2)}
    with Workers(2, options={"device_maps": maps}, leak_timeout=None) as workers:
        assert workers.run(0, cuda_is_started_by_a_call) is False
        assert workers.run(1, torch.cuda.is_initialized) is False
