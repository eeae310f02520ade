"""Actors and a learner: three workers balance poles on carts, a fourth learns from what they live through.

    python examples/actor_learner.py [--steps 60] [--actors 3] [--seed 0] [--plot curve.png]

Each actor has carts of its own. It gets the policy, plays one episode with every cart and sends home what it saw and did.
The learner takes the first episodes that arrive, improves the policy (REINFORCE with a learned baseline) and sends it out
again; the other actors are still playing meanwhile, by a policy that is a little older.
"""

from __future__ import annotations

import math
import queue
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from group import group
from progress import options, progress, save_curve, sparkline, verdict
from remora import rpc

CARTS, LONGEST, DISCOUNT = 16, 200, 0.98
PATIENCE = 60.0


class Carts:
    """Carts on a track, each with a pole on a hinge; a push to the left or to the right fifty times a second.

    The physics of the cart-pole of Barto, Sutton and Anderson (1983). The state of a cart: where it is and how fast, the
    angle of the pole and how fast that changes.
    """

    GRAVITY, CART, POLE, HALF_LENGTH, PUSH, TICK = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
    TRACK, STEEPEST = 2.4, math.radians(12)

    def __init__(self, count: int, random: torch.Generator) -> None:
        self.states = 0.1 * (torch.rand(count, 4, generator=random) - 0.5)

    def push(self, to_the_right: Tensor) -> Tensor:
        """One push for each cart; which of them are out of bounds after it."""
        _, speed, angle, turn = self.states.unbind(1)
        force = torch.where(to_the_right, self.PUSH, -self.PUSH)
        mass, sine, cosine = self.CART + self.POLE, angle.sin(), angle.cos()
        drive = (force + self.POLE * self.HALF_LENGTH * turn**2 * sine) / mass
        inertia = self.HALF_LENGTH * (4 / 3 - self.POLE * cosine**2 / mass)
        twist = (self.GRAVITY * sine - cosine * drive) / inertia
        thrust = drive - self.POLE * self.HALF_LENGTH * twist * cosine / mass
        self.states = self.states + self.TICK * torch.stack([speed, thrust, turn, twist], dim=1)
        return (self.states[:, 0].abs() > self.TRACK) | (self.states[:, 2].abs() > self.STEEPEST)


@dataclass
class Episodes:
    """What one actor lived through: one row for each tick, one column for each cart."""

    states: Tensor
    actions: Tensor
    running: Tensor  # whether the pole was still up when the action was taken
    up_at_the_end: Tensor

    def returns(self) -> Tensor:
        """What each action led to: ticks that the pole stayed up, later ones counting less.

        A pole that is up when time is over is taken to stay up, or else the last actions would seem to be bad ones.
        """
        result, later = torch.zeros(self.running.shape), self.up_at_the_end / (1 - DISCOUNT)
        for tick in reversed(range(len(result))):
            result[tick] = later = self.running[tick] * (1 + DISCOUNT * later)
        return result

    def mean_length(self) -> float:
        return self.running.sum(0).float().mean().item()


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs))


def play(policy: nn.Module, seed: int) -> Episodes:
    """What an actor does: one episode with each of its carts."""
    random = torch.Generator().manual_seed(seed)
    carts, up = Carts(CARTS, random), torch.ones(CARTS, dtype=torch.bool)
    states: list[Tensor] = []
    actions: list[Tensor] = []
    running: list[Tensor] = []
    with torch.no_grad():
        while len(states) < LONGEST and up.any():
            chosen = torch.multinomial(policy(carts.states).softmax(1), 1, generator=random)[:, 0]
            states.append(carts.states)
            actions.append(chosen)
            running.append(up)
            up = up & ~carts.push(chosen == 1)
    return Episodes(torch.stack(states), torch.stack(actions), torch.stack(running), up)


class Learner:
    """The policy, and how it becomes better."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy, self.baseline = network(2), network(1)
        self._optimizer = torch.optim.Adam([*self.policy.parameters(), *self.baseline.parameters()], lr=0.02)

    def learn(self, episodes: Episodes) -> None:
        """Make what went better than expected more likely."""
        running, returns = episodes.running, episodes.returns() / 20
        expected = self.baseline(episodes.states)[..., 0]
        advantage = (returns - expected).detach()
        advantage = (advantage - advantage[running].mean()) / (advantage[running].std() + 0.1)
        chances = self.policy(episodes.states).log_softmax(2).gather(2, episodes.actions[..., None])[..., 0]
        loss = (-chances * advantage + (expected - returns) ** 2)[running].mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def main() -> int:
    chosen = options(__doc__, steps=60, actors=3)
    actors = [f"actor{number}" for number in range(1, chosen.actors + 1)]
    learner, lengths = Learner(chosen.seed), []
    arrived: queue.Queue[tuple[str, torch.futures.Future[Episodes]]] = queue.Queue()

    def send_out(actor: str, seed: int) -> None:
        playing = rpc.rpc_async(actor, play, args=(learner.policy, seed))
        playing.add_done_callback(lambda future: arrived.put((actor, future)))

    with group("learner", *actors):
        for number, actor in enumerate(actors):
            send_out(actor, 10**6 * (chosen.seed + 1) - number)
        with progress(f"{len(actors)} actors, {CARTS} carts each", chosen.steps) as show:
            for step in range(1, chosen.steps + 1):
                actor, future = arrived.get(timeout=PATIENCE)
                episodes = future.wait()
                learner.learn(episodes)
                send_out(actor, 10**6 * (chosen.seed + 1) + step)
                lengths.append(episodes.mean_length())
                show(step, ticks=lengths[-1])
    return tell(lengths, chosen.plot or Path("actor_learner.png"))


def tell(lengths: list[float], plot: Path) -> int:
    first, last = (sum(some) / len(some) for some in (lengths[:3], lengths[-5:]))
    print(f"ticks that a pole stays up  {sparkline(lengths)}  {first:.0f} -> {last:.0f} of {LONGEST}")
    save_curve(plot, "Cart-pole, actors and a learner", "ticks", ticks=lengths)
    return verdict(last > 2 * first, f"the poles stay up {last / first:.1f} times as long")


if __name__ == "__main__":
    sys.exit(main())
