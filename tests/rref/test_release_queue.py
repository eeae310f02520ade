"""Dropped references are let go of soon: by a thread that makes others, in small lots, or by the pool."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from remora import rpc
from remora.rpc import api
from remora.rref import release_queue
from remora.rref.release_queue import INLINE_LENGTH, ReleaseQueue
from remora.testing.world import World


class Agent:
    """Keeps what the pool and the timers are asked to do, until it is told to do it."""

    def __init__(self) -> None:
        self.pool = self.timers = self
        self.asked: list[Any] = []
        self.timed: list[Any] = []

    def call_soon(self, work: Any) -> None:
        self.asked.append(work)

    def soon(self, seconds: float, work: Any) -> None:
        self.timed.append(work)

    def serve(self) -> None:
        while self.asked:
            self.asked.pop(0)()

    def ring(self) -> None:
        timed, self.timed = self.timed, []
        for work in timed:
            work()


class Scene:
    def __init__(self) -> None:
        self.agent = Agent()
        self.let_go: list[list[Any]] = []
        self.dropping = ReleaseQueue(self.agent, self.let_go.append)  # type: ignore[arg-type]

    def drop(self, *forks: Any) -> None:
        for fork in forks:
            self.dropping.put(fork)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_pool_looks_soon_and_comes_back_while_there_is_something(scene: Scene) -> None:
    scene.drop(1, 2, 3)
    assert scene.let_go == []
    assert len(scene.agent.asked) == 1  # for all of them
    scene.agent.serve()
    assert scene.let_go == [[1, 2, 3]]
    scene.drop(4, 5)
    assert scene.agent.asked == []  # it comes back by itself
    scene.agent.ring()
    scene.agent.serve()
    assert scene.let_go == [[1, 2, 3], [4, 5]]
    scene.agent.ring()
    scene.agent.serve()
    assert scene.agent.timed == []  # there was nothing
    scene.drop(6)
    assert len(scene.agent.asked) == 1


def test_a_thread_that_makes_references_sees_to_a_list_that_is_not_short(scene: Scene) -> None:
    scene.drop(0)
    scene.agent.serve()
    scene.drop(*range(1, INLINE_LENGTH))
    scene.dropping.drain_inline()
    assert scene.let_go == [[0]]
    scene.drop(INLINE_LENGTH)
    scene.dropping.drain_inline()
    assert scene.let_go == [[0], [*range(1, INLINE_LENGTH + 1)]]


def test_the_pool_is_not_woken_while_a_thread_does_so_and_comes_when_it_has_ceased(scene: Scene) -> None:
    scene.drop(0)
    scene.agent.serve()
    for _ in range(3):
        scene.drop(*range(INLINE_LENGTH))
        scene.dropping.drain_inline()
        scene.drop("rest")
        scene.agent.ring()
        assert scene.agent.asked == []
        assert len(scene.agent.timed) == 1
    scene.agent.ring()  # nobody has looked since
    scene.agent.serve()
    assert scene.let_go[-1] == ["rest"]
    assert sum(map(len, scene.let_go)) == 1 + 3 * (INLINE_LENGTH + 1)


def test_two_threads_may_look_at_the_same_time(scene: Scene) -> None:
    scene.drop(*range(20_000))
    start = threading.Barrier(4)

    def look() -> None:
        start.wait(10.0)
        scene.dropping.empty()

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert sorted(fork for batch in scene.let_go for fork in batch) == list(range(20_000))


def test_what_goes_wrong_there_is_reported_and_nobody_elses_business(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.dropping, "_release", lambda batch: 1 / 0)
    scene.drop(*range(INLINE_LENGTH))
    scene.dropping.drain_inline()
    assert "could not be let go" in caplog.text


def test_when_all_is_over_nobody_looks(scene: Scene) -> None:
    scene.drop(*range(INLINE_LENGTH))
    scene.dropping.closed = True
    scene.dropping.drain_inline()
    assert scene.let_go == []


def one() -> int:
    return 1


def values() -> int:
    return len(api._get_current_rpc_agent().references.table.state.values)


def test_values_go_while_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the pool of the holder never looks."""
    monkeypatch.setattr(ReleaseQueue, "_run", lambda self: None)
    monkeypatch.setattr(release_queue, "INTERVAL", 3600.0)

    def make(n: int) -> int:
        return sum(rpc.remote("worker1", one).to_here() for _ in range(n))

    with World(2) as world:
        assert world.run(0, make, 100) == 100
        world.wait_until(lambda: world.run(1, values) <= 2 * INLINE_LENGTH)
        monkeypatch.undo()
        world.run(0, api._get_current_rpc_agent).references.table.delete_all(10.0)
