"""A recurrent network split over two workers learns to add: two numbers of twelve are marked, their sum is wanted.

    python examples/split_rnn.py [--steps 200] [--seed 0] [--plot curve.png]

The lower layer lives on one worker, the upper layer on another. The sequence goes through in pieces, so while the upper
layer has a piece the lower one has the next. Distributed autograd goes back through time and through both workers; both
layers are called several times in each step. The learning rate follows a torch scheduler, set here for both workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from group import group
from progress import options, progress, save_curve, sparkline, verdict
from remora import autograd
from remora.nn import RemoteModule
from remora.optim import DistributedOptimizer

LENGTH, PIECE, BATCH, WIDTH = 12, 4, 64, 32
GUESSING = 1 / 6  # the error of always saying 1: the variance of the sum of two numbers between 0 and 1


class Lower(nn.Module):
    """Reads the sequence."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.GRU(2, WIDTH, batch_first=True)

    def forward(self, piece: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        features, state = self.layer(piece, state)
        return features, state


class Upper(nn.Module):
    """Reads what the lower layer makes of it, and says the sum so far."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.sum = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        features, state = self.layer(features, state)
        return self.sum(features[:, -1]), state


def some_sums(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of numbers with marks, and the sums of the marked ones."""
    numbers = torch.rand(BATCH, LENGTH, generator=random)
    marked = torch.rand(BATCH, LENGTH, generator=random).topk(2).indices
    marks = torch.zeros(BATCH, LENGTH).scatter(1, marked, 1.0)
    return torch.stack([numbers, marks], dim=2), (numbers * marks).sum(1, keepdim=True)


def sums_of(sequences: Tensor, lower: RemoteModule, upper: RemoteModule) -> Tensor:
    """What the network says."""
    state = upper_state = above = None  # `above` is what the upper layer is working on
    for piece in torch.split(sequences, PIECE, dim=1):
        features, state = lower(piece, state)
        if above is not None:
            _, upper_state = above.wait()
        above = upper.forward_async(features, upper_state)
    assert above is not None
    sums: Tensor = above.wait()[0]
    return sums


def main() -> int:
    chosen = options(__doc__, steps=200)
    random, losses = torch.Generator().manual_seed(chosen.seed), []
    with group("trainer", "lower", "upper"):
        lower = RemoteModule("lower", Lower, args=(chosen.seed,))
        upper = RemoteModule("upper", Upper, args=(chosen.seed,))
        parameters = lower.remote_parameters() + upper.remote_parameters()
        optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps, eta_min=0.003)
        with progress("two layers, two workers", chosen.steps) as show:
            for step in range(1, chosen.steps + 1):
                sequences, sums = some_sums(random)
                with autograd.context() as context_id:
                    loss = nn.functional.mse_loss(sums_of(sequences, lower, upper), sums)
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                schedule.step()
                losses.append(loss.item())
                show(step, error=losses[-1], rate=optimizer.param_groups[0]["lr"])
    last = sum(losses[-10:]) / len(losses[-10:])
    print(f"squared error  {sparkline(losses)}  {losses[0]:.3f} -> {last:.4f} (guessing: {GUESSING:.3f})")
    plot = chosen.plot or Path("split_rnn.png")
    save_curve(plot, "The adding problem, on two workers", "squared error", error=losses, guessing=[GUESSING] * len(losses))
    return verdict(last < GUESSING / 3, f"the network adds: its error is {last / GUESSING:.1%} of that of guessing")


if __name__ == "__main__":
    sys.exit(main())
