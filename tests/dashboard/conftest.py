"""One browser for all tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.dashboard.browser import Visitor, launched
from tests.dashboard.serving import Served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visitor]]:
    """Open a dashboard in a browser profile of its own. All are closed, and their complaints looked at, after the test."""
    visitors: list[Visitor] = []

    def open_it(served: Served, **how: Any) -> Visitor:
        visitors.append(Visitor(browser, served, **how))
        return visitors[-1]

    yield open_it
    for visitor in visitors:
        visitor.end()
