"""Workers are asked while a page is open, for what the open pages need, and not otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from remora.dashboard import sampler as module
from remora.dashboard.sampler import ALWAYS, Sampler
from tests.dashboard.simulated import SimulatedGroup


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20.0))


def test_nothing_is_asked_before_a_page_opens_nor_after_the_last_one_closed() -> None:
    async def test() -> None:
        group = SimulatedGroup(2)
        sampler = Sampler(group, interval=0.01)
        await asyncio.sleep(0.05)
        assert group.asked == 0
        async with sampler.watching(()):
            async with sampler.watching(()):
                while group.asked < 3:
                    await sampler.changed()
            await sampler.changed()  # the other page is still there
        asked = group.asked
        await asyncio.sleep(0.1)
        assert group.asked <= asked + 1  # a question that was on its way

        async with sampler.watching(()):  # and again
            await sampler.changed()
        assert group.asked > asked

    run(test())


def test_the_group_is_asked_for_what_open_pages_need() -> None:
    async def test() -> None:
        group = SimulatedGroup(2)
        sampler = Sampler(group, interval=0.01)
        async with sampler.watching(("threads",)):
            await sampler.changed()
            assert set(group.queries[-1].parts) >= {"threads", *ALWAYS}
            async with sampler.watching(("owned",)):
                while "owned" not in group.queries[-1].parts:
                    await sampler.changed()
            count = len(group.queries)
            while len(group.queries) < count + 3:
                await sampler.changed()
            assert "owned" not in group.queries[-1].parts

    run(test())


def test_a_large_group_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 1)

    async def test() -> None:
        group = SimulatedGroup(3)
        sampler = Sampler(group, interval=0.01)
        async with sampler.watching(()):
            while group.asked < 4:
                await sampler.changed()
        assert not any("links" in query.parts for query in group.queries)
        assert ["events" in query.parts for query in group.queries] == [True] + [False] * (group.asked - 1)

    run(test())


def test_all_references_are_asked_for_but_few_events() -> None:
    async def test() -> None:
        group = SimulatedGroup(2)
        sampler = Sampler(group, interval=0.01)
        for parts, limit in (((), 2000), ((), 500), (("owned",), 2000), (("threads",), 500)):
            await sampler.ask_once(parts)
            assert group.queries[-1].limit == limit

    run(test())


def test_a_new_page_does_not_wait_for_the_next_turn() -> None:
    async def test() -> None:
        sampler = Sampler(SimulatedGroup(2), interval=60.0)
        async with sampler.watching(()):
            await sampler.changed()
            async with sampler.watching(("owned",)):
                await asyncio.wait_for(sampler.changed(), 10.0)
                assert sampler.moment is not None
                assert "owned" in sampler.moment.parts

    run(test())


def test_a_group_that_fails_is_asked_again() -> None:
    async def test() -> None:
        group = SimulatedGroup(2)
        group.error = "all gone"
        sampler = Sampler(group, interval=0.01)
        async with sampler.watching(()):
            while not sampler.problem:
                await sampler.changed()
            assert sampler.problem == "all gone"
            group.error = None
            while sampler.problem:
                await sampler.changed()
            assert sampler.moment is not None

    run(test())


def test_large_groups_are_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause grows with the processor time that the last turn took."""
    sampler = Sampler(SimulatedGroup(1), interval=0.5)
    now = [10.0]
    monkeypatch.setattr(module.time, "process_time", lambda: now[0])
    sampler._processor = 10.0
    assert sampler._pause(0.1) == pytest.approx(0.4)
    now[0] += 0.3
    assert sampler._pause(0.1) == pytest.approx(0.3 / module.SHARE - 0.1)
    now[0] += 100.0
    assert sampler._pause(0.1) == module.MOST


def test_at_the_end_all_pages_are_let_go() -> None:
    async def test() -> None:
        sampler = Sampler(SimulatedGroup(1), interval=60.0)
        async with sampler.watching(()):
            await sampler.changed()
            waiting = asyncio.create_task(sampler.changed())
            await asyncio.sleep(0)
            sampler.close()
            await asyncio.wait_for(waiting, 5.0)
            await asyncio.wait_for(sampler.changed(), 5.0)

    run(test())
