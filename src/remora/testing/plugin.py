"""Fixtures for users' tests, for pytest: workers in one process, or in processes of their own. Ended when the test ends.

    def test_my_program(remora_world):
        world = remora_world(3, faults="drop PYTHON_CALL worker0->worker1 1")
        assert world.run(0, my_program) == 42
        print(world.faults.report())

`clock="virtual"` or `clock="auto"` gives a world time of its own (`remora.testing.virtual_clock`). pytest finds the fixtures
when Remora is installed. Nothing of torch is imported before a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from remora.testing.processes import Processes
    from remora.testing.world import World


@pytest.fixture
def remora_world() -> Iterator[Callable[..., World]]:
    """Make a `World`: `remora_world(n, **options)`. What its fault plan did is printed when the test fails."""
    from remora.testing.world import World

    with ExitStack() as stack:

        def make(n: int = 2, **options: Any) -> World:
            world = stack.enter_context(World(n, **options))
            stack.callback(_tell_faults, world)
            return world

        yield make


@pytest.fixture
def remora_workers() -> Iterator[Callable[..., Processes]]:
    """Make workers in processes of their own: `remora_workers(n, **options)`; see `remora.testing.processes`."""
    from remora.testing.processes import Processes

    with ExitStack() as stack:

        def make(n: int = 2, **options: Any) -> Processes:
            return stack.enter_context(Processes(n, **options))

        yield make


def _tell_faults(world: World) -> None:
    """Print what the plan did; pytest shows it if the test fails."""
    if world.has_faults:
        print(f"fault plan: {world.faults.plan}\n{world.faults.report()}")
