"""The current worker of this process, under the names of `torch.distributed.rpc.api`: set, looked up, forgotten."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from remora.agent.runtime.current import acting_worker, process_state
from remora.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


def _set_and_start_rpc_agent(agent: Worker) -> None:
    """Make a worker the current one of this process and let it serve."""
    process_state.worker, process_state.forked_from = agent, ""
    try:
        agent.start()
    except BaseException:
        _reset_current_rpc_agent()
        agent.stop()
        raise


def _is_current_rpc_agent_set() -> bool:
    return process_state.worker is not None


def _get_current_rpc_agent() -> Worker:
    """Return the worker that makes a call: that whose function the thread runs, else the current one of the process."""
    worker: Worker = acting_worker()
    return worker


def _reset_current_rpc_agent() -> None:
    process_state.worker = None


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that needs a current worker."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        acting_worker()
        return func(*args, **kwargs)

    return wrapper
