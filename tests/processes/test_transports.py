"""The roads between workers: chosen by themselves or as told, with an error that names the address when one is closed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from remora import rpc
from remora.options import FAST_PATHS
from remora.transport import poller as poller_module
from tests.processes import targets
from tests.workers import Workers


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """For code that runs in a worker process."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def join_with(init_method: str, rank: int, world_size: int, settings: dict[str, Any], env: dict[str, str]) -> list[str]:
    """Start a worker; the addresses where it listens."""
    with environment(**env):
        options = rpc.RemoraRpcBackendOptions(init_method=init_method, **settings)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    return list(rpc._get_current_rpc_agent().record.addresses)


def exchange(to: str) -> str:
    """Small and large, both kinds of call; by which road."""
    assert rpc.rpc_sync(to, targets.double, args=(2,)) == 4
    large = torch.rand(1 << 20)
    assert torch.equal(rpc.rpc_sync(to, targets.echo, args=(large,)), large)
    assert torch.futures.wait_all([rpc.rpc_async(to, targets.double, args=(i,)) for i in range(200)])[-1] == 398
    return targets.link_kind(to)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start(workers: Workers, settings: dict[str, Any], env: dict[str, str] | None = None) -> list[list[str]]:
    pending = [workers.start(rank, join_with, workers.init_method, rank, 2, settings, env or {}) for rank in (0, 1)]
    return [each.result(timeout=20.0) for each in pending]


def test_workers_of_one_host_choose_unix_sockets_by_themselves() -> None:
    with Workers(2) as workers:
        assert "unix://" in workers.run(0, exchange, "worker1")
        assert "inproc" in workers.run(0, exchange, "worker0"), "and for itself none at all"


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_transport_may_be_asked_for(transport: str) -> None:
    with Workers(2, options={"transports": [transport]}) as workers:
        for rank in (0, 1):
            assert f"{transport}://" in workers.run(rank, exchange, f"worker{1 - rank}")
        assert f"{transport}://" in workers.run(0, exchange, "worker0"), "for calls to itself too"


def test_the_environment_asks_as_well() -> None:
    with Workers(2, join=False) as workers:
        start(workers, {}, {"REMORA_TRANSPORTS": "tcp"})
        assert "tcp://" in workers.run(0, exchange, "worker1")


def test_ipv6() -> None:
    if not has_ipv6():
        pytest.skip("this host has no IPv6 loopback address")
    with Workers(2, options={"transports": ["tcp"], "host": "::1"}) as workers:
        assert "tcp://[::1]:" in workers.run(0, exchange, "worker1")


def test_the_portable_poller() -> None:
    """Where there is no epoll."""
    with Workers(2, join=False) as workers:
        workers.run_all(use_portable_poller)
        start(workers, {})
        assert workers.run_all(poller) == ["SelectPoller", "SelectPoller"]
        for rank in (0, 1):
            workers.run(rank, exchange, f"worker{1 - rank}")
        assert workers.run(0, targets.call, "worker1", descend, 20) == 20


def use_portable_poller() -> None:
    """As REMORA_POLLER=select does in a process that begins with it."""
    poller_module.FAST_PATHS = replace(FAST_PATHS, epoll=False)  # type: ignore[attr-defined]


def poller() -> str:
    return type(rpc._get_current_rpc_agent().agent.poller).__name__


def descend(depth: int) -> int:
    me = rpc.get_worker_info().id
    return 0 if depth == 0 else 1 + rpc.rpc_sync(1 - me, descend, args=(depth - 1,))


def test_a_worker_falls_back_to_what_both_ends_have() -> None:
    """One listens on TCP only, the other would rather use a Unix socket."""

    def options(rank: int) -> dict[str, Any]:
        return {"transports": ["tcp"]} if rank else {}

    with Workers(2, options=options) as workers:
        assert "tcp://" in workers.run(0, exchange, "worker1")
        assert "tcp://" in workers.run(1, exchange, "worker0")


def test_a_host_name_and_a_port_as_options() -> None:
    with Workers(2, join=False) as workers:
        settings = {"transports": ["tcp"], "host": "localhost", "port": f"{free_port()}-65535"}
        addresses = start(workers, settings)
        ports = [int(found.rsplit(":", 1)[1]) for (found,) in addresses]
        first = int(settings["port"].split("-")[0])  # type: ignore[attr-defined]
        assert all(first <= port <= first + 20 for port in ports)
        assert ports[0] != ports[1], "the second takes the next free one of the range"
        workers.run(0, exchange, "worker1")


def test_host_and_port_from_the_environment() -> None:
    with Workers(2, join=False) as workers:
        port = free_port()
        env = {"REMORA_TRANSPORTS": "tcp", "REMORA_HOST": "127.0.0.1", "REMORA_PORT": f"{port}-{port + 200}"}
        addresses = start(workers, {}, env)
        assert all(port <= int(found.rsplit(":", 1)[1]) <= port + 200 for (found,) in addresses)
        workers.run(0, exchange, "worker1")


def test_an_interface_by_name() -> None:
    with Workers(2, options={"transports": ["tcp"], "interface": "lo"}) as workers:
        assert "tcp://127.0.0.1:" in workers.run(0, exchange, "worker1")


@pytest.fixture
def alone() -> Iterator[Workers]:
    """One process without a worker, for starts that fail. It must be able to start a worker afterwards."""
    with Workers(1, join=False) as workers:
        yield workers
        workers.run(0, join_with, workers.init_method, 0, 1, {}, {})
        assert workers.run(0, targets.call, "worker0", targets.double, 2) == 4


def test_a_port_in_use_is_named(alone: Workers) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"127.0.0.1 port {port}.*[Aa]ddress already in use") as caught:
            alone.run(0, join_with, alone.init_method, 0, 1, {"transports": ["tcp"], "port": port}, {})
        assert type(caught.value).__name__ == "RendezvousError"
        assert "REMORA_PORT" in str(caught.value), "it says what to do"


def test_an_interface_that_is_not_there_is_named(alone: Workers) -> None:
    with pytest.raises(RuntimeError, match=r"no network interface 'tyrell0'.*lo"):
        alone.run(0, join_with, alone.init_method, 0, 1, {"interface": "tyrell0"}, {})


def test_a_host_that_is_not_ours_is_named(alone: Workers) -> None:
    settings = {"host": "192.0.2.1", "transports": ["tcp"], "secret": "long enough to be accepted"}
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1"):
        alone.run(0, join_with, alone.init_method, 0, 1, settings, {})


def test_a_host_name_that_does_not_exist_is_named(alone: Workers) -> None:
    settings = {"host": "no-such-host.invalid", "transports": ["tcp"], "secret": "long enough to be accepted"}
    with pytest.raises(RuntimeError, match=r"no-such-host\.invalid"):
        alone.run(0, join_with, alone.init_method, 0, 1, settings, {})


@pytest.mark.parametrize("port", ["many", "5-2", 70000, "1-99999999"])
def test_a_port_that_is_none_is_refused(port: Any) -> None:
    with Workers(1, join=False) as workers, pytest.raises(ValueError, match=r"[Nn]ot a port"):
        workers.run(0, join_with, workers.init_method, 0, 1, {"port": port}, {})


def test_an_unknown_transport_and_an_unknown_option_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown transport 'pigeon'.*unix"):
        rpc.RemoraRpcBackendOptions(transports=["pigeon"])
    with pytest.raises(TypeError, match=r"unknown option 'colour'.*secret"):
        rpc.RemoraRpcBackendOptions(colour="red")


def test_options_of_torch_are_taken(tmp_path: Any) -> None:
    """`_transports` and `_channels` name parts of TensorPipe: accepted, for the sake of programs that pass them."""
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=2, _transports=["uv"], _channels=["basic"], devices=["cpu"], init_method="env://"
    )
    options.init_method = f"file://{tmp_path}/rendezvous"
    options.rpc_timeout = 7
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert rpc.get_rpc_timeout() == 7
        assert rpc.rpc_sync("worker0", targets.double, args=(2,)) == 4
    finally:
        rpc.shutdown()
