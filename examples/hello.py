"""Two workers on this machine; one calls the other."""

import multiprocessing
import os

import torch

from remora import rpc


def run(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)))
        squares = [rpc.rpc_async("worker1", pow, args=(n, 2)) for n in range(5)]
        print([square.wait() for square in squares])
        words = rpc.remote("worker1", str.split, args=("so it is so",))  # lives there; this is a reference
        print(words.rpc_sync().count("so"), words.to_here())
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    for rank in range(2):
        multiprocessing.get_context("spawn").Process(target=run, args=(rank,)).start()
