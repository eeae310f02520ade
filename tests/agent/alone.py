"""A worker that is alone in its group and can call itself, in the process of the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from remora import rpc
from tests.eventually import eventually

NAME = "alone"
wait_until = eventually  # its name in the tests of channels and references


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
