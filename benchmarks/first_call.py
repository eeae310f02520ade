"""A program that starts from nothing, joins a group of two and calls the other: `python -m benchmarks.first_call`.

It imports nothing large before its clock runs.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings


def main(module: str, init_method: str, rank: int) -> None:
    """Print what each step took, as JSON."""
    warnings.simplefilter("ignore")
    times = [time.perf_counter()]
    importlib.import_module("torch")  # every program that uses either imports it
    rpc = importlib.import_module(module)
    times.append(time.perf_counter())
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    times.append(time.perf_counter())
    rpc.rpc_sync(f"worker{1 - rank}", abs, args=(-1,))
    times.append(time.perf_counter())
    rpc.shutdown()
    steps = ["import", "init_rpc", "first call"]
    took = {step: times[i + 1] - times[i] for i, step in enumerate(steps)}
    print(json.dumps(took | {"init_rpc and call": took["init_rpc"] + took["first call"]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
