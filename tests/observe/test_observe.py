"""`remora.observe` inside a program: this worker, its group, and what is stuck."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from remora import observe, rpc
from remora.errors import NothingFound, NotInitialized
from remora.testing.processes import Processes
from remora.testing.world import World
from tests import leaks
from tests.eventually import eventually

gate = threading.Event()


@pytest.fixture(autouse=True, scope="module")
def _fork_server() -> None:
    """It is started once, and stays."""
    with leaks.kept(), Processes(1):
        pass


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    gate.clear()
    yield
    gate.set()


def block() -> int:
    gate.wait(30)
    return 1


def pass_on() -> int:
    return rpc.rpc_sync("worker2", block)


def test_a_program_sees_itself() -> None:
    with World(2) as world, world.acting(0):
        found = observe.snapshot()
        assert found.name == "worker0"
        assert found.threads
        assert observe.snapshot(observe.Query(parts=("links",))).threads == ()


def test_without_a_worker_it_says_so() -> None:
    for look in (observe.snapshot, observe.group_snapshot, observe.stuck):
        with pytest.raises(NotInitialized):
            look()


def test_a_program_sees_its_group_and_what_is_stuck_there() -> None:
    with World(3, transports=["unix"]) as world, world.acting(0):
        assert not observe.stuck(older_than=0.5, timeout=10.0)
        assert str(observe.stuck(older_than=5.0, timeout=10.0)) == "nothing is stuck"
        future = rpc.rpc_async("worker1", pass_on)
        eventually(lambda: len(observe.stuck(older_than=0.05, timeout=10.0).calls) == 2)
        found = observe.stuck(older_than=0.05, timeout=10.0)
        assert [(each.key.caller, each.callee) for each in found.calls] == [("worker0", "worker1"), ("worker1", "worker2")]
        (waiting,) = {name for name, wait in found.waits if wait.call is not None}
        assert waiting == "worker1"
        text = str(found)
        assert f"{__name__}.pass_on of worker0 on worker1: running since" in text
        assert f"worker1 waits since {found.waits[0][1].age:.1f} s for {__name__}.block on worker2" in text
        assert not observe.stuck(older_than=60.0, timeout=10.0)
        group = observe.group_snapshot(timeout=10.0)
        assert [each.name for each in group.workers] == ["worker0", "worker1", "worker2"]
        gate.set()
        future.wait()


def test_a_group_that_nobody_can_observe() -> None:
    with World(2, transports=["inproc"]) as world, world.acting(0), pytest.raises(NothingFound, match="REMORA_OBSERVERS=0"):
        observe.group_snapshot()


def look_at_group() -> tuple[list[str], list[tuple[str, str]]]:
    found = observe.group_snapshot(timeout=2.0)
    return [each.name for each in found.workers], [(each.name, each.state) for each in found.missing]


def stuck_text() -> str:
    return str(observe.stuck(older_than=0.1, timeout=1.5))


def test_one_worker_looks_at_processes_of_which_one_is_stopped() -> None:
    with Processes(2) as workers:
        assert workers.run(0, look_at_group) == (["worker0", "worker1"], [])
        workers.freeze(1)
        found: Any = workers.run(0, look_at_group)
        assert found == (["worker0"], [("worker1", "silent")])
        assert "worker1 is silent: its process" in workers.run(0, stuck_text)
        workers.thaw(1)
