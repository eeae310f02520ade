"""The pages, each from a moment to JSON of bounded size.

A page is a module with `PARTS`, the parts of a snapshot that it needs, and `view(moment, path, arguments)`: `path` names the
one thing that is shown, if there is one, and `arguments` is the query of the address (`filter`, `sort`, `limit`, …).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from remora.dashboard.moment import Moment
from remora.dashboard.pages import (
    calls_page,
    events_page,
    functions_page,
    gradients_page,
    links_page,
    overview_page,
    references_page,
    stacks_page,
    timeline_page,
    waiting_page,
    worker_page,
)


class Page(Protocol):
    """A module of this folder."""

    @property
    def PARTS(self) -> tuple[str, ...]: ...

    def view(self, moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]: ...


PAGES: dict[str, Page] = {
    "overview": overview_page,
    "calls": calls_page,
    "waiting": waiting_page,
    "timeline": timeline_page,
    "references": references_page,
    "links": links_page,
    "gradients": gradients_page,
    "events": events_page,
    "stacks": stacks_page,
    "functions": functions_page,
    "workers": worker_page,
}
