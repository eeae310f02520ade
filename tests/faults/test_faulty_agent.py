"""PyTorch's faulty agent: its options are a fault plan, and are checked; its backend disturbs no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from remora import rpc
from remora.errors import CallNotSent
from remora.rpc import _testing, backend_registry
from remora.rpc._testing import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions
from remora.rpc._testing.faulty_agent_backend_registry import MESSAGES
from tests.workers import Workers


def test_the_options_are_a_plan() -> None:
    options = FaultyTensorPipeRpcBackendOptions(
        num_worker_threads=8,
        rpc_timeout=30.0,
        init_method="file:///x",
        messages_to_fail=["RREF_FORK_REQUEST", "PYTHON_CALL"],
        messages_to_delay={"SCRIPT_CALL": 1.5},
        num_fail_sends=3,
    )
    assert (options.num_worker_threads, options.rpc_timeout, options.init_method) == (8, 30.0, "file:///x")
    assert str(options.plan) == "fail RREF_FORK_REQUEST * 3 each; fail PYTHON_CALL * 3 each; delay SCRIPT_CALL * 1.5s"
    assert options.settings.faults == str(options.plan)


def test_without_anything_nothing_goes_wrong() -> None:
    options = FaultyTensorPipeRpcBackendOptions()
    assert (options.messages_to_fail, options.messages_to_delay, options.num_fail_sends) == ([], {}, 0)
    assert not options.plan


@pytest.mark.parametrize("name", MESSAGES)
def test_the_messages_of_pytorch_can_be_named(name: str) -> None:
    assert FaultyTensorPipeRpcBackendOptions(messages_to_fail=[name], num_fail_sends=1).plan


def test_others_cannot() -> None:
    for options in ({"messages_to_fail": ["REMOTE_RET"]}, {"messages_to_delay": {"NONSENSE": 1.0}}):
        with pytest.raises(RuntimeError, match="No mapping to rpc::MessageType exists for"):
            FaultyTensorPipeRpcBackendOptions(**options)  # type: ignore[arg-type]


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError):
        FaultyTensorPipeRpcBackendOptions(num_fail_sends=-1)
    with pytest.raises(TypeError):
        FaultyTensorPipeRpcBackendOptions(num_fail_sends="3")  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        FaultyTensorPipeRpcBackendOptions(messages_to_delay={"PYTHON_CALL": -1.0})


def test_the_backend_wants_its_own_options_and_a_static_group() -> None:
    backend = backend_registry.BackendType["FAULTY_TENSORPIPE"]
    with pytest.raises(TypeError, match="FaultyTensorPipeRpcBackendOptions"):
        backend_registry.init_backend(
            backend, store=None, name="a", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions()
        )
    with pytest.raises(ValueError, match="world_size"):
        backend_registry.init_backend(
            backend, store=None, name="a", rank=0, world_size=None, rpc_backend_options=FaultyTensorPipeRpcBackendOptions()
        )


def test_registering_it_leaves_other_backends_what_they_were() -> None:
    """In a process that has not imported it yet."""
    program = """
from remora import rpc
before = rpc.BackendType.TENSORPIPE
assert not rpc.backend_registry.backend_registered("FAULTY_TENSORPIPE")
import remora.rpc._testing
assert rpc.backend_registry.backend_registered("FAULTY_TENSORPIPE")
assert rpc.BackendType.TENSORPIPE is before and isinstance(before, rpc.BackendType)
options = rpc.backend_registry.construct_rpc_backend_options(rpc.BackendType.FAULTY_TENSORPIPE, num_fail_sends=2)
assert type(options) is remora.rpc._testing.FaultyTensorPipeRpcBackendOptions
assert rpc._backend_and_options(None, options)[0] is rpc.BackendType.FAULTY_TENSORPIPE
assert rpc._backend_and_options(None, rpc.TensorPipeRpcBackendOptions())[0] is before
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stderr


def test_it_is_available() -> None:
    assert _testing.is_available()


def join(rank: int, init_method: str) -> str:
    options = FaultyTensorPipeRpcBackendOptions(
        init_method=init_method, messages_to_fail=["PYTHON_CALL"], num_fail_sends=1
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return type(rpc._get_current_rpc_agent()).__name__


def call_twice() -> tuple[str, int]:
    try:
        rpc.rpc_sync("worker1", int, args=("7",))
    except CallNotSent as error:
        return str(error), rpc.rpc_sync("worker1", int, args=("7",))
    return "", 0


def test_the_first_attempts_with_each_payload_fail() -> None:
    with Workers(2, join=False) as workers:
        joining = [workers.start(rank, join, rank, workers.init_method) for rank in range(2)]
        assert [each.result() for each in joining] == [FaultyTensorPipeAgent.__name__] * 2
        text, value = workers.run(0, call_twice)
        assert text.startswith("RPCErr:2:Send attempt failed intentionally for")
        assert value == 7
        workers.run_all(rpc.shutdown, graceful=False)
