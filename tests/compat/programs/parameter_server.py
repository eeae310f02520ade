"""A parameter server that averages the gradients of its trainers in batches: every trainer gets the model when all are in.

Written for torch.distributed.rpc.
"""

import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim

TRAINERS = 2
STEPS = 10


class ParameterServer:
    def __init__(self, batch_size):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.batch_size = batch_size
        self.lock = threading.Lock()
        self.future_model = torch.futures.Future()
        self.arrived = 0
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(server_rref, gradients):
        self = server_rref.local_value()
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad += gradient
        with self.lock:
            self.arrived += 1
            waiting = self.future_model
            if self.arrived >= self.batch_size:
                for parameter in self.model.parameters():
                    parameter.grad /= self.batch_size
                self.arrived = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                waiting.set_result(self.model)
                self.future_model = torch.futures.Future()
        return waiting


class Trainer:
    def __init__(self, server_rref, seed):
        self.server_rref = server_rref
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(16, 4, generator=generator)
        self.targets = self.inputs.sum(dim=1, keepdim=True)

    def train(self):
        model = self.server_rref.rpc_sync().get_model()
        losses = []
        for _ in range(STEPS):
            loss = nn.functional.mse_loss(model(self.inputs), self.targets)
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            model = rpc.rpc_sync(
                self.server_rref.owner(),
                ParameterServer.update_and_fetch_model,
                args=(self.server_rref, [parameter.grad for parameter in model.parameters()]),
            )
        return losses


def run_trainer(server_rref, seed):
    return Trainer(server_rref, seed).train()


def run(rank, port):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, init_method=f"tcp://127.0.0.1:{port}")
    if rank:
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
    else:
        rpc.init_rpc("server", rank=0, world_size=TRAINERS + 1, rpc_backend_options=options)
        server_rref = rpc.RRef(ParameterServer(TRAINERS))
        futures = [rpc.rpc_async(f"trainer{n}", run_trainer, (server_rref, n)) for n in range(1, TRAINERS + 1)]
        for losses in torch.futures.wait_all(futures):
            assert losses[-1] < losses[0] / 2, losses
        print("the loss fell on every trainer", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    import sys

    mp.spawn(run, args=(int(sys.argv[1]),), nprocs=TRAINERS + 1)
