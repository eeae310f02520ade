"""A few hand-overs by every road, with late kernels before and after, for a tool that looks on. Not a test.

    compute-sanitizer --tool memcheck --target-processes all python -m tests.gpu.hand_overs
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch

from remora import rpc
from tests.gpu.conftest import identical_maps
from tests.gpu.late import late, seen

ROADS: dict[str, dict[str, Any]] = {
    "lent": {},
    "TCP": {"device_memory": 0, "shared_memory": 0, "transports": ["tcp"]},
    "shared memory": {"device_memory": 0},
}
SIZES = [250_000, 10_000_000, 10_000_000]  # elements: one piece, and several
LIMIT = 80.0  # seconds for one road


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def there_and_back(value: float, size: int) -> list[float]:
    """What the callee saw, and what came back: the value, though the tensor is changed at once."""
    tensor = late(value, size)
    future = rpc.rpc_async("worker1", seen, (tensor,))
    tensor.fill_(-1.0)
    found = [future.wait()]
    tensor.fill_(value)
    back = rpc.rpc_sync("worker1", same, (tensor,))
    tensor.fill_(-1.0)
    return [*found, seen(back)]


def live(rank: int, init_method: str, road: str) -> None:
    options = rpc.RemoraRpcBackendOptions(
        init_method=init_method, rpc_timeout=LIMIT, device_maps=identical_maps(rank, 2), **ROADS[road]
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found = [there_and_back(float(n), size) for n, size in enumerate(SIZES, 1)] if rank == 0 else []
    rpc.shutdown()
    if found:
        print(f"{road}: {found}", flush=True)
        sys.exit(found != [[float(n)] * 2 for n, _ in enumerate(SIZES, 1)])


def run(road: str) -> bool:
    """Whether all went well."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="remora-") as folder:
        workers = [spawn.Process(target=live, args=(rank, f"file://{folder}/store", road)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LIMIT)
            worker.kill()
            worker.join()
    return all(worker.exitcode == 0 for worker in workers)


def main() -> int:
    if not torch.cuda.device_count():
        print("There is no GPU here.")
        return 1
    failed = [road for road in ROADS if not run(road)]
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
