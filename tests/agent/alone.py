"""A worker that is alone in its group and can call itself, in the process of the tests."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from remora import rpc

NAME = "alone"


@contextmanager
def worker_alone(graceful: bool = True, **settings: Any) -> Iterator[str]:
    """Start the worker, yield its name, and end it. After an error it is ended at once."""
    with tempfile.TemporaryDirectory(prefix="remora-test-") as folder:
        options = rpc.RemoraRpcBackendOptions(init_method=f"file://{folder}/rendezvous", **settings)
        rpc.init_rpc(NAME, rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield NAME
        except BaseException:
            graceful = False
            raise
        finally:
            if rpc._is_current_rpc_agent_set():
                rpc.shutdown(graceful=graceful)


def wait_until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    """Look again and again; fail if it does not come true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout:g} s"
        time.sleep(0.002)
