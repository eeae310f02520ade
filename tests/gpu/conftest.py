"""What every test here needs: a GPU, which is started before anything is counted, and workers that have device maps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import leaks
from tests.workers import Workers

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.device_count():
        return
    skip = pytest.mark.skip(reason="there is no GPU here")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """What CUDA opens it keeps for as long as the process lives: that is no leak of a test."""
    if torch.cuda.device_count():
        with leaks.kept():
            torch.zeros(1, device="cuda").cpu()


def identical_maps(rank: int, n: int) -> dict[str, dict[str, str]]:
    return {f"worker{other}": {"cuda:0": "cuda:0"} for other in range(n)}


@pytest.fixture(scope="module", params=["lent", "over the host"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Three processes that use one GPU, on both roads between them."""
    more = {} if request.param == "lent" else {"device_memory": 0}
    with Workers(
        3,
        options=lambda rank: {"device_maps": identical_maps(rank, 3), "rpc_timeout": 20.0, **more},
        leak_timeout=None,
        timeout=60.0,
    ) as group:
        yield group
