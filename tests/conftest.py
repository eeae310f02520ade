"""What every test gets: a check that it left nothing behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests import leaks

LEAK_TIMEOUT = 3.0

settings.register_profile("untimed", deadline=None)  # how long an example takes says more of the machine than of the code
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "may_leak(reason): do not check what this test leaves behind; the reason is required"
    )
    config.addinivalue_line("markers", "first: a test that takes minutes begins first, and other files run beside it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(scope="module", autouse=True)
def what_is_here_stays() -> None:
    """What was imported, and what tests before left in caches, stays: each collection, of which many tests ask for some,
    would look at all of torch once more."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart() -> None:
    """Where there is a GPU, torch opens its devices at the first backward pass, for good: no test is to blame."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda", requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a thread, descriptor, process or piece of shared memory is there that was not before."""
    marker = request.node.get_closest_marker("may_leak")
    if marker is not None:
        _require_reason(marker)
        yield
        return
    before = leaks.census()
    yield
    leaked = leaks.leaked_since(before, LEAK_TIMEOUT)
    if leaked:
        report = _report(leaked)
        _end(leaked)
        pytest.fail(report, pytrace=False)


def _require_reason(marker: pytest.Mark) -> None:
    reason = marker.kwargs.get("reason") or (marker.args[0] if marker.args else "")
    if not (isinstance(reason, str) and reason.strip()):
        pytest.fail("the may_leak marker wants a reason: @pytest.mark.may_leak('...')", pytrace=False)


def _report(leaked: leaks.Census) -> str:
    details = (leaks.describe_processes(leaked), leaks.stacks(leaked))
    return f"still there {LEAK_TIMEOUT:g} s after the test:\n{leaked}\n\n" + "\n".join(filter(None, details))


def _end(leaked: leaks.Census) -> None:
    """Reported is enough: the next test should not run beside what this one left."""
    for pid in leaked.processes:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):  # gone by itself, or a grandchild, which its parent waits for
            pass
