"""The worker that most tests here talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agent.alone import worker_alone


@pytest.fixture
def me() -> Iterator[str]:
    """The name of a worker that calls itself."""
    with worker_alone() as name:
        yield name


@pytest.fixture
def narrow() -> Iterator[str]:
    """The same with a single worker thread."""
    with worker_alone(num_worker_threads=1) as name:
        yield name
