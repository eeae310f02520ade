"""What is in the wheel and in the source distribution, and what a program can ask of an installed package."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import remora


def members(distribution: Path) -> list[str]:
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as wheel:
            return wheel.namelist()
    with tarfile.open(distribution) as source:
        return source.getnames()


def test_both_say_that_they_have_types(distributions: dict[str, Path]) -> None:
    for distribution in distributions.values():
        assert any(name.endswith("remora/py.typed") for name in members(distribution)), distribution


def test_the_wheel_has_the_version_that_the_package_tells(distributions: dict[str, Path]) -> None:
    assert distributions["wheel"].name == f"remora-{remora.__version__}-py3-none-any.whl"
    assert f"remora-{remora.__version__}.dist-info/METADATA" in members(distributions["wheel"])


def test_the_wheel_still_has_what_python_reads_when_it_starts(distributions: dict[str, Path]) -> None:
    assert "remora-compat.pth" in members(distributions["wheel"])


def test_the_dashboard_has_its_page_and_the_licences_of_what_is_in_it(distributions: dict[str, Path]) -> None:
    for distribution in distributions.values():
        names = members(distribution)
        for name in ("index.html", "app.js", "style.css", "vendor/uPlot.js", "vendor/LICENSE-preact"):
            assert any(each.endswith(f"remora/dashboard/static/{name}") for each in names), (distribution, name)
    wheel = members(distributions["wheel"])
    for library in ("htm", "preact", "uPlot"):
        assert any(f".dist-info/licenses/src/remora/dashboard/static/vendor/LICENSE-{library}" in each for each in wheel)
