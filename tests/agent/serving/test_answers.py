"""Answers to one caller that follow upon each other share a write; nobody waits for the answer of somebody else."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from remora import rpc
from remora.agent.channel.outbox import Outbox
from remora.rpc import api
from remora.testing.world import World
from remora.vocabulary.messages import MessageType

PYTHON_RET = int(MessageType.PYTHON_RET)
TIMEOUT = 20.0

begun, gate = threading.Event(), threading.Event()


def hold() -> None:
    begun.set()
    assert gate.wait(TIMEOUT)


def here() -> int:
    return 1


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """To whom the answers went, and how."""
    found: list[tuple[str, str]] = []
    inside = threading.local()  # one of the two: `send_batched` sends at once what is alone
    for way in ("send", "send_batched"):
        ordinary = getattr(Outbox, way)

        def note(outbox: Outbox, kind: int, *args: Any, way: str = way, ordinary: Any = ordinary) -> None:
            if kind == PYTHON_RET and not vars(inside):
                found.append((outbox.peer, way))
            vars(inside)[way] = True
            ordinary(outbox, kind, *args)
            del vars(inside)[way]

        monkeypatch.setattr(Outbox, way, note)
    return found


def ask(n: int) -> list[Any]:
    """Calls that wait behind one another on worker0, which has a single place for them."""
    return [rpc.rpc_async("worker0", here) for _ in range(n)]


def backlog() -> int:
    return len(api._get_current_rpc_agent().agent.pool.user_tasks)


def run(callers: list[int], ways: list[tuple[str, str]]) -> None:
    """Have each of these workers ask, while worker0 is busy; then let it go."""
    begun.clear()
    gate.clear()
    with World(3, threads=1) as world:
        held = world.run(1, lambda: rpc.rpc_async("worker0", hold))
        assert begun.wait(TIMEOUT)
        futures = []
        for number, caller in enumerate(callers, 1):
            futures += world.run(caller, ask, 1)
            world.wait_until(lambda number=number: world.run(0, backlog) >= number)  # type: ignore[misc]
        ways.clear()
        gate.set()
        assert [each.wait(TIMEOUT) for each in (held, *futures)] == [None] + [1] * len(callers)


def test_answers_to_one_caller_share_a_write(ways: list[tuple[str, str]]) -> None:
    run([1, 1, 1], ways)
    assert [way for _, way in ways] == ["send_batched"] * 3 + ["send"]


def test_answers_to_different_callers_go_at_once(ways: list[tuple[str, str]]) -> None:
    run([2, 1, 2, 1], ways)
    assert ways == [(f"worker{n}", "send") for n in (1, 2, 1, 2, 1)]
