"""Every rank of a torchrun job asks the next one for its name. Imports torch only."""

from __future__ import annotations

import os

import torch.distributed.rpc as rpc


def name() -> str:
    return rpc.get_worker_info().name


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    neighbour = f"worker{(rank + 1) % size}"
    assert rpc.rpc_sync(neighbour, name) == neighbour
    print(f"worker{rank} runs on {rpc.init_rpc.__module__}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
