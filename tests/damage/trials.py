"""Two workers, a program, and one damaged unit on the way between them: what may come of it, and what may not.

Within the time limit the program is right, or fails with an error that says so; afterwards both workers live, their calls
are right, and nothing of the program is left.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from remora.errors import RemoraError
from remora.testing.world import World
from tests.damage import proxy, sessions
from tests.damage.mutations import Mutation, apply
from tests.damage.units import Unit, is_covered, resealed

LIMIT = 5.0  # seconds until a damaged link is repaired, or a call fails
REST = 10.0  # and until nothing of it is left
TIMEOUT = 25.0  # of a call: a program that needs it was not told anything in time
PATIENCE = 2 * (TIMEOUT + LIMIT + REST) + 20.0  # seconds for both attempts at one: it says what is wrong
OFTEN = 150  # trials in one world: each may leave a number for a function, a session, a few counters

ROADS: dict[str, dict[str, Any]] = {
    "inproc": {"transports": ["inproc"]},
    "unix": {"transports": ["unix"], "shared_memory": 0},
    "tcp": {"transports": ["tcp"], "host": "127.0.0.1", "shared_memory": 0},
    "shm": {"transports": ["unix"]},
}


@dataclass(frozen=True)
class Trial:
    """Which unit of which program is damaged, and how. `part`: of its bytes, "header", "body" or "unit" (all of it), as on a
    bad wire; or "sealed": the body, under a checksum that is right."""

    road: str
    program: str
    direction: str
    kind: int
    ordinal: int  # of the units of this kind in this direction
    part: str
    mutations: tuple[Mutation, ...]

    def __str__(self) -> str:
        name = f"{self.kind:#x}" if self.kind >= 0 else f"handshake {-self.kind}"
        return f"{self.program} over {self.road}: {name} #{self.ordinal} {self.direction}, {self.part}: {self.mutations}"


class Damage:
    """The judge of a proxy that damages one unit."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._left = trial.ordinal
        self._lock = threading.Lock()
        self.done = False
        self.changed = False
        self.covered = False  # a seal covers what was damaged: it is noticed

    def __call__(self, direction: str, unit: Unit, before: Sequence[Unit]) -> bytes:
        trial = self._trial
        if self.done or direction != trial.direction or unit.kind != trial.kind:
            return unit.data
        with self._lock:
            if self.done:
                return unit.data
            if self._left:
                self._left -= 1
                return unit.data
            self.done = True
        found = damaged(trial, unit, before)
        self.changed = found != unit.data
        self.covered = trial.part == "header" or (trial.part != "sealed" and is_covered(unit))
        return found


def damaged(trial: Trial, unit: Unit, before: Sequence[Unit]) -> bytes:
    """The bytes that arrive in the place of a unit."""
    data, size, others = unit.data, unit.header_size, [each.data for each in before]
    if trial.part == "header":
        return apply(trial.mutations, data[:size], others) + data[size:]
    if trial.part == "sealed" and unit.is_frame:
        return resealed(unit, lambda body: apply(trial.mutations, body, [each[size:] for each in others]))
    if trial.part == "body":
        return data[:size] + apply(trial.mutations, data[size:], [each[size:] for each in others])
    return apply(trial.mutations, data, others)


class _Arena:
    """A world with a proxy in it, used for many trials."""

    def __init__(self, road: str) -> None:
        self.road = road
        self.used = 0
        self._stack = ExitStack()
        self.proxy = self._stack.enter_context(proxy.installed())
        self.world = self._stack.enter_context(World(2, timeout=TIMEOUT, **ROADS[road]))
        self.run(sessions.well)
        gc.collect()

    def run(self, program: Any) -> Any:
        return self.world.run(0, program)

    def close(self) -> None:
        self._stack.close()


_arena: _Arena | None = None


def close() -> None:
    """End the world that is kept for the next trial."""
    global _arena
    if _arena is not None:
        _arena.close()
        _arena = None


def _arena_for(road: str) -> _Arena:
    global _arena
    if _arena is not None and (_arena.road != road or _arena.used >= OFTEN):
        close()
    if _arena is None:
        _arena = _Arena(road)
    _arena.used += 1
    return _arena


def survey(road: str, program: str) -> list[tuple[str, Unit]]:
    """What passes between the two workers, the first handshake included."""
    close()
    found: list[tuple[str, Unit]] = []
    with proxy.installed() as middle:
        middle.record = found
        with World(2, timeout=TIMEOUT, **ROADS[road]) as world:
            assert world.run(0, sessions.PROGRAMS[program]), f"{program} is wrong without any damage"
            gc.collect()
            world.wait_until(lambda: not world.unrest())
            middle.record = None
    return found


def run_survey(road: str, program: str) -> str:
    """For the subject: the survey, as a text that can be sent."""
    return repr([(direction, unit.data, unit.kind, unit.number) for direction, unit in survey(road, program)])


def try_out(trial: Trial) -> str:
    """Run one trial. What came of it; AssertionError if something is wrong. Damage that no seal covers may yield a wrong
    value, and may leave something behind: it is one that a correct message could have asked for."""
    greeting = trial.kind < 0
    arena = _arena_for(trial.road)
    judge = Damage(trial)
    arena.proxy.judge = judge
    if greeting:
        _cut(arena.world)
    begun = time.monotonic()
    try:
        outcome = "right" if arena.run(sessions.PROGRAMS[trial.program]) else "wrong"
    except Exception as error:
        outcome = described(error)
    seconds = time.monotonic() - begun
    arena.proxy.judge = proxy.pass_on
    if not judge.changed:
        return "missed" if not judge.done else "unchanged"
    covered = judge.covered
    assert seconds < LIMIT, f"it took {seconds:.1f} s: {outcome}"
    assert outcome != "wrong" or not covered, "the program got a wrong value"
    assert not outcome.startswith("!") or not covered, f"not an error that speaks of the damage: {outcome[1:]}"
    _check(arena, covered)
    return outcome


def described(error: BaseException) -> str:
    """An outcome that is an error; with an exclamation mark before it, if it is none of ours."""
    known = isinstance(error, RemoraError | TimeoutError | ConnectionError)
    return f"{'' if known else '!'}{type(error).__name__}: {str(error)[:200]}"


def _cut(world: World) -> None:
    """Have the next call dial again."""
    for peer in world[0].agent.peers.all():
        for channel in peer.channels():
            channel.cut(ConnectionError("to see a handshake"))


def _check(arena: _Arena, covered: bool) -> None:
    world = arena.world
    begun = time.monotonic()
    well = False
    trouble = "a wrong value"
    while not well and time.monotonic() - begun < LIMIT:
        try:
            well = bool(arena.run(sessions.well))
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if not covered:
                break
    assert well, f"later calls are not right: {trouble}"
    assert all(worker.agent.running for worker in world.workers), "a worker has ended"
    gc.collect()
    if not covered:
        return
    try:
        world.wait_until(lambda: not world.unrest(), REST)
    except AssertionError:
        raise AssertionError(f"not at rest after {REST:g} s: {world.unrest()}") from None


def judged(trial: Trial) -> str:
    """For the subject: a trial. One that fails is tried once more in a fresh world, alone: a loaded host is no finding."""
    try:
        return try_out(trial)
    except AssertionError as first:
        close()
        try:
            return try_out(trial)
        except AssertionError as second:
            raise AssertionError(f"{trial}\n{second}") from first
