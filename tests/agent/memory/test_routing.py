"""Maps between workers: exchanged when they meet, checked, and followed; on the CPU, which here stands for two devices."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.agent.memory import routing
from remora.agent.memory.device import DeviceExchange
from remora.devices.maps import DeviceMap, Wishes
from remora.rpc import request_builder
from remora.testing.world import World
from remora.wire.tensors.storages import Outgoing
from tests.devices.pretence import CPU, PLACE
from tests.workers import Workers

GPU = torch.device("cuda:0")
META = torch.device("meta")
LARGE = 100_000


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where tensors arrive that are not simply on the CPU."""
    from remora.wire.tensors import rebuild

    seen: list[str] = []
    place = rebuild.storage_on

    def note(device: str, source: Any) -> torch.UntypedStorage:
        seen.append(device)
        return place(device, source)

    monkeypatch.setattr(rebuild, "storage_on", note)
    return seen


def maps_of(first: DeviceMap, second: DeviceMap | None = None) -> Any:
    return lambda rank: Wishes({"worker1": first} if rank == 0 else {"worker0": second} if second else {})


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def device_of(tensor: torch.Tensor) -> str:
    return tensor.device.type


@pytest.mark.parametrize("size", [3, LARGE])
def test_requests_go_by_the_callers_map(arrivals: list[str], size: int) -> None:
    with World(2, devices=maps_of({CPU: PLACE})) as world:
        assert torch.equal(world.run(0, rpc.rpc_sync, "worker1", doubled, (torch.ones(size),)), torch.full((size,), 2.0))
        assert arrivals == ["cpu:0"]
        world.run(1, rpc.rpc_sync, "worker0", doubled, (torch.ones(size),))
        assert arrivals == ["cpu:0"]  # its own map counts for what it asks, and it has none


def test_replies_go_by_the_inverse(arrivals: list[str]) -> None:
    with World(2, devices=maps_of({PLACE: CPU})) as world:
        world.run(0, rpc.rpc_sync, "worker1", doubled, (torch.ones(3),))
        assert arrivals == ["cpu:0"]
        assert world[0]._get_device_map(world[1].get_worker_info()) == {PLACE: CPU}
        assert world[0].get_device_map("worker1") == {PLACE: CPU}
        assert world[1]._get_device_map(world[0].get_worker_info()) == {}


def test_a_map_of_the_cpu_to_itself_changes_nothing(arrivals: list[str]) -> None:
    with World(2, devices=maps_of({CPU: CPU})) as world:
        assert world.run(0, rpc.rpc_sync, "worker1", device_of, (torch.ones(3),)) == "cpu"
    assert arrivals == []


def test_every_kind_of_tensor_follows_the_map() -> None:
    sent = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.nn.Parameter(torch.ones(2)), torch.eye(3).t()]
    sent += [torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8), torch._efficientzerotensor(3)]
    with World(2, devices=maps_of({CPU: META})) as world:
        found = [world.run(0, rpc.rpc_sync, "worker1", device_of, (each,)) for each in (*sent[2:4], torch.ones(LARGE))]
        assert found == ["meta"] * 3
    with World(2, devices=maps_of({CPU: PLACE})) as world:
        for each in sent:
            back = world.run(0, rpc.rpc_sync, "worker1", same, (each,))
            assert type(back) is type(each)
            assert torch.equal(_dense(back), _dense(each))
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        assert world.run(0, rpc.rpc_sync, "worker1", same, (nested,)).size(0) == 2
        a, b, storage = world.run(0, rpc.rpc_sync, "worker1", same, ((sent[3], sent[3][1:], sent[3].untyped_storage()),))
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() == storage.data_ptr()
        assert a.stride() == (1, 3)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def same(value: Any) -> Any:
    return value


def test_remote_and_gradients_follow_it_too(arrivals: list[str]) -> None:
    def run() -> torch.Tensor:
        leaf = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            made = rpc.remote("worker1", doubled, (leaf,)).to_here()
            autograd.backward(context, [made.sum()])
            return autograd.get_gradients(context)[leaf]

    with World(2, devices=maps_of({CPU: PLACE})) as world:
        assert torch.equal(world.run(0, run), torch.full((3,), 2.0))
    assert len(arrivals) >= 2  # the argument, and the gradient of the result


def test_a_gradient_is_put_where_its_tensor_is() -> None:
    from remora.autograd.nodes import Send

    leaf = torch.ones(2, device="meta", requires_grad=True)
    send = Send(1, None, [leaf])  # type: ignore[arg-type]
    [(_, placed)] = send.incoming({0: torch.ones(2)}, {0})
    assert placed.is_meta
    gradient = torch.ones(2)
    [(_, placed)] = Send(1, None, [torch.ones(2, requires_grad=True)]).incoming({0: gradient}, {0})  # type: ignore[arg-type]
    assert placed is gradient


@pytest.mark.parametrize(
    ("first", "second", "refusal"),
    [
        ({"nobody": {CPU: CPU}}, {}, "Node worker0 has invalid target node names in its device maps"),
        ({"worker1": {torch.device("cuda:77"): CPU}}, {}, "Node worker0 has source devices with invalid indices"),
        ({}, {"worker0": {CPU: torch.device("cuda:77")}}, "Node worker1 has target devices with invalid indices"),
        ({}, {"worker0": {CPU: CPU, PLACE: CPU}}, "Node worker1 has duplicated target devices in its device map"),
    ],
)
def test_maps_that_cannot_be_keep_the_group_from_forming(first: Any, second: Any, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        World(2, devices=lambda rank: Wishes(second if rank else first))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is here."""
    monkeypatch.setattr(routing.registry, "counts", dict)


@pytest.mark.usefixtures("no_gpu")
def test_a_tensor_without_a_place_is_refused_before_anything_is_sent() -> None:
    with World(2) as world:
        awaited, requests, replies, gradients = world[0].peer("worker1").routes
        words = r"TensorPipe RPC backend only supports CPU tensors by default.*`set_device_map` on `TensorPipeRpcBackendOp"
        with pytest.raises(RuntimeError, match=words):
            awaited.target(GPU)
        with pytest.raises(RuntimeError, match=words):
            requests.target(GPU)
        with pytest.raises(RuntimeError, match=r"Response device mapping is not available.*cuda:0.*worker1"):
            replies.target(GPU)
        assert gradients.target(GPU) == CPU  # there is none there: over the host, and put in place where it belongs
        assert requests.target(CPU) == CPU


@pytest.mark.usefixtures("no_gpu")
def test_an_automatic_map(monkeypatch: pytest.MonkeyPatch) -> None:
    with World(2, auto_device_map=True) as world:
        assert [way.target(GPU) for way in world[0].peer("worker1").routes] == [CPU] * 4  # it has none of those
    monkeypatch.setattr(routing.registry, "counts", lambda: {"cuda": 1})
    with World(2, auto_device_map=True) as world:
        ways = world[0].peer("worker1").routes
        assert [way.target(GPU) for way in ways] == [GPU] * 4
        assert ways.requests.target(torch.device("cuda:1")) == CPU


def test_without_a_map_nothing_is_asked_of_a_tensor_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outgoing, "target", lambda self, device: pytest.fail("it was asked where it goes"))
    with World(2) as world:
        assert world.run(0, rpc.rpc_sync, "worker1", doubled, (torch.ones(LARGE)[2:],)).numel() == LARGE - 2


def test_a_caller_waits_for_the_copy_of_its_callee_only_if_there_will_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fenced: list[Any] = []
    plain = request_builder.pack_call

    def lending(*args: Any) -> Any:
        kind, packed, flags = plain(*args)
        packed.lent = [b"something"]
        return kind, packed, flags

    monkeypatch.setattr(request_builder, "pack_call", lending)
    monkeypatch.setattr(DeviceExchange, "fence", lambda self, references: fenced.append((self.name, *references)))
    with World(2) as world:
        world.run(0, rpc.rpc_sync, "worker1", doubled, (torch.ones(3),))
        assert fenced == [("worker1", b"something")]
        with pytest.raises(ZeroDivisionError):
            world.run(0, rpc.rpc_sync, "worker1", divide, (1, 0))
        with pytest.raises(TimeoutError):
            world.run(0, rpc.rpc_sync, "worker1", time.sleep, (0.2,), timeout=0.05)
        assert len(fenced) == 1


def divide(a: int, b: int) -> float:
    return a / b


# Processes, and groups that grow.


def ask(to: str) -> str:
    return str(rpc.rpc_sync(to, device_of, (torch.ones(3),)))


def start_alone(name: str, rank: int, url: str, device_map: Any) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, device_maps=device_map)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)


def test_maps_in_a_dynamic_group() -> None:
    with Workers(3, join=False) as workers:
        url = workers.init_method
        workers.run(0, start_alone, "worker0", 0, url, {"worker1": {"cpu": "meta"}, "worker2": {"cpu": "cuda:7"}})
        workers.run(1, start_alone, "worker1", 1, url, {})
        assert workers.run(0, ask, "worker1") == "meta"
        assert workers.run(1, ask, "worker0") == "cpu"
        workers.run(2, start_alone, "worker2", 2, url, {})  # only now is it known what it has
        with pytest.raises(ValueError, match=r"Node worker0 has target devices .* device map for worker2"):
            workers.run(0, ask, "worker2")
        with pytest.raises(ValueError, match="in its device map for worker1"):
            workers.run(2, restart_wrongly, url)


def restart_wrongly(url: str) -> None:
    rpc.shutdown()
    start_alone("worker3", 3, url, {"worker1": {"cuda:9": "cpu"}})
