"""The backend FAULTY_TENSORPIPE: PyTorch's way of writing a fault plan. What it does is `remora.faults`' business.

The first `num_fail_sends` attempts to send each message of the types in `messages_to_fail` fail; those in
`messages_to_delay` arrive so many seconds late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remora.faults.kinds import Fault, MessageFault, Which
from remora.faults.plan import Plan
from remora.rpc import api, backend_registry, constants
from remora.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from remora.vocabulary.messages import MessageType
from remora.worker import Worker

MESSAGES = (
    "RREF_FORK_REQUEST",
    "RREF_CHILD_ACCEPT",
    "RREF_USER_DELETE",
    "CLEANUP_AUTOGRAD_CONTEXT_REQ",
    "PYTHON_REMOTE_CALL",
    "SCRIPT_REMOTE_CALL",
    "PYTHON_CALL",
    "SCRIPT_CALL",
    "PYTHON_RREF_FETCH_CALL",
    "SCRIPT_RREF_FETCH_CALL",
)


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """PyTorch's options of a fault plan: the messages that fail, how often, and those that come late."""

    def __init__(
        self,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] | None = None,
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        self.messages_to_fail = list(messages_to_fail or ())
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends
        self.settings.faults = str(self.plan)

    @property
    def plan(self) -> Plan:
        """The same as a fault plan."""
        if isinstance(self.num_fail_sends, bool) or not isinstance(self.num_fail_sends, int):
            raise TypeError(f"num_fail_sends must be an int, got {self.num_fail_sends!r}")
        if self.num_fail_sends < 0:
            raise ValueError(f"num_fail_sends should not be negative, got {self.num_fail_sends}")
        often = Which("first", self.num_fail_sends, each=True)
        faults: list[Fault] = [MessageFault("fail", _kind(name), which=often) for name in self.messages_to_fail]
        late = self.messages_to_delay.items()
        faults += [MessageFault("delay", _kind(name), seconds=float(seconds)) for name, seconds in late]
        return Plan(tuple(faults))


class FaultyTensorPipeAgent(Worker):
    """A worker under such a plan."""


def _kind(name: str) -> MessageType:
    if name not in MESSAGES:
        raise RuntimeError(f"No mapping to rpc::MessageType exists for {name}: choose from {', '.join(MESSAGES)}")
    return MessageType[name]


def _faulty_tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    messages_to_fail: Sequence[str] | None = None,
    messages_to_delay: Mapping[str, float] | None = None,
    num_fail_sends: int = 0,
    **kwargs: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads, rpc_timeout, init_method, messages_to_fail, messages_to_delay, num_fail_sends
    )


def _faulty_tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> FaultyTensorPipeAgent:
    options = rpc_backend_options
    if not isinstance(options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`, got {options!r}")
    if not world_size:
        raise ValueError("a group with the backend FAULTY_TENSORPIPE is a static one: pass its world_size")
    options.settings.faults = str(options.plan)  # they may have been changed since
    return FaultyTensorPipeAgent(
        name, rank, world_size, store, options.rpc_timeout, options.num_worker_threads, options.settings, api.CALLS
    )


if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend(
        "FAULTY_TENSORPIPE",
        _faulty_tensorpipe_construct_rpc_backend_options_handler,
        _faulty_tensorpipe_init_backend_handler,
    )
