"""A parameter server with three trainers: who likes what, learned from ratings that are spread over the trainers.

    python examples/parameter_server.py [--steps 150] [--trainers 3] [--seed 0] [--plot curve.png]

The server owns the model, a vector for every user and every item; their product is the rating. Each trainer has ratings of
its own, that the others never see. It calls the model on the server, and distributed autograd brings the gradients back
there. Each has an optimizer of its own and never waits for the others: asynchronous training, as in "Hogwild".
"""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor, nn

from group import group
from progress import options, progress, save_curve, sparkline, verdict
from remora import autograd, rpc
from remora.nn import RemoteModule
from remora.optim import DistributedOptimizer
from remora.rpc import RRef

USERS, ITEMS, TASTES = 200, 100, 3
NOISE = 0.2
RATINGS_EACH, BATCH = 3000, 256
Ratings = tuple[Tensor, Tensor, Tensor]  # users, items, how much they like them


def some_ratings(count: int, seed: int, world: int) -> Ratings:
    """Ratings by people with hidden tastes; the same people in the same world."""
    hidden, random = torch.Generator().manual_seed(world), torch.Generator().manual_seed(seed)
    tastes, traits = (torch.randn(n, TASTES, generator=hidden) for n in (USERS, ITEMS))
    users, items = (torch.randint(0, n, (count,), generator=random) for n in (USERS, ITEMS))
    liking = (tastes[users] * traits[items]).sum(1) / TASTES**0.5
    return users, items, 3.0 + liking + NOISE * torch.randn(count, generator=random)


class Tastes(nn.Module):
    """Lives on the server."""

    def __init__(self, seed: int, size: int = 8) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.users = nn.Parameter(0.3 * torch.randn(USERS, size, generator=random))
        self.items = nn.Parameter(0.3 * torch.randn(ITEMS, size, generator=random))
        self.average = nn.Parameter(torch.zeros(()))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.average + (self.users[users] * self.items[items]).sum(1)


class Judge:
    """On the server: hears of every step, and tries the model on ratings that no trainer has."""

    def __init__(self, model: nn.Module, unseen: Ratings) -> None:
        self._model, self._unseen, self._lock = model, unseen, threading.Lock()
        self.training: list[float] = []
        self.errors = [self._error()]

    def step_done(self, loss: float) -> None:
        with self._lock:
            self.training.append(math.sqrt(loss))
            self.errors.append(self._error())

    def _error(self) -> float:
        users, items, ratings = self._unseen
        with torch.no_grad():
            return math.sqrt(nn.functional.mse_loss(self._model(users, items), ratings).item())


def train(model: RemoteModule, judge: RRef[Judge], seed: int, world: int, steps: int) -> None:
    """What a trainer does."""
    users, items, ratings = some_ratings(RATINGS_EACH, seed, world)
    random = torch.Generator().manual_seed(seed)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.remote_parameters(), lr=0.03)
    for _ in range(steps):
        chosen = torch.randint(0, RATINGS_EACH, (BATCH,), generator=random)
        with autograd.context() as context_id:
            loss = nn.functional.mse_loss(model(users[chosen], items[chosen]), ratings[chosen])
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        judge.rpc_sync().step_done(loss.item())


def main() -> int:
    chosen = options(__doc__, steps=150, trainers=3)
    trainers = [f"trainer{number}" for number in range(1, chosen.trainers + 1)]
    total = chosen.steps * len(trainers)
    with group("server", *trainers):
        model = RemoteModule("server", Tastes, args=(chosen.seed,))
        judge = Judge(model.get_module_rref().local_value(), some_ratings(2000, -1, chosen.seed))
        everyone = [
            rpc.rpc_async(trainer, train, args=(model, RRef(judge), number, chosen.seed, chosen.steps), timeout=0)
            for number, trainer in enumerate(trainers, 1)
        ]
        with progress(f"{len(trainers)} trainers", total) as show:
            while not all(each.done() for each in everyone):
                show(len(judge.training), error=judge.errors[-1])
                threading.Event().wait(0.05)
            show(total, error=judge.errors[-1])
        for each in everyone:
            each.wait()  # or say what went wrong
    first, last = judge.errors[0], judge.errors[-1]
    print(f"error on ratings nobody trained with  {sparkline(judge.errors)}  {first:.2f} -> {last:.2f} (noise: {NOISE})")
    save_curve(
        chosen.plot or Path("parameter_server.png"), "Parameter server with asynchronous trainers", "error of a rating",
        unseen=judge.errors, training=judge.training,
    )  # fmt: skip
    return verdict(last < first / 3, f"{total} steps by {len(trainers)} trainers, error down to {last / first:.0%}")


if __name__ == "__main__":
    sys.exit(main())
