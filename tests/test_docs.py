"""The documentation says what is so: lists made from the source are fresh, and what promises.md names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs_lists import DOCS, LISTS, written

ROOT = DOCS.parent
ROOMS = {path.name for path in (ROOT / "src" / "remora").iterdir() if path.is_dir()}
PROMISES = (DOCS / "promises.md").read_text()


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_as_the_source_has_it(name: str) -> None:
    page, make = LISTS[name]
    assert written(name) == make(), f"the list of {name} in docs/{page} is stale: `make docs` writes it anew"


def named_in_promises() -> list[str]:
    """Files in the cells of its tables: `agent/agent.py`, `wire/`, `agent/calls/test_future.py::test_…`."""
    found = re.findall(r"`([\w./]+(?:\.py|/)(?:::[\w…\[\]-]+)?)`", PROMISES)
    return sorted(set(found))


@pytest.mark.parametrize("name", named_in_promises())
def test_what_promises_name_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    places = [base / path for base in (ROOT / "src" / "remora", ROOT / "tests", ROOT)]
    file = next((place for place in places if place.exists()), None)
    assert file is not None, f"docs/promises.md names {path}, which is not there"
    if test:
        pattern = re.compile(".*".join(map(re.escape, test.partition("[")[0].split("…"))))
        assert any(pattern.fullmatch(each) for each in functions_of(file)), f"{path} has no test {test}"


@cache
def functions_of(file: Path) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]


# The glossary names files of earlier versions; it has a test of its own.
PAGES = [page for page in (*sorted(DOCS.glob("*.md")), ROOT / "README.md") if page.name != "glossary.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_source_file_that_a_page_names_is_there(page: Path) -> None:
    """Where modules moved, pages went on to name the old ones."""
    named = {name for name in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text()) if name.partition("/")[0] in ROOMS}
    missing = [name for name in sorted(named) if not (ROOT / "src" / "remora" / name).exists()]
    missing = [name for name in missing if not (ROOT / "tests" / name).exists()]
    assert not missing, f"docs/{page.name} names {missing}"
