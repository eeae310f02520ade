"""Asks the workers for snapshots while a page is open, and wakes the pages with each one.

One task does it, on the event loop of the server; only the question itself waits on another thread. So nothing here needs a
lock. When the last page goes away the task ends, and workers are left alone.

A snapshot of a large group takes a while to ask for and to read. The pause after it is so long that this process takes no
more than `SHARE` of a core: a dashboard may be late, but never in the way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

from remora.dashboard.history import History
from remora.dashboard.moment import Moment
from remora.errors import RemoraError
from remora.observer.model import GroupSnapshot, Query

INTERVAL = 0.5
SHARE = 0.12
MOST = 10.0  # seconds between two questions
TIMEOUT = 1.0  # for a worker's answer: a silent one shall not hide for long what the others say
LIMIT = 2000  # entries of a part from each worker, in small groups
# After the first look, where no page adds up references. Workers that end thousands of calls a second would tell of as many
# at each look: it takes them 10 ms, this process 10 ms for each of them, and no page draws so many.
FEW = 500
ENTRIES = 10_000  # of all workers together
ALWAYS = ("calls", "waits")  # to find cycles
# For the history, and in a large group only so often (seconds), because they are most of what there is to read. The first
# has to be less than `history.GAP`.
SELDOM = {"histograms": 4.0, "events": 10.0}
LARGE = 32  # workers: links of no more than these are always asked for (their number grows with the square)

_log = logging.getLogger("remora.dashboard")


class Group(Protocol):
    """The group that the sampler asks: `remora.observer.group_observer.GroupObserver`, or a made-up group in tests."""

    def snapshot(self, query: Query = ..., timeout: float = ...) -> GroupSnapshot: ...


class Sampler:
    """The newest moment of a group, and its history."""

    def __init__(self, group: Group, interval: float = INTERVAL) -> None:
        self.history = History()
        self.moment: Moment | None = None
        self.problem = ""  # why there is no newer one
        self.asked = 0  # how often the group was asked
        self._group = group
        self._interval = interval
        self._wanted: Counter[str] = Counter()  # parts, and how many pages need them
        self._pages = 0
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._hurry = asyncio.Event()  # a page came for which the newest moment is too old, or lacks parts
        self._asking = asyncio.Lock()
        self._processor = time.process_time()
        self._asked_at = dict.fromkeys(SELDOM, float("-inf"))  # of the parts for the history
        self.closed = False

    @asynccontextmanager
    async def watching(self, parts: Iterable[str]) -> AsyncIterator[None]:
        """Keep asking for these parts, too, as long as the block lasts."""
        parts = set(parts)
        self._wanted.update(parts)
        self._pages += 1
        if not self.fresh(parts):
            self._hurry.set()
        if self._task is None or self._task.done():
            self._processor = time.process_time()
            self._task = asyncio.create_task(self._ask_again_and_again())
        try:
            yield
        finally:
            self._wanted.subtract(parts)
            self._pages -= 1
            if self._pages == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    def fresh(self, parts: Iterable[str]) -> bool:
        """Return True if the newest moment has these parts and is one of now."""
        newest = self.moment
        return (
            newest is not None
            and newest.parts.issuperset(parts)
            and time.time() - newest.snapshot.time < 2 * self._interval
        )

    async def changed(self) -> None:
        """Return after the next moment, problem, or the end."""
        if not self.closed:
            await self._news.wait()

    async def ask_once(self, parts: Iterable[str]) -> Moment:
        """A moment of now with these parts. RemoraError if the group cannot be asked."""
        await self._ask(frozenset(parts))
        assert self.moment is not None
        return self.moment

    def close(self) -> None:
        """Let all pages go."""
        self.closed = True
        self._publish()
        if self._task is not None:
            self._task.cancel()

    async def _ask_again_and_again(self) -> None:
        while not self.closed:
            begun = time.monotonic()
            self._hurry.clear()
            try:
                await self._ask(frozenset())
                self.problem = ""
            except RemoraError as error:
                self.problem = str(error)
            except Exception as error:
                _log.exception("The dashboard could not ask the group")
                self.problem = f"{type(error).__name__}: {error}"
            self._publish()
            pause = self._pause(time.monotonic() - begun)
            try:
                await asyncio.wait_for(self._hurry.wait(), max(pause, 0.02))
            except TimeoutError:
                pass

    def _pause(self, took: float) -> float:
        """Seconds until the next question, when the last one took so long."""
        before, self._processor = self._processor, time.process_time()  # what pages cost since the last time is in it
        return min(max(self._interval, (self._processor - before) / SHARE) - took, MOST)

    async def _ask(self, more: frozenset[str]) -> None:
        async with self._asking:
            parts = self._parts() | more
            count = len(self.moment.snapshot.workers) + 1 if self.moment is not None else 1
            # Other pages may have been closed for long: what happened meanwhile is old, but tells how it came to this.
            few = self.moment is not None and parts.isdisjoint(("owned", "held"))
            limit = min(FEW if few else LIMIT, ENTRIES // count)
            query = Query(parts=tuple(sorted(parts)), limit=max(limit, 50), since=self.history.since)
            self.asked += 1
            snapshot = await asyncio.to_thread(self._group.snapshot, query, TIMEOUT)
            self.history.add(snapshot, parts)
            self.moment = Moment(snapshot, self.history, parts)

    def _parts(self) -> frozenset[str]:
        wanted = {part for part, pages in self._wanted.items() if pages > 0} | set(ALWAYS)
        small = self.moment is not None and len(self.moment.snapshot.workers) <= LARGE
        now = time.monotonic()
        for part, seconds in SELDOM.items():
            if small or now - self._asked_at[part] >= seconds:
                wanted.add(part)
                self._asked_at[part] = now
        return frozenset(wanted | {"links"} if small else wanted)

    def _publish(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
