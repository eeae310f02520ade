"""The explanation of a dump names the culprit first."""

from __future__ import annotations

from typing import Any

import pytest

from remora.observer.dump import Cause, Dump, WorkerDump
from remora.observer.explain import Finding, Kind, explain, summary
from remora.observer.model import (
    CallKey,
    CallStatus,
    Event,
    EventKind,
    GroupSnapshot,
    LinkStatus,
    Missing,
    OwnedReference,
    Pool,
    Stage,
    ThreadStatus,
    WaitKind,
    WaitStatus,
    WorkerSnapshot,
)  # fmt: skip
from tests.observer.snapshots import call as call_of

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    step()
{}
"""


def worker(name: str, **parts: Any) -> WorkerSnapshot:
    base: dict[str, Any] = {
        "rank": int(name[-1]), "group": "g", "incarnation": "i", "pid": 7, "host": "h", "time": 1e9, "up": 2.5,
    }  # fmt: skip
    return WorkerSnapshot(**{**base, **parts}, name=name)


def dump_of(*workers: WorkerSnapshot, missing: tuple[Missing, ...] = (), dumps: tuple[WorkerDump, ...] = ()) -> Dump:
    group = GroupSnapshot(group="g", time=1e9, workers=workers, missing=missing)
    return Dump(group=group, workers=dumps or tuple(WorkerDump(cause=Cause.ASKED, snapshot=each) for each in workers))


def kinds(found: list[Finding]) -> list[Kind]:
    return [each.kind for each in found]


def running(caller: str, number: int, callee: str, age: float, **parts: Any) -> CallStatus:
    base: dict[str, Any] = {
        "key": CallKey(caller=caller, id=number), "callee": callee, "function": "m.f", "kind": "PYTHON_CALL",
        "stage": Stage.RUNNING, "age": age,
    }  # fmt: skip
    return CallStatus(**{**base, **parts})


def test_nothing_is_wrong_with_a_group_that_works() -> None:
    busy = worker("worker0", calls=(running("worker1", 1, "worker0", 0.1),), versions={"torch": "2"})
    assert explain(dump_of(busy, worker("worker1", versions={"torch": "2"}))) == []


def test_the_worker_that_raised_comes_before_those_that_ended_because_of_it() -> None:
    def last(name: str, error: str, at: float) -> WorkerDump:
        return WorkerDump(cause=Cause.ERROR, snapshot=worker(name, time=at), last_words=TRACEBACK.format(error))

    dumps = (
        last("worker1", "remora.errors.WorkerLost: call of f on worker2: worker2 died", 10.2),
        last("worker2", "ValueError: no such batch: 17", 10.0),
        last("worker0", "remora.errors.WorkerLost: call of f on worker1: worker1 died", 10.4),
    )
    found = explain(dump_of(*(each.snapshot for each in dumps), dumps=dumps))
    assert kinds(found) == [Kind.DIED, Kind.CONSEQUENCE, Kind.CONSEQUENCE]
    assert found[0].text == "worker2 ended with an error: ValueError: no such batch: 17"
    assert '  File "train.py", line 7, in <module>' in found[0].details
    assert "because worker2 was gone" in found[1].text


def test_a_worker_that_was_killed_is_named_by_its_peers() -> None:
    died = Event(time=5.0, kind=EventKind.DIED, peer="worker1", text="its process ended")
    link = LinkStatus(peer="worker1", state="dead", reason="connection reset")
    found = explain(dump_of(worker("worker0", events=(died,), links=(link,)), worker("worker2", links=(link,))))
    assert kinds(found) == [Kind.DIED]
    assert found[0].text.startswith("worker1 died, and left no last words")
    assert "worker0 says: its process ended" in found[0].details


def test_a_silent_worker_is_told_with_its_stacks_and_those_who_wait_for_it() -> None:
    waits = tuple(running("worker0", n, "worker1", 9.0, stage=Stage.BEGUN) for n in (1, 2))
    silent = Missing(name="worker1", rank=1, state="silent", reason="stopped by SIGSTOP", stacks="Thread 0x7f\n  File x")
    found = explain(dump_of(worker("worker0", calls=waits), missing=(silent,)))
    assert kinds(found) == [Kind.SILENT]
    assert "stopped by SIGSTOP; 2 calls wait for it" in found[0].text
    assert "  File x" in found[0].details


def test_the_function_that_all_others_wait_for_is_found_with_its_stack() -> None:
    outer, inner = CallKey(caller="worker0", id=1), CallKey(caller="worker1", id=4)
    first = worker("worker1", calls=(
        running("worker0", 1, "worker1", 30.0), running("worker1", 4, "worker2", 29.0, stage=Stage.BEGUN, parent=outer)
    ))  # fmt: skip
    second = worker(
        "worker2", calls=(running("worker1", 4, "worker2", 29.0, function="m.slow", thread=3),),
        threads=(ThreadStatus(id=3, name="pool-0", role="pool", serving=inner, stack=(
            "/x/remora/agent/serving/execution.py:7 run", "a.py:1 f", "b.py:9 sleep",
        )),),
        waits=(WaitStatus(kind=WaitKind.LOCK, text="the lock that MainThread holds", serving=inner),),
    )  # fmt: skip
    found = explain(dump_of(first, second))
    assert kinds(found) == [Kind.STUCK]
    assert found[0].text == (
        "m.slow has run on worker2 for 29.0 s, called by worker1, and waits for the lock that MainThread holds; "
        "1 more call waits for it"
    )
    assert found[0].details == ("thread pool-0:", "  a.py:1 f", "  b.py:9 sleep")


def test_a_cycle_is_the_culprit_and_its_calls_are_not_told_twice() -> None:
    """worker0 serves a call of worker1, and waits for one of its own there; and the other way round."""

    def half(me: str, other: str) -> WorkerSnapshot:
        mine, theirs = CallKey(caller=me, id=1), CallKey(caller=other, id=1)
        return worker(
            me, calls=(
                running(me, 1, other, 20.0, stage=Stage.BEGUN, thread=5, parent=theirs),
                running(other, 1, me, 20.0, thread=5),
            ),
            waits=(WaitStatus(
                kind=WaitKind.CALL, text="f", age=20.0, thread=5, serving=theirs, call=mine, workers=(other,)
            ),),
            threads=(ThreadStatus(id=5, name="pool-0", role="pool", stack=("a.py:1 f",), serving=theirs),),
        )  # fmt: skip

    found = explain(dump_of(half("worker0", "worker1"), half("worker1", "worker0")))
    assert kinds(found) == [Kind.CYCLE]
    assert "cycle" in found[0].text
    assert "  a.py:1 f" in found[0].details


def test_a_call_that_its_callee_does_not_know_is_told() -> None:
    sent = tuple(running("worker0", n, "worker1", 8.0, stage=Stage.SENT) for n in range(3))
    found = explain(dump_of(worker("worker0", calls=sent), worker("worker1")))
    assert kinds(found) == [Kind.STUCK]
    assert "3 calls of m.f from worker0 to worker1: was sent, and the callee knows nothing" in found[0].text


def test_a_pool_without_a_free_thread_is_told() -> None:
    calls = (running("worker1", 1, "worker0", 1.0), running("worker1", 2, "worker0", 1.0))
    found = explain(dump_of(worker("worker0", pool=Pool(limit=2, threads=3, running=2, queued=40), calls=calls)))
    assert kinds(found) == [Kind.POOL_FULL]
    assert found[0].details == ("2 x m.f",)


@pytest.mark.parametrize("cut", [0, 9000])
def test_leaked_references_are_told_by_function_and_holder(cut: int) -> None:
    owned = tuple(
        OwnedReference(id=str(n), type="Tensor", state="ready", age=n / 10, bytes=4, holders=("worker1",), function="m.make")
        for n in range(1000)
    )  # fmt: skip
    few = tuple(OwnedReference(id=f"x{n}", type="int", state="ready", age=1.0, function="m.other") for n in range(9))
    snapshot = worker("worker0", owned=owned + few, left_out={"owned": cut} if cut else {})
    found = explain(dump_of(snapshot))
    assert kinds(found) == [Kind.LEAK]
    assert found[0].text.startswith("1,000")
    assert found[0].text.endswith("references to values that m.make made on worker0 are held by worker1")
    assert ("9,000" in found[0].text) is bool(cut)
    assert "4,000 bytes" in found[0].details


def test_versions_that_differ_are_told() -> None:
    first, second = worker("worker0", versions={"torch": "2.4"}), worker("worker1", versions={"torch": "2.13"})
    found = explain(dump_of(first, second, worker("worker2", versions={"torch": "2.4"})))
    assert kinds(found) == [Kind.VERSIONS]
    assert found[0].text.endswith("torch: 2.13 on worker1; 2.4 on worker0, worker2")


def test_the_causes_come_in_their_order() -> None:
    """A dead worker, a silent one, a stuck call and different versions at once."""
    missing = (
        Missing(name="worker8", rank=8, state="dead", reason="killed"),
        Missing(name="worker9", rank=9, state="silent", reason="it did not answer"),
        Missing(name="worker7", rank=7, state="left", reason=""),
    )
    stuck = worker("worker0", calls=(running("worker1", 1, "worker0", 60.0),), versions={"python": "3.11"})
    dump = dump_of(stuck, worker("worker1", versions={"python": "3.12"}), missing=missing)
    assert kinds(explain(dump)) == [Kind.DIED, Kind.SILENT, Kind.STUCK, Kind.VERSIONS]
    assert summary(dump)[0] == "group g: 2 workers in the dump, 3 not: worker8 (dead), worker9 (silent), worker7 (left)"


def test_calls_that_are_alike_are_one_finding() -> None:
    """They differ in their numbers, ages and threads only."""
    threads = tuple(ThreadStatus(id=n, name=f"t{n}", role="pool", stack=("t.py:1 f",)) for n in range(5000))
    calls = tuple(call_of(f"worker0#{n}", "worker1", "f", Stage.RUNNING, 10.0 + n / 1000, n) for n in range(5000))
    other = call_of("worker0#9999", "worker1", "g", Stage.RUNNING, 7.0)
    found = explain(dump_of(worker("worker1", calls=(*calls, other), threads=threads)))
    assert [each.text for each in found] == [
        "f has run on worker1 for 15.0 s, called by worker0 (and 4,999 more calls like this)",
        "g has run on worker1 for 7.0 s, called by worker0",
    ]
    assert found[0].details == ("thread t4999:", "  t.py:1 f")
