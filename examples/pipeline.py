"""A pipeline of three stages, each on a worker of its own, learns to tell three spirals apart.

    python examples/pipeline.py [--steps 80] [--seed 0] [--pieces 4] [--plot curve.png]

A batch goes through in pieces (micro-batches): while the second stage has the first piece, the first stage has the second.
Between the stages go references, not values: a stage fetches what it needs from the stage before, and nothing passes
through the trainer but the pieces at the beginning and the scores at the end.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from group import group
from progress import options, progress, save_curve, sparkline, verdict
from remora import autograd, rpc
from remora.optim import DistributedOptimizer
from remora.rpc import RRef

ARMS, BATCH, WIDTH = 3, 256, 64
LAYERS = [(2, WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, ARMS)]  # of each stage


def some_points(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points on spirals, and the arm that each is on."""
    arms = torch.randint(0, ARMS, (count,), generator=random)
    way = torch.rand(count, generator=random)
    angles = arms * (2 * math.pi / ARMS) + way * 4.5
    points = torch.stack([way * angles.cos(), way * angles.sin()], dim=1)
    return 2 * points + 0.03 * torch.randn(count, 2, generator=random), arms


class Stage:
    """A few layers of the network, on a worker of their own."""

    def __init__(self, sizes: tuple[int, ...], is_last: bool, seed: int) -> None:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        self.layers = nn.Sequential(*(layers[:-1] if is_last else layers))

    def forward(self, piece: RRef[Tensor]) -> Tensor:
        """Fetch a piece from wherever it is, and do our part."""
        result: Tensor = self.layers(piece.to_here())
        return result

    def parameters(self) -> list[RRef[Tensor]]:
        return [RRef(parameter) for parameter in self.layers.parameters()]


def scores_of(points: Tensor, stages: list[RRef[Stage]], pieces: int) -> Tensor:
    """Send the points through all stages. Nothing here waits before the last piece is under way."""
    results: list[torch.futures.Future[Tensor]] = []
    for piece in points.chunk(pieces):
        reference: RRef[Tensor] = RRef(piece)
        for stage in stages[:-1]:
            reference = stage.remote().forward(reference)
        results.append(stages[-1].rpc_async().forward(reference))
    return torch.cat(torch.futures.wait_all(results))


def main() -> int:
    chosen = options(__doc__, steps=80, pieces=4)
    random, losses, accuracies = torch.Generator().manual_seed(chosen.seed), [], []
    workers = [f"stage{number}" for number in range(1, len(LAYERS) + 1)]
    with group("trainer", *workers):
        stages: list[RRef[Stage]] = [
            rpc.remote(worker, Stage, args=(sizes, worker == workers[-1], chosen.seed))
            for worker, sizes in zip(workers, LAYERS, strict=True)
        ]
        parameters = [rref for stage in stages for rref in stage.rpc_sync().parameters()]
        optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.01)
        with progress(f"{len(stages)} stages, {chosen.pieces} pieces", chosen.steps) as show:
            for step in range(1, chosen.steps + 1):
                points, labels = some_points(BATCH, random)
                with autograd.context() as context_id:
                    scores = scores_of(points, stages, chosen.pieces)
                    loss = nn.functional.cross_entropy(scores, labels)
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                losses.append(loss.item())
                accuracies.append((scores.argmax(1) == labels).float().mean().item())  # no point was ever seen before
                show(step, loss=losses[-1], right=accuracies[-1])
    print(f"right on points never seen before  {sparkline(accuracies)}  {accuracies[0]:.0%} -> {accuracies[-1]:.0%}")
    plot = chosen.plot or Path("pipeline.png")
    save_curve(plot, "Three spirals, a pipeline of three stages", "", loss=losses, right=accuracies)
    return verdict(accuracies[-1] > 0.8, f"the pipeline tells {ARMS} spirals apart: {accuracies[-1]:.1%} right")


if __name__ == "__main__":
    sys.exit(main())
