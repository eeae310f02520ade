"""A language model whose embedding and decoder live on another worker: distributed autograd, and an optimizer for all.

Written for torch.distributed.rpc.
"""

import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

WORDS, SIZE, BATCH, LENGTH = 20, 8, 4, 5


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(WORDS, SIZE)

    def forward(self, words):
        return self.table(words)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(SIZE, WORDS)

    def forward(self, states):
        return self.linear(states)


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


def parameter_rrefs(module):
    return [RRef(parameter) for parameter in module.parameters()]


class SplitModel(nn.Module):
    def __init__(self, server):
        super().__init__()
        torch.manual_seed(3)
        self.embedding_rref = rpc.remote(server, Embedding)
        self.embedding_rref.rpc_sync().train()  # it is made: two that are being made at once would share a generator
        self.rnn = nn.LSTM(SIZE, SIZE)
        self.decoder_rref = rpc.remote(server, Decoder)

    def forward(self, words, hidden):
        embedded = remote_method(Embedding.forward, self.embedding_rref, words)
        output, hidden = self.rnn(embedded, hidden)
        return remote_method(Decoder.forward, self.decoder_rref, output), hidden

    def parameter_rrefs(self):
        remote = [
            rpc.rpc_sync(rref.owner(), call_method, args=(parameter_rrefs, rref))
            for rref in (self.embedding_rref, self.decoder_rref)
        ]
        return [*remote[0], *parameter_rrefs(self.rnn), *remote[1]]


def train():
    model = SplitModel("server")
    optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=1.0)
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(WORDS, (LENGTH, BATCH), generator=generator)
    targets = torch.roll(words, -1, 0).reshape(-1)
    losses = []
    hidden = (torch.zeros(1, BATCH, SIZE), torch.zeros(1, BATCH, SIZE))
    for _ in range(25):
        with dist_autograd.context() as context_id:
            hidden = tuple(state.detach() for state in hidden)
            output, hidden = model(words, hidden)
            loss = nn.functional.cross_entropy(output.view(-1, WORDS), targets)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    return losses


def run(rank, port):
    rpc.init_rpc(
        ("trainer", "server")[rank],
        backend=rpc.BackendType.TENSORPIPE,
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}", _transports=["uv"], _channels=["basic"]
        ),
    )
    if rank == 0:
        losses = train()
        assert losses[-1] < losses[0] * 0.8, losses
        print(f"the loss fell through both workers, from {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.start_processes(run, args=(int(sys.argv[1]),), nprocs=2, start_method="fork")
