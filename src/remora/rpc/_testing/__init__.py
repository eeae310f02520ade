"""The names of `torch.distributed.rpc._testing`: importing them registers the backend FAULTY_TENSORPIPE."""

from __future__ import annotations

from remora.rpc._testing import faulty_agent_backend_registry
from remora.rpc._testing.faulty_agent_backend_registry import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions


def is_available() -> bool:
    """Always."""
    return True


__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]
