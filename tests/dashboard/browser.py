"""A real Chromium for tests: the system's, by Playwright. Each visitor is a browser profile of its own, and is watched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.dashboard.serving import Served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("SCREENSHOTS")  # the folder that `make screenshots` names
LARGEST_PICTURE = 150_000


@contextmanager
def launched() -> Iterator[Any]:
    """A running browser. Skips, and says why, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this host (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """One reader of a dashboard. `end` fails if the page complained, or asked another host for anything."""

    def __init__(
        self, browser: Any, served: Served, *, width: int = 1280, height: int = 860, theme: str = "light"
    ) -> None:
        self._served = served
        self.complaints: list[str] = []
        self.expected = 0  # complaints that the test provokes
        self._context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        self._context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.base)
        self.page = self._context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        self.page.on("pageerror", lambda error: self._note(True, str(error)))
        self.page.on("dialog", lambda dialog: (self._note(True, "a dialog"), dialog.dismiss()))
        self.page.on(
            "request", lambda asked: self._note(not asked.url.startswith((served.base, "data:", "blob:")), asked.url)
        )
        self.page.goto(served.address())
        self.live()

    def _note(self, bad: bool, text: str) -> None:
        if bad:
            self.complaints.append(text)

    def live(self) -> None:
        """Wait until the page shows what the server told."""
        try:
            self.page.wait_for_selector('main[data-state="live"] :is(.card, .empty, .tiles)', state="attached")
        except Exception as error:
            error.add_note(f"at {self.page.url}: {self.page.locator('body').inner_text()[:500]!r}, {self.complaints}")
            raise

    def go(self, path: str) -> None:
        """Load a page by its address."""
        self.page.goto(self._served.base + path)
        self.live()

    def turn_to(self, path: str) -> None:
        """Show another page as a click on a link does: without loading anything."""
        self.page.evaluate(
            "(path) => { history.pushState(null, '', path); dispatchEvent(new Event('navigate-to')); }", path
        )
        page, *rest = (unquote(part) for part in path.partition("?")[0].split("/")[1:])
        thing = "\n".join([page or "overview", *rest])
        self.page.wait_for_function("(thing) => document.querySelector('main').dataset.thing === thing", arg=thing)
        self.live()

    def picture(self, name: str) -> None:
        """Keep a picture for the documentation, if asked for."""
        if PICTURES:
            file = Path(PICTURES) / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(file))
            _use_fewer_colours(file)
            assert file.stat().st_size < LARGEST_PICTURE

    def end(self) -> None:
        self._context.close()
        assert len(self.complaints) == self.expected, self.complaints


def _use_fewer_colours(file: Path) -> None:
    """A picture with a palette is a third as large, and looks the same."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(file) as opened:
        smaller = opened.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    smaller.save(file, optimize=True)
