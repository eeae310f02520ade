"""Default times and sizes, under PyTorch's names."""

from __future__ import annotations

from datetime import timedelta

from remora.agent.calls import UNSET_TIMEOUT
from remora.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT,
    DEFAULT_SHUTDOWN_TIMEOUT,
)

DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT
UNSET_RPC_TIMEOUT = UNSET_TIMEOUT
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]
