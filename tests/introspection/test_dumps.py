"""Dumps that a worker writes by itself: few, and what happens after the last one costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.introspection import dumps
from remora.introspection.dumps import AutomaticDumps
from remora.observer.dump import Cause
from remora.recorder import TIMED_OUT, Note
from remora.testing.world import World
from tests.eventually import eventually


def test_what_happens_after_the_last_dump_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "MOST", 1)
    with World(1) as world:
        found = AutomaticDumps(str(tmp_path), world[0].subject)
        found.tell(Cause.TIMEOUT, "the first")
        eventually(lambda: list(tmp_path.glob("remora-*.json")) and not found._thread.is_alive())
        for _ in range(1000):
            found.hear(Note(0.0, TIMED_OUT, None, "one more"))
        assert found._told.qsize() == 0
        found.close()
