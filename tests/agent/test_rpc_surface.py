"""The smaller public names of `remora.rpc`: starting, backends, options, picklers, looking inside."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from remora import rpc
from remora.rpc import backend_registry
from remora.rpc.internal import PythonUDF
from tests.agent.alone import NAME, worker_alone


def double(x: int) -> int:
    return 2 * x


def options(folder: Path, **settings: Any) -> rpc.TensorPipeRpcBackendOptions:
    return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rendezvous", **settings)


def test_a_worker_knows_itself_and_whether_there_is_one(me: str) -> None:
    assert rpc._is_current_rpc_agent_set()
    assert rpc.get_worker_info() == rpc.WorkerInfo(NAME, 0) == rpc.get_worker_info(worker_name=NAME)
    assert rpc._get_current_rpc_agent().get_worker_infos() == [rpc.WorkerInfo(NAME, 0)]
    rpc.shutdown()
    assert not rpc._is_current_rpc_agent_set()
    with pytest.raises(RuntimeError, match="has not been initialized"):
        rpc._get_current_rpc_agent()


def test_functions_can_require_a_worker(me: str) -> None:
    @rpc.api._require_initialized
    def ask() -> str:
        return rpc.get_worker_info().name

    assert ask() == NAME
    rpc.shutdown()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        ask()


def test_starting_twice_is_refused(me: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="RPC is already initialized"):
        rpc.init_rpc("again", rank=0, world_size=1, rpc_backend_options=options(tmp_path))
    assert rpc.rpc_sync(me, double, args=(2,)) == 4


@pytest.mark.parametrize("backend", ["TENSORPIPE", 3])
def test_a_backend_that_is_none_is_refused(tmp_path: Path, backend: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a member of BackendType.*give rank and world_size by name"):
        rpc.init_rpc("w", backend=backend, rank=0, world_size=1, rpc_backend_options=options(tmp_path))


@pytest.mark.parametrize("kind", [rpc.TensorPipeRpcBackendOptions, rpc.RemoraRpcBackendOptions])
def test_a_place_that_is_no_text_is_refused_where_it_is_given(kind: Any) -> None:
    with pytest.raises(TypeError, match="init_method=29500 is not a str"):
        kind(init_method=29500)


def test_options_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="must be an instance of RpcBackendOptions"):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options={"init_method": "env://"})  # type: ignore[arg-type]


def test_an_init_method_beside_the_options_is_told_where_it_belongs() -> None:
    belongs = r"init_rpc takes no init_method: pass .*TensorPipeRpcBackendOptions\(init_method='tcp://h:1'\)"
    with pytest.raises(TypeError, match=belongs):
        rpc.init_rpc("w", rank=0, world_size=1, init_method="tcp://h:1")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'method'"):
        rpc.init_rpc("w", rank=0, world_size=1, method="tcp://h:1")  # type: ignore[call-arg]


def test_options_of_no_known_backend_are_refused() -> None:
    class Strange(rpc.RpcBackendOptions):
        pass

    with pytest.raises(TypeError, match="Could not infer backend"):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=Strange())


@pytest.mark.parametrize("threads", [0, -1])
def test_a_worker_needs_a_thread(threads: int) -> None:
    with pytest.raises(ValueError, match="num_worker_threads must be positive"):
        rpc.RemoraRpcBackendOptions(num_worker_threads=threads)


def test_device_maps_are_one_to_one_and_grow() -> None:
    found = rpc.TensorPipeRpcBackendOptions(device_maps={"w": {"cpu": "cpu"}})
    found.set_device_map("w", {"cuda:0": "cuda:1"})
    assert found.device_maps["w"][torch.device("cuda:0")] == torch.device("cuda:1")
    with pytest.raises(ValueError, match="1-to-1"):
        found.set_device_map("w", {"cuda:0": "cuda:2"})


def test_both_names_of_the_backend_start_our_worker(tmp_path: Path) -> None:
    for i, backend in enumerate((rpc.BackendType.TENSORPIPE, rpc.BackendType["REMORA"])):
        built = backend_registry.construct_rpc_backend_options(
            backend, rpc_timeout=7, init_method=f"file://{tmp_path}/rendezvous{i}", num_worker_threads=2
        )
        rpc.init_rpc("w", backend=backend, rank=0, world_size=1, rpc_backend_options=built)
        assert rpc.get_rpc_timeout() == 7
        assert rpc._get_debug_info()["agent.thread_pool_size"] == "2"
        rpc.shutdown()


def test_a_new_backend_can_be_registered(tmp_path: Path) -> None:
    made: list[str] = []

    def start(store: Any, name: str, rank: int, world_size: int, rpc_backend_options: Any) -> Any:
        made.append(name)
        return backend_registry.init_backend(
            rpc.BackendType.TENSORPIPE,
            store=store,
            name=name,
            rank=rank,
            world_size=world_size,
            rpc_backend_options=options(tmp_path),
        )

    class Own(rpc.RpcBackendOptions):
        pass

    name = "OWN_OF_THE_TEST"
    try:
        backend = backend_registry.register_backend(name, Own, start)
        assert backend_registry.backend_registered(name)
        assert backend in rpc.BackendType
        assert rpc.BackendType[name] is backend
        with pytest.raises(RuntimeError, match=f"RPC backend {name}: already registered"):
            backend_registry.register_backend(name, Own, start)
        own = backend_registry.construct_rpc_backend_options(backend, init_method=f"file://{tmp_path}/rendezvous")
        rpc.init_rpc("w", backend=backend, rank=0, world_size=1, rpc_backend_options=own)
        assert made == ["w"]
        assert rpc.rpc_sync("w", double, args=(2,)) == 4
        rpc.shutdown()
    finally:
        backend_registry._Registry._members.pop(name, None)
    assert not backend_registry.backend_registered(name)
    with pytest.raises(AttributeError, match=name):
        getattr(rpc.BackendType, name)


def test_requests_can_be_pickled_by_another_pickler(me: str) -> None:
    served: list[PythonUDF] = []

    class Noting:
        def serialize(self, obj: PythonUDF) -> Any:
            served.append(obj)
            return rpc.internal.serialize(obj)

        def deserialize(self, data: bytes, tensors: list[torch.Tensor]) -> Any:
            return rpc.internal.deserialize(data, tensors)

    with rpc.api._use_rpc_pickler(Noting()):
        assert rpc.rpc_sync(me, double, args=(4,)) == 8
        assert rpc.rpc_async(me, torch.nn.functional.relu, args=(torch.ones(3),)).wait().tolist() == [1, 1, 1]
    assert served[0].args == (4,)
    assert len(served) == 2
    assert rpc.rpc_sync(me, double, args=(4,)) == 8
    assert len(served) == 2


def test_what_a_worker_is_doing_can_be_looked_at(narrow: str) -> None:
    gate = threading.Event()
    started = threading.Event()
    gates["here"] = (started, gate)
    before = rpc._get_debug_info()
    assert before["agent.thread_pool_size"] == "1"
    assert before["agent.client_active_calls"] == before["agent.server_active_calls"] == "0"
    assert "agent.gil_average_wait_time_us" not in before
    future = rpc.rpc_async(narrow, wait_at, args=("here",))
    assert started.wait(5.0)
    during = rpc._get_debug_info()
    assert during["agent.client_active_calls"] == during["agent.server_active_calls"] == "1"
    gate.set()
    future.wait()
    rpc.enable_gil_profiling(True)
    assert float(rpc._get_debug_info()["agent.gil_average_wait_time_us"]) >= 0


gates: dict[str, tuple[threading.Event, threading.Event]] = {}


def wait_at(name: str) -> None:
    started, gate = gates[name]
    started.set()
    assert gate.wait(10.0)


def test_settings_show_no_secret() -> None:
    built = rpc.RemoraRpcBackendOptions(secret="do not show this to anyone")
    assert "do not show" not in repr(built)
    assert "do not show" not in repr(built.settings)
    with worker_alone(secret="do not show this to anyone"):
        assert "do not show" not in repr(rpc._get_current_rpc_agent())
