"""`remora top`: driven by Textual's pilot on snapshots made up here, and once in a real terminal on real workers."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from remora import rpc
from remora.command.rates import History, sparkline
from remora.errors import NothingFound
from remora.observer.model import GroupSnapshot, LinkStatus, Pool, Stage
from remora.testing.processes import Processes
from tests.command import targets
from tests.command.running import group_of
from tests.eventually import eventually
from tests.observer.snapshots import call, gone, group, worker

pytest.importorskip("textual")

from textual.widgets import Input, Static

from remora.command.top_app import StackScreen, TopApp

SIZE = (140, 40)
INTERVAL = 0.2  # a press of the pilot waits until nothing is left to draw


def snapshot(n: int) -> GroupSnapshot:
    """The n-th: worker0 serves 10 calls a second, worker1 100."""
    calls = (
        call("worker0#1", "worker1", "forward", Stage.RUNNING, 12.0),
        call("worker0#2", "worker1", "step", Stage.QUEUED, 3.0),
    )
    links = (LinkStatus(peer="worker1", state="alive", transport="tcp", bytes_sent=5 << 20, round_trip=0.001),)
    first = worker("worker0", time=100.0 + n, calls_served=10 * n, links=links, pool=Pool(limit=16))
    second = worker("w\x1b[31m1", time=100.0 + n, calls_served=100 * n, calls=calls, pool=Pool(limit=16, running=1))
    return group(first, replace(second, name="worker1"), worker("evil\x1b]0;x\x07"), missing=(gone("worker3"),))


def drive(
    steps: Callable[[TopApp, Any], Awaitable[None]], source: Callable[[bool], GroupSnapshot] | None = None
) -> None:
    numbers = count()
    app = TopApp(source or (lambda stacks: snapshot(next(numbers))), interval=INTERVAL)

    async def run() -> None:
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: source is not None or len(app.rows()) == 4)
            await steps(app, pilot)

    asyncio.run(run())


async def until(pilot: Any, condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        await pilot.pause(0.01)
    raise AssertionError("it does not come true")


def texts(app: TopApp) -> list[list[str]]:
    return [[cell.text for cell in row.cells] for row in app.rows()]


def test_workers_with_rates_and_those_that_are_silent() -> None:
    async def steps(app: TopApp, pilot: Any) -> None:
        await until(pilot, lambda: texts(app)[2][4] == "100" or texts(app)[1][4] == "100")
        rows = {row[0]: row for row in texts(app)}
        assert rows["worker0"][4] == "10"
        assert rows["worker1"][2] == "1/16"
        assert set(rows["worker1"][5]) == {"█"}
        assert rows["worker1"][7] == "12.0 s"
        assert rows["worker3"][1].startswith("silent: its process is stopped")
        assert "evil\ufffd]0;x\ufffd" in rows
        assert "3 of 4 workers answered; worker3 is silent" in str(app.query_one("#trouble", Static).render())

    drive(steps)


def test_keys_change_views_order_and_direction() -> None:
    async def steps(app: TopApp, pilot: Any) -> None:
        await pilot.press("2")
        await until(pilot, lambda: app.view.title == "Calls")
        assert [row[0] for row in texts(app)] == ["worker0#1", "worker0#2"]  # the oldest first
        await pilot.press("r")
        assert [row[0] for row in texts(app)] == ["worker0#2", "worker0#1"]
        for _ in range(len(app.view.columns) - 2):
            await pilot.press("s")
        assert [row[3] for row in texts(app)] == ["forward", "step"]  # by function
        await pilot.press("3")
        await until(pilot, lambda: app.view.title == "Links")
        assert texts(app)[0][:5] == ["worker0", "worker1", "alive", "tcp", "5.0 MiB"]
        await pilot.press("1")
        await until(pilot, lambda: app.view.title == "Workers")

    drive(steps)


def test_a_filter_leaves_rows_with_its_text() -> None:
    async def steps(app: TopApp, pilot: Any) -> None:
        await pilot.press("slash", "w", "o", "r", "k", "e", "r", "1", "enter")
        await until(pilot, lambda: [row[0] for row in texts(app)] == ["worker1"])
        assert not app.query_one("#filter", Input).has_class("shown")
        await pilot.press("slash")
        await pilot.press("escape")
        await until(pilot, lambda: len(texts(app)) == 4)

    drive(steps)


def test_enter_opens_the_stacks_of_a_worker() -> None:
    async def steps(app: TopApp, pilot: Any) -> None:
        await pilot.press("slash", "w", "o", "r", "k", "e", "r", "0", "enter", "enter")
        await until(pilot, lambda: isinstance(app.screen, StackScreen))
        assert any("train.py:30 step" in line for line in app.screen._lines)  # type: ignore[attr-defined]
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, StackScreen))

    drive(steps)


def test_snapshots_are_asked_for_one_at_a_time_and_keys_work_meanwhile() -> None:
    """A silent worker takes the whole timeout; the observer belongs to one thread at a time."""
    asked, gate, inside, most = count(), threading.Event(), [0], [0]

    def slow(stacks: bool) -> GroupSnapshot:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        n = next(asked)
        if n == 1:
            gate.wait(20)
        inside[0] -= 1
        return snapshot(n)

    async def steps(app: TopApp, pilot: Any) -> None:
        await until(pilot, lambda: inside[0] == 1 and app.rows())
        await pilot.press("2")
        await until(pilot, lambda: app.view.title == "Calls")
        await pilot.press("enter")
        gate.set()
        await until(pilot, lambda: isinstance(app.screen, StackScreen))
        assert most[0] == 1

    drive(steps, slow)


def test_a_group_that_is_gone_is_said() -> None:
    def fail(stacks: bool) -> GroupSnapshot:
        raise NothingFound("", "the group is gone")

    async def steps(app: TopApp, pilot: Any) -> None:
        await until(pilot, lambda: "the group is gone" in str(app.query_one("#trouble", Static).render()))

    drive(steps, fail)


def test_a_pause_stops_asking() -> None:
    asked = []

    def source(stacks: bool) -> GroupSnapshot:
        asked.append(stacks)
        return snapshot(len(asked))

    async def steps(app: TopApp, pilot: Any) -> None:
        await until(pilot, lambda: len(asked) > 2)
        await pilot.press("p")
        await until(pilot, lambda: not app._asking)
        before = len(asked)
        await pilot.pause(0.2)
        assert len(asked) == before
        await pilot.press("p")
        await until(pilot, lambda: len(asked) > before)

    drive(steps, source)


def test_rates_begin_anew_with_a_new_start_of_a_worker() -> None:
    history = History()
    for n in range(3):
        history.add(snapshot(n))
    assert history.rate("worker0") == 10
    restarted = replace(snapshot(4).workers[0], incarnation="another", calls_served=0)
    history.add(group(restarted))
    assert history.rate("worker0") == 10
    assert list(history.total) == [110, 110]
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([1, 4, 8]) == "▂▅█"


@pytest.mark.usefixtures("fork_server")
@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")
def test_in_a_real_terminal(tmp_path: Path) -> None:
    """tmux has a server and a terminal of its own, on a socket in this test's folder."""

    def tmux(*words: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "tmux"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

    def screen() -> str:
        return tmux("capture-pane", "-p", "-t", "top")

    def shows(*wanted: str) -> None:
        eventually(lambda: all(text in screen() for text in wanted), 40, screen)

    with Processes(3) as workers:
        run = f"{sys.executable} -m remora top --group {group_of(workers)} --interval 0.2 --timeout 20s; echo ended with $?"
        tmux("-f", "/dev/null", "new-session", "-d", "-s", "top", "-x", "160", "-y", "40", f"sh -c '{run}; sleep 60'")
        try:
            holding = workers.start(1, targets.hold_lock)
            calling = workers.start(0, targets.wait_for, "worker1", "take_lock")
            shows("worker0", "worker1", "calls/s")
            tmux("send-keys", "-t", "top", "2")
            shows("targets.take_lock", "running")
            tmux("send-keys", "-t", "top", "Enter")
            shows("stacks of worker1", "hold_lock")
            tmux("send-keys", "-t", "top", "Escape")
            eventually(lambda: "stacks of worker1" not in screen(), 40, screen)  # Escape and q at once would be Alt-q
            tmux("send-keys", "-t", "top", "q")
            shows("ended with 0")
        finally:
            tmux("kill-server")
        workers.run(2, rpc.rpc_sync, "worker1", targets.release)
        holding.result()
        calling.result()
