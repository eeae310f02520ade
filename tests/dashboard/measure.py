"""What the dashboard costs with 200 workers: first paint, weight of the page, processor time of the server and the browser.

    python -m tests.dashboard.measure [workers] [seconds]

The group is made up beforehand, so what is measured is the dashboard alone: not what workers need to answer, nor what it
takes to read their answers, of which the last line speaks. Bounds: 1.5 s, 2 MB, 15 % of a core each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from remora.dashboard.sampler import ALWAYS
from remora.observer.model import GroupSnapshot, Query
from remora.observer.snapshot_json import from_json, to_json
from tests.dashboard.browser import launched
from tests.dashboard.serving import Served
from tests.dashboard.simulated import Recorded, SimulatedGroup

PARTS = ALWAYS
TICKS = os.sysconf("SC_CLK_TCK")


def serve(workers: int, pipe: Connection) -> None:
    with Served(Recorded(SimulatedGroup(workers)), interval=0.5) as served:
        pipe.send(served.address())
        pipe.recv()
        sampler = served.dashboard.sampler
        pipe.send(sampler.asked)


def processor_seconds(pid: int, descendants: bool = False) -> float:
    """Of a process; with those that it started, of these alone."""
    if not descendants:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(processor_seconds(int(each)) + processor_seconds(int(each), True) for each in children)


def browser_seconds(started: set[str]) -> float:
    """Of all processes of browsers that were not there before."""
    total = 0.0
    for pid in browsers() - started:
        try:
            total += processor_seconds(int(pid))
        except OSError:
            pass
    return total


def browsers() -> set[str]:
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and b"chrom" in (folder / "cmdline").read_bytes().split(b"\0")[0]:
                found.add(folder.name)
        except OSError:
            pass
    return found


def main(workers: int = 200, seconds: float = 20.0) -> None:
    before = browsers()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(workers, theirs))
    server.start()
    address = ours.recv()
    assert server.pid is not None
    with launched() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        sizes: list[int] = []
        page.on("response", lambda answer: sizes.append(int(answer.headers.get("content-length", 0))))
        page.goto(address)
        page.wait_for_selector("main[data-state=live] .cells, main[data-state=live] table")
        page.reload()
        page.wait_for_selector("main[data-state=live] .cells, main[data-state=live] table")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        full = page.evaluate("performance.now()")
        moment = page.evaluate("fetch('/api/overview').then((answer) => answer.text()).then((text) => text.length)")
        weight = sum(sizes) + moment
        memory = page.evaluate("performance.memory.usedJSHeapSize")
        print(
            f"first paint {paint / 1000:.2f} s, drawn {full / 1000:.2f} s, "
            f"page {weight / 1e6:.2f} MB, heap {memory / 1e6:.0f} MB"
        )
        for path in ("/", "/calls", "/waiting", "/functions", "/timeline"):
            page.evaluate(
                "(path) => { history.pushState(null, '', path); dispatchEvent(new Event('navigate-to')); }", path
            )
            page.wait_for_selector("main[data-state=live] .card")
            began, server_began, browser_began = (
                time.monotonic(),
                processor_seconds(server.pid),
                browser_seconds(before),
            )
            time.sleep(seconds / 5)
            wall = time.monotonic() - began
            share = (processor_seconds(server.pid) - server_began) / wall
            drawn = (browser_seconds(before) - browser_began) / wall
            print(f"{path:11} server {share:5.1%} of a core, browser {drawn:5.1%}")
    ours.send("end")
    print(f"asked {ours.recv()} times")
    server.join()
    told = json.dumps(to_json(SimulatedGroup(workers).snapshot(Query(parts=PARTS, limit=100))))
    began = time.process_time()
    from_json(GroupSnapshot, json.loads(told))
    print(f"to read {len(told) / 1e6:.1f} MB of answers takes {time.process_time() - began:.2f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *map(float, sys.argv[2:3]))
