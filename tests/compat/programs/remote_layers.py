"""Data parallel training around a layer that lives on a worker of its own: DDP, RemoteModule and RPC in one program.

Written for torch.distributed.rpc.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

TRAINERS = 2
KEEPER, MASTER = TRAINERS, TRAINERS + 1


class Hybrid(nn.Module):
    def __init__(self, remote):
        super().__init__()
        torch.manual_seed(5)
        self.remote = remote
        self.local = DistributedDataParallel(nn.Linear(4, 1))

    def forward(self, inputs):
        return self.local(torch.relu(self.remote.forward(inputs)))


def train(remote, rank):
    model = Hybrid(remote)
    parameters = [*remote.remote_parameters(), *(rpc.RRef(parameter) for parameter in model.local.parameters())]
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(16, 3, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True)
    losses = []
    for _ in range(20):
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(model(inputs), targets)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    return losses, [parameter.tolist() for parameter in model.local.parameters()]


def run(rank, port):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    name = {KEEPER: "keeper", MASTER: "master"}.get(rank, f"trainer{rank}")
    if rank < TRAINERS:
        dist.init_process_group("gloo", rank=rank, world_size=TRAINERS, init_method=f"tcp://127.0.0.1:{port + 1}")
    rpc.init_rpc(name, rank=rank, world_size=TRAINERS + 2, rpc_backend_options=options)
    if rank == MASTER:
        remote = RemoteModule("keeper", nn.Linear, args=(3, 4))
        outcomes = torch.futures.wait_all(
            [rpc.rpc_async(f"trainer{n}", train, args=(remote, n)) for n in range(TRAINERS)]
        )
        for losses, local in outcomes:
            assert losses[-1] < losses[0], losses
            assert local == outcomes[0][1], "the trainers should agree on what they share"
        print("the loss fell on every trainer, and they agree", flush=True)
    rpc.shutdown()
    if rank < TRAINERS:
        dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(run, args=(int(sys.argv[1]),), nprocs=TRAINERS + 2, start_method="fork")
