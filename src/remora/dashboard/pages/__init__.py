"""The pages, each from a moment to JSON of bounded size.

A page is a module with `PARTS`, the parts of a snapshot that it needs, and `view(moment, path, arguments)`: `path` names the
one thing that is shown, if there is one, and `arguments` is the query of the address (`filter`, `sort`, `limit`, …).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from remora.dashboard.moment import Moment
from remora.dashboard.pages import (
    calls,
    events,
    functions,
    gradients,
    links,
    overview,
    references,
    stacks,
    timeline,
    waiting,
    worker,
)


class Page(Protocol):
    """A module of this folder."""

    @property
    def PARTS(self) -> tuple[str, ...]: ...

    def view(self, moment: Moment, path: Sequence[str], arguments: Mapping[str, str]) -> dict[str, Any]: ...


PAGES: dict[str, Page] = {
    "overview": overview,
    "calls": calls,
    "waiting": waiting,
    "timeline": timeline,
    "references": references,
    "links": links,
    "gradients": gradients,
    "events": events,
    "stacks": stacks,
    "functions": functions,
    "workers": worker,
}
