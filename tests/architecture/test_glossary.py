"""The glossary leads to files and classes that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"


def rows() -> Iterator[tuple[str, list[str]]]:
    """Yield the second-level heading and the cells of each row of each table, without the heads of the tables."""
    heading, in_table = "", False
    for line in GLOSSARY.read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        if not line.startswith("|"):
            in_table = False
        elif line.startswith("|---"):
            in_table = True
        elif in_table:
            yield heading, [cell.strip() for cell in line.strip("|").split("|")]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def definitions(path: Path) -> frozenset[str]:
    """Return the names of all classes and functions that a file defines."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


@cache
def all_names() -> frozenset[str]:
    """Return the names of all classes, functions and variables of the package."""
    found = set()
    for path in ROOT.rglob("*.py"):
        found |= definitions(path)
        found |= {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    return frozenset(found)


CONCEPTS = [cells for heading, cells in rows() if heading == "Concepts"]
RENAMED = [cells for heading, cells in rows() if heading != "Concepts"]


@pytest.mark.parametrize("cells", CONCEPTS, ids=lambda cells: cells[0])
def test_a_concept_leads_to_a_file_and_to_its_class(cells: list[str]) -> None:
    _, files, classes = cells
    paths = [ROOT / file for file in quoted(files)]
    assert paths
    for path in paths:
        assert path.is_file(), path
    for name in quoted(classes):
        assert any(name in definitions(path) for path in paths), name


@pytest.mark.parametrize("cells", RENAMED, ids=lambda cells: cells[0])
def test_an_earlier_name_leads_to_one_that_exists(cells: list[str]) -> None:
    _, today = cells
    for name in quoted(today):
        if "/" in name:
            assert (ROOT / name).exists() or (GLOSSARY.parents[1] / name).exists(), name
        else:
            assert name in all_names(), name


def test_the_tables_are_read() -> None:
    assert len(CONCEPTS) > 50
    assert len(RENAMED) > 100
