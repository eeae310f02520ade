"""A world of three workers in this process, for whose first one the test acts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from remora.testing.world import World
from tests.autograd import belongings


@pytest.fixture
def world() -> Iterator[World]:
    """The test is worker 0's program."""
    belongings.forget_all()
    with World(3, timeout=20.0) as world, world.acting(0):
        yield world
    belongings.forget_all()
