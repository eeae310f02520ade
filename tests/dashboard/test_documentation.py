"""What the documentation of the dashboard names is there: metrics, routes, options, pictures."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from remora.command.verbs import dashboard_verb as verb
from remora.dashboard.pages import PAGES
from remora.observer.openmetrics import render
from tests.dashboard.simulated import SimulatedGroup

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "dashboard.md").read_text()


def test_grafana_asks_for_metrics_that_there_are() -> None:
    group = SimulatedGroup(8)
    group.dead = {"worker6"}
    told = set(re.findall(r"^(\w+)[{ ]", render(group.snapshot()), re.M))
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {
        name
        for text in expressions
        for name in re.findall(r"\b((?:remora|rpc)_\w+)[{)\[ ]", text)
        if name != "rpc_method"
    }
    assert len(asked) > 12
    assert asked <= told, asked - told


def test_every_page_and_option_is_described() -> None:
    for page in PAGES:
        assert f"`{page}`" in PAGE, page
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    for action in parser._actions:
        for name in action.option_strings:
            assert name.startswith("--") is False or name in ("--help", "--timeout") or f"`{name}" in PAGE, name


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\((dashboard/[\w-]+\.png)\)", PAGE))))
def test_a_picture_is_there_and_not_large(name: str) -> None:
    assert (DOCS / name).stat().st_size < 150_000


def test_nothing_on_the_page_comes_from_elsewhere_or_as_html() -> None:
    static = ROOT / "src" / "remora" / "dashboard" / "static"
    for file in [*static.glob("*.js"), *static.glob("*.css"), *static.glob("*.html")]:
        text = file.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org)", text), file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file
        )
        assert "<script>" not in text, file
