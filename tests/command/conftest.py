"""The fork server of these tests: started once, whichever test is the first."""

from __future__ import annotations

import pytest

from remora.testing.processes import Processes
from tests import leaks


@pytest.fixture(scope="session")
def fork_server() -> None:
    """It lives as long as the test run."""
    with leaks.kept(), Processes(1):
        pass
