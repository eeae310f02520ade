"""The wait-for graph: what it says of made-up groups, whose halves lack and whose clocks differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remora.observer.model import (
    GroupSnapshot,
    OwnedReference,
    PassStatus,
    Pool,
    Stage,
    ThreadStatus,
    WaitKind,
    WaitStatus,
    WorkerSnapshot,
)
from remora.observer.wait_edges import ago
from remora.observer.wait_graph import Edge, Graph, Node, NodeKind
from remora.observer.waits import WaitGraph
from tests.observer.snapshots import MAIN, OTHER, POOL, THREADS, call, gone, group, key, waits, waits_for, worker

SENT, BEGUN, QUEUED, RUNNING = Stage.SENT, Stage.BEGUN, Stage.QUEUED, Stage.RUNNING


def explain(*workers: WorkerSnapshot, **fields: object) -> list[str]:
    return WaitGraph.of(group(*workers, **fields)).explain()  # type: ignore[arg-type]


def lock_cycle() -> list[WorkerSnapshot]:
    """worker0 holds a lock and calls f on worker1, which calls g on worker2, which calls back h, which wants the lock."""
    return [
        worker(
            "worker0",
            calls=(call("worker0#1", "worker1", "f", BEGUN, 12.3), call("worker2#3", "worker0", "h", RUNNING, 5, POOL)),
            waits=(waits_for("worker0#1", age=12.3), waits(WaitKind.LOCK, POOL, 5.0, serving="worker2#3", holder=MAIN)),
        ),
        worker(
            "worker1",
            calls=(call("worker0#1", "worker1", "f", RUNNING, 12.3, POOL), call("worker1#2", "worker2", "g", BEGUN, 8)),
            waits=(waits_for("worker1#2", thread=POOL, age=8.0, serving="worker0#1"),),
        ),
        worker(
            "worker2",
            calls=(call("worker1#2", "worker2", "g", RUNNING, 8, POOL), call("worker2#3", "worker0", "h", BEGUN, 5)),
            waits=(waits_for("worker2#3", thread=POOL, age=5.0, serving="worker1#2"),),
        ),
    ]


def test_a_cycle_over_three_workers_is_one_sentence() -> None:
    assert explain(*lock_cycle()) == [
        "worker0 waits for f on worker1 (12.3 s), which waits for g on worker2 (8.0 s), which waits for h on worker0 "
        "(5.0 s), which waits for a lock that the main thread of worker0 holds (5.0 s): a cycle"
    ]


def test_what_leads_into_a_cycle_is_told_after_it_and_is_none() -> None:
    outside = worker(
        "worker3", calls=(call("worker3#9", "worker1", "k", BEGUN, 3),), waits=(waits_for("worker3#9", age=3.0),)
    )
    workers = lock_cycle()
    served = call("worker3#9", "worker1", "k", RUNNING, 3, OTHER)
    blocked = waits(WaitKind.LOCK, OTHER, 3.0, serving="worker3#9", holder=POOL)
    workers[1] = replace(workers[1], calls=(*workers[1].calls, served), waits=(*workers[1].waits, blocked))
    graph = WaitGraph.of(group(*workers, outside))
    assert len(graph.cycles()) == 1
    assert "worker3" not in graph.cycles()[0].text
    (chain,) = graph.chains()
    assert chain.cyclic
    assert chain.text.startswith(
        "worker3 waits for k on worker1 (3.0 s), which waits for a lock that thread pool-0 of worker1 holds (3.0 s), which "
        "serves f on worker1 and is in a cycle"
    )


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_cycle_is_found_when_the_half_of_a_callee_is_missing(n: int) -> None:
    """Who waits says what it serves, so the cycle does not depend on the lists of calls."""
    workers = lock_cycle()
    workers[n] = replace(workers[n], calls=())
    (cycle,) = WaitGraph.of(group(*workers)).cycles()
    assert {node.worker for node in cycle.nodes} == {"worker0", "worker1", "worker2"}


@pytest.mark.parametrize("n", [0, 1, 2])
def test_there_is_no_cycle_without_one_of_its_workers(n: int) -> None:
    workers = lock_cycle()
    lost = workers.pop(n)
    graph = WaitGraph.of(group(*workers, missing=(gone(lost.name),)))
    assert graph.cycles() == []
    text = "\n".join(graph.explain())
    assert "a cycle" not in text
    if n > 0:
        assert f"and {lost.name} is silent: its process is stopped (SIGSTOP)" in text


def test_a_worker_that_was_started_again_counts_and_the_one_before_does_not() -> None:
    graph = WaitGraph.of(group(*lock_cycle(), missing=(gone("worker1", "dead", "killed"),)))
    assert len(graph.cycles()) == 1
    assert not graph.gone()
    caller = worker("worker0", calls=(call("worker0#1", "worker1", "f", SENT),), waits=(waits_for("worker0#1"),))
    assert explain(caller, worker("worker1"), missing=(gone("worker1", "dead", "killed"),)) == [
        "worker0 waits for f on worker1 (10.0 s), which is on its way there or back"
    ]


# Clocks. A cycle counts if all its edges hold at one moment.


def shifted(offset: float, error: float, known: bool = True) -> GroupSnapshot:
    """The wall clock of worker1 is ahead by `offset`."""
    workers = lock_cycle()
    workers[1] = replace(workers[1], time=100.0 + offset)
    offsets = {"worker0": 0.0, "worker1": offset, "worker2": 0.0}
    if not known:
        del offsets["worker1"]
    return group(*workers, clock_offsets=offsets, clock_errors={"worker1": error})


@pytest.mark.parametrize("offset", [-3600.0, 0.0, 3600.0])
@pytest.mark.parametrize("known", [True, False])
def test_clocks_that_differ_hide_no_cycle(offset: float, known: bool) -> None:
    assert len(WaitGraph.of(shifted(offset, 0.01, known)).cycles()) == 1


def test_what_never_was_at_one_moment_is_no_cycle() -> None:
    workers = lock_cycle()
    later = replace(workers[1], time=200.0)  # asked 100 s after the others, when its wait of 8 s had not begun
    assert WaitGraph.of(group(workers[0], later, workers[2])).cycles() == []
    errors = {"worker1": 95.0}  # its clock may be off so far that it was
    assert len(WaitGraph.of(group(workers[0], later, workers[2], clock_errors=errors)).cycles()) == 1


# One-sided views.


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (Stage.UNSENT, "which has not been sent to worker1"),
        (Stage.SENT, "which is on its way there or back"),
        (Stage.BEGUN, "which has begun there, and may have ended meanwhile"),
    ],
)
def test_a_call_that_its_callee_does_not_have(stage: Stage, says: str) -> None:
    caller = worker("worker0", calls=(call("worker0#1", "worker1", "f", stage),), waits=(waits_for("worker0#1"),))
    assert explain(caller, worker("worker1")) == [f"worker0 waits for f on worker1 (10.0 s), {says}"]


def test_a_call_that_neither_end_has() -> None:
    assert explain(worker("worker0", waits=(waits_for("worker0#1"),))) == ["worker0 waits for call worker0#1 (10.0 s)"]


def test_a_function_that_computes_is_where_its_thread_is() -> None:
    caller = worker("worker0", calls=(call("worker0#1", "worker1", "f", BEGUN),), waits=(waits_for("worker0#1"),))
    callee = worker("worker1", calls=(call("worker0#1", "worker1", "f", RUNNING, 9, POOL),))
    assert explain(caller, callee) == ["worker0 waits for f on worker1 (10.0 s), which is at train.py:40 serve"]


def test_a_lock_names_its_holder_and_what_that_does() -> None:
    served = call("worker0#1", "worker1", "f", RUNNING, 9, POOL)
    callee = worker(
        "worker1",
        calls=(served, call("worker2#1", "worker1", "g", RUNNING, 20, OTHER)),
        waits=(waits(WaitKind.LOCK, POOL, 9.0, serving="worker0#1", holder=OTHER),),
    )
    assert explain(worker("worker0", waits=(waits_for("worker0#1"),)), callee) == [
        "worker0 waits for f on worker1 (10.0 s), which waits for a lock that thread pool-1 of worker1 holds (9.0 s), which "
        "serves g on worker1 and is at train.py:50 other"
    ]


def test_a_lock_whose_holder_is_not_known() -> None:
    assert explain(worker("worker0", waits=(waits(WaitKind.LOCK),))) == [
        "worker0 waits for a lock whose holder is not known (10.0 s)"
    ]


def test_a_coroutine_that_serves_is_its_call() -> None:
    """It has no thread: the cycle goes through the call itself."""
    first = worker(
        "worker0",
        calls=(call("worker1#1", "worker0", "f", RUNNING),),
        waits=(waits_for("worker0#2", thread=None, serving="worker1#1"),),
    )
    second = worker(
        "worker1",
        calls=(call("worker0#2", "worker1", "g", RUNNING),),
        waits=(waits_for("worker1#1", thread=None, serving="worker0#2"),),
    )
    (cycle,) = WaitGraph.of(group(first, second)).cycles()
    assert [node.kind for node in cycle.nodes] == [NodeKind.CALL] * 3
    assert cycle.text.endswith(": a cycle")


def test_two_coroutines_of_a_program_are_not_one() -> None:
    """If they were, the call of the one would seem to wait for the other."""
    both = worker(
        "worker0",
        calls=(call("worker0#1", "worker0", "f", RUNNING, 9, POOL),),
        waits=(waits_for("worker0#1", thread=None), waits(WaitKind.LOCK, POOL, serving="worker0#1")),
    )
    assert not WaitGraph.of(group(both)).cycles()


# Gatherings and shutdown.


def test_a_gathering_names_all_that_have_not_come_and_where_they_are() -> None:
    text = "barrier 3: worker2 and worker3 have not come"
    waiting = [
        worker(f"worker{n}", waits=(waits(WaitKind.GATHERING, age=4.0 + n, text=text, workers=("worker2", "worker3")),))
        for n in range(2)
    ]
    assert explain(*waiting, worker("worker2"), missing=(gone("worker3"),)) == [
        "worker1 waits in barrier 3 (5.0 s), where worker2 and worker3 have not come, and worker3 is silent: its process is "
        "stopped (SIGSTOP)",
        "worker0 waits in barrier 3 (4.0 s), where worker2 and worker3 have not come, and worker3 is silent: its process is "
        "stopped (SIGSTOP)",
    ]
    late = explain(waiting[0], worker("worker2"), worker("worker3"))
    assert late[0].endswith(
        "where worker2 and worker3 have not come, and worker2 is at train.py:30 step with its main thread"
    )
    assert explain(waiting[0], worker("worker2"))[0].endswith("and worker3 has not been heard of")


def test_a_gathering_whose_leader_is_in_it_waits_for_others() -> None:
    """A follower says that it waits for the leader; the leader says for whom it waits. That is no cycle."""
    follower = worker(
        "worker1", waits=(waits(WaitKind.GATHERING, text="barrier 3: worker0 leads", workers=("worker0",)),)
    )
    leader = worker(
        "worker0", waits=(waits(WaitKind.GATHERING, text="barrier 3: worker1 …", workers=("worker1", "worker2")),)
    )
    graph = WaitGraph.of(group(follower, leader, worker("worker2")))
    assert graph.cycles() == []
    assert all("worker2 has not come, and worker2 is at train.py:30" in text for text in graph.explain())


def test_two_gatherings_that_wait_for_each_other_are_a_cycle() -> None:
    first = worker("worker0", waits=(waits(WaitKind.GATHERING, text="barrier 3: …", workers=("worker1",)),))
    second = worker("worker1", waits=(waits(WaitKind.GATHERING, text="barrier 4: …", workers=("worker0",)),))
    (cycle,) = WaitGraph.of(group(first, second)).cycles()
    assert cycle.text in (
        "worker0 waits in barrier 3 (10.0 s), where worker1 has not come, and the main thread of worker1 waits in barrier 4 "
        "(10.0 s), where worker0 has not come: a cycle",
        "worker1 waits in barrier 4 (10.0 s), where worker0 has not come, and the main thread of worker0 waits in barrier 3 "
        "(10.0 s), where worker1 has not come: a cycle",
    )


def test_a_worker_that_left_is_not_gone() -> None:
    waiting = worker("worker0", waits=(waits(WaitKind.GATHERING, text="barrier 3", workers=("worker1",)),))
    graph = WaitGraph.of(group(waiting, missing=(gone("worker1", "left", ""),)))
    assert not graph.gone()
    assert graph.explain() == ["worker0 waits in barrier 3 (10.0 s), where worker1 has not come, and worker1 has left"]


def test_a_shutdown_leads_to_the_calls_that_are_under_way() -> None:
    ending = worker(
        "worker0",
        calls=(call("worker1#1", "worker0", "f", RUNNING, 9, POOL),),
        waits=(waits(WaitKind.SHUTDOWN, text="until no call is under way", workers=("worker1",)),),
    )
    assert explain(ending, worker("worker1")) == [
        "worker0 waits in shutdown until no call is under way (10.0 s), where f on worker0 is under way for worker1 (9.0 s)"
        ", which is at train.py:40 serve"
    ]


def test_a_coroutine_waits_for_the_event_loop_that_another_one_blocks() -> None:
    """f, a coroutine, makes a call that blocks; that calls back g, a coroutine on the same event loop."""
    loop = ThreadStatus(id=7, name="loop", role="event loop", stack=("train.py:60 f",))
    caller = worker(
        "worker0",
        threads=(*THREADS, loop),
        calls=(call("worker0#1", "worker0", "f", RUNNING, 9, 7), call("worker1#3", "worker0", "g", RUNNING, 5)),
        waits=(
            waits_for("worker0#1", age=9.0),
            waits_for("worker0#2", age=8.0, thread=7, serving="worker0#1"),
            waits(WaitKind.LOOP, None, None, serving="worker1#3", holder=7),
        ),
    )
    callee = worker(
        "worker1",
        calls=(call("worker0#2", "worker1", "h", RUNNING, 8, POOL),),
        waits=(waits_for("worker1#3", thread=POOL, age=5.0, serving="worker0#2"),),
    )
    (cycle,) = WaitGraph.of(group(caller, callee)).cycles()
    assert cycle.text == (
        "thread loop of worker0, which serves f on worker0, waits for h on worker1 (8.0 s), which waits for g on worker0 "
        "(5.0 s), which waits for the event loop of worker0: a cycle"
    )


def test_a_coroutine_has_no_slot_while_it_runs() -> None:
    loop = ThreadStatus(id=7, name="loop", role="event loop", stack=("train.py:60 f",))
    calls = (call("worker0#1", "worker1", "f", RUNNING, 9, 7), call("worker0#2", "worker1", "k", QUEUED, 3))
    found = explain(worker("worker1", threads=(*THREADS, loop), pool=Pool(limit=1), calls=calls))
    assert not any("slot" in text for text in found)


def test_where_a_coroutine_is() -> None:
    caller = worker("worker0", calls=(call("worker0#1", "worker1", "f", SENT),), waits=(waits_for("worker0#1"),))
    coroutine = ThreadStatus(id=9, name="coroutine Task-5", role="coroutine", stack=("t.py:5 f",), serving=key("worker0#1"))
    calls = (call("worker0#1", "worker1", "f", RUNNING, 9),)
    assert explain(caller, worker("worker1", threads=(*THREADS, coroutine), calls=calls)) == [
        "worker0 waits for f on worker1 (10.0 s), which is at t.py:5 f"
    ]
    assert explain(caller, worker("worker1", calls=calls)) == [
        "worker0 waits for f on worker1 (10.0 s), which runs there, and holds no thread"
    ]


def test_a_lock_that_a_coroutine_holds() -> None:
    """f holds a lock of asyncio and awaits g on worker1, which calls back h, which wants that lock."""
    caller = worker(
        "worker0",
        calls=(call("worker2#1", "worker0", "f", RUNNING, 9), call("worker1#3", "worker0", "h", RUNNING, 5)),
        waits=(
            waits_for("worker0#2", age=8.0, thread=None, serving="worker2#1"),
            waits(WaitKind.LOCK, None, None, serving="worker1#3", call="worker2#1", text="the lock mine at t.py:5"),
        ),
    )
    callee = worker(
        "worker1",
        calls=(call("worker0#2", "worker1", "g", RUNNING, 8, POOL),),
        waits=(waits_for("worker1#3", thread=POOL, age=5.0, serving="worker0#2"),),
    )
    (cycle,) = WaitGraph.of(group(caller, callee)).cycles()
    assert "waits for the lock mine that f on worker0 holds" in cycle.text


def test_a_thread_that_waits_for_another_one() -> None:
    """The main thread holds a lock and waits for a thread that makes a call, which comes back for the lock."""
    for limited in (False, True):
        caller = worker(
            "worker0",
            calls=(call("worker1#3", "worker0", "g", RUNNING, 5, POOL),),
            waits=(
                waits(WaitKind.THREAD, MAIN, None, holder=OTHER, text="thread pool-1 to end", limited=limited),
                waits_for("worker0#2", age=8.0, thread=OTHER),
                waits(WaitKind.LOCK, POOL, 5.0, serving="worker1#3", holder=MAIN, text="the lock l at t.py:5"),
            ),
        )
        callee = worker(
            "worker1",
            calls=(call("worker0#2", "worker1", "f", RUNNING, 8, POOL),),
            waits=(waits_for("worker1#3", thread=POOL, age=5.0, serving="worker0#2"),),
        )
        (cycle,) = WaitGraph.of(group(caller, callee)).cycles()
        assert cycle.text == (
            "worker0 waits for thread pool-1 to end, which waits for f on worker1 (8.0 s), which waits for g on worker0 "
            "(5.0 s), which waits for the lock l that the main thread of worker0 holds (5.0 s): a cycle"
        )
        assert cycle.limited is limited


def fetching(maker: tuple[WaitStatus, ...] = ()) -> list[WorkerSnapshot]:
    """worker0 fetches a value from worker1, where f makes it."""
    value = OwnedReference(id="0:7", type="", state="being made", age=9.0, function="f")
    calls = (
        call("worker0#1", "worker1", "f", RUNNING, 9, POOL, makes="0:7"),
        call("worker0#2", "worker1", "to_here()", RUNNING, 8),
    )
    fetch = waits(WaitKind.REFERENCE, None, 8.0, serving="worker0#2", reference="0:7", workers=("worker1",))
    return [
        worker("worker0", calls=(call("worker0#2", "worker1", "to_here()", SENT),), waits=(waits_for("worker0#2"),)),
        worker("worker1", owned=(value,), calls=calls, waits=(fetch, *maker)),
    ]


def test_a_fetch_leads_to_the_function_that_makes_the_value() -> None:
    assert explain(*fetching()) == [
        "worker0 waits for to_here() on worker1 (10.0 s), which waits for the value of f on worker1 (8.0 s), which is made "
        "by f for worker0 (9.0 s), which is at train.py:40 serve"
    ]


def test_a_cycle_through_a_fetch_of_a_value() -> None:
    """f makes the value, and calls h on worker0, which wants the lock that the main thread holds while it fetches."""
    caller, owner = fetching((waits_for("worker1#5", thread=POOL, serving="worker0#1"),))
    served = call("worker1#5", "worker0", "h", RUNNING, 5, POOL)
    wants = waits(WaitKind.LOCK, POOL, 5.0, serving="worker1#5", holder=MAIN)
    caller = replace(caller, calls=(*caller.calls, served), waits=(*caller.waits, wants))
    (cycle,) = WaitGraph.of(group(caller, owner)).cycles()
    assert "which waits for the value of f on worker1 (8.0 s), which is made by f" in cycle.text


def test_a_call_that_has_not_begun_has_the_name_that_its_caller_knows() -> None:
    caller = worker("worker0", calls=(call("worker0#1", "worker1", "f", SENT),), waits=(waits_for("worker0#1"),))
    callee = worker("worker1", calls=(call("worker0#1", "worker1", "", QUEUED),))
    assert explain(caller, callee) == [
        "worker0 waits for f on worker1 (10.0 s), which has come to worker1, and has not begun"
    ]
    assert explain(worker("worker0", waits=(waits_for("worker0#1"),)), callee) == [
        "worker0 waits for call worker0#1 on worker1 (10.0 s), which has come to worker1, and has not begun"
    ]


# Pools: one of several is enough.


def pool_of(limit: int, blocked: int, kind: WaitKind = WaitKind.LOCK) -> GroupSnapshot:
    """`blocked` functions on worker1 want a lock that its main thread holds; that waits for g on worker0, which calls back
    k; and k has no slot."""
    held = tuple(call(f"worker0#{n}", "worker1", "f", RUNNING, 9, 10 + n) for n in range(blocked))
    locked = tuple(waits(kind, 10 + n, 9.0, serving=f"worker0#{n}", holder=MAIN) for n in range(blocked))
    callee = worker(
        "worker1",
        pool=Pool(limit=limit),
        calls=(*held, call("worker0#99", "worker1", "k", QUEUED, 3)),
        waits=(waits_for("worker1#1", age=8.0), *locked),
    )
    caller = worker(
        "worker0",
        calls=(call("worker1#1", "worker0", "g", RUNNING, 8, POOL),),
        waits=(waits_for("worker0#99", thread=POOL, age=3.0, serving="worker1#1"),),
    )
    return group(callee, caller)


@pytest.mark.parametrize("kind", [WaitKind.LOCK, WaitKind.THREAD])
def test_a_pool_is_in_a_cycle_when_all_its_slots_are(kind: WaitKind) -> None:
    assert len(WaitGraph.of(pool_of(2, 2, kind)).cycles()) == 1
    assert "has a slot" in WaitGraph.of(pool_of(2, 2)).cycles()[0].text


def test_a_pool_with_room_goes_on() -> None:
    assert WaitGraph.of(pool_of(3, 2)).cycles() == []


def test_a_pool_goes_on_when_one_function_in_it_does() -> None:
    shown = pool_of(3, 2)
    free = call("worker5#1", "worker1", "free", RUNNING, 1, 99)
    callee = replace(shown.workers[0], calls=(*shown.workers[0].calls, free))
    assert WaitGraph.of(replace(shown, workers=(callee, shown.workers[1]))).cycles() == []


def test_a_function_that_waits_for_a_call_has_no_slot() -> None:
    """f waits for m on worker0, and m for the lock of what waits for k, which has no slot yet. It gets that of f."""
    callee = worker(
        "worker1",
        pool=Pool(limit=1),
        calls=(call("worker0#1", "worker1", "f", RUNNING, 9, POOL), call("worker0#2", "worker1", "k", QUEUED, 3)),
        waits=(waits_for("worker1#1", thread=POOL, serving="worker0#1"),),
    )
    caller = worker(
        "worker0",
        calls=(call("worker1#1", "worker0", "m", RUNNING, 8, POOL),),
        waits=(waits(WaitKind.LOCK, POOL, serving="worker1#1", holder=MAIN), waits_for("worker0#2")),
    )
    assert WaitGraph.of(group(callee, caller)).cycles() == []
    blocked = replace(callee, waits=(waits(WaitKind.LOCK, POOL, serving="worker0#1", holder=OTHER),))
    assert "the pool of worker1" in [
        WaitGraph.of(group(blocked)).label(node) for node in WaitGraph.of(group(blocked)).nodes
    ]


def test_one_that_may_have_gone_on_by_a_way_that_is_not_seen_any_more_is_in_no_cycle() -> None:
    first, second, pool, other, alone = (Node(NodeKind.POOL, name) for name in "abcde")

    def edge(source: Node, target: Node, moment: float) -> tuple[tuple[Node, Node], Edge]:
        return (source, target), Edge(source, target, "waits", None, moment, moment)

    edges = dict([edge(pool, first, 5.0), edge(first, second, 5.0), edge(second, pool, 5.0), edge(pool, other, 0.0)])
    edges[alone, alone] = Edge(alone, alone, "waits")
    labels = {node: node.worker for node in (first, second, pool, other, alone)}
    assert [each.start for each in WaitGraph(Graph(edges=edges, labels=labels, any_of={pool})).cycles()] == [alone]
    assert len(WaitGraph(Graph(edges=edges, labels=labels)).cycles()) == 2


# References, backward passes, links.


def reference(*makers: str, made: str = "r1") -> GroupSnapshot:
    """worker0 waits for a value that calls on worker1 make; each waits for the lock of the main thread, and that for
    worker0."""
    owner = worker(
        "worker1",
        owned=(OwnedReference(id="r1", type="", state="being made", age=4, function="make"),),
        calls=tuple(call(each, "worker1", "make", RUNNING, 4, 10 + n, makes=made) for n, each in enumerate(makers)),
        waits=(
            *(waits(WaitKind.LOCK, 10 + n, 4.0, serving=each, holder=MAIN) for n, each in enumerate(makers)),
            waits_for("worker1#7"),
        ),
    )
    caller = worker(
        "worker0",
        calls=(call("worker1#7", "worker0", "h", RUNNING, 6, POOL),),
        waits=(waits(WaitKind.REFERENCE, POOL, 4.0, serving="worker1#7", reference="r1", workers=("worker1",)),),
    )
    return group(caller, owner)


def test_a_value_that_is_being_made_leads_to_what_makes_it() -> None:
    (cycle,) = WaitGraph.of(reference("worker0#1")).cycles()
    assert "waits for the value of make on worker1 (4.0 s), which is made by make for worker0 (4.0 s)" in cycle.text


def test_a_value_may_be_made_by_what_is_not_shown() -> None:
    assert WaitGraph.of(reference()).cycles() == []
    assert WaitGraph.of(reference("worker0#1", made="r2")).cycles() == [], "the same function makes another value"


def test_the_value_of_an_owner_that_died() -> None:
    waiting = worker(
        "worker0", waits=(waits(WaitKind.REFERENCE, reference="r1", text="a Model", workers=("worker1",)),)
    )
    assert explain(waiting, missing=(gone("worker1", "dead", "it was killed"),)) == [
        "worker0 waits for a Model on worker1 (10.0 s), and worker1 is dead: it was killed"
    ]


def test_a_backward_pass_leads_to_who_owes_and_is_never_a_cycle() -> None:
    def part(name: str, peer: str) -> WorkerSnapshot:
        passes = (PassStatus(context=5, number=1, started_by="worker0", phase="backward", age=2, awaits={peer: 2}),)
        return worker(name, passes=passes, waits=(waits(WaitKind.BACKWARD, context=5),))

    graph = WaitGraph.of(group(part("worker0", "worker1"), part("worker1", "worker0")))
    assert graph.cycles() == []
    assert not any("a cycle" in text for text in graph.explain())
    assert explain(part("worker0", "worker1"), missing=(gone("worker1"),)) == [
        "worker0 waits for backward pass 5 (10.0 s), which waits for 2 gradients from worker1, and worker1 is silent: its "
        "process is stopped (SIGSTOP)"
    ]


def test_a_full_link_leads_to_a_worker_that_does_not_read() -> None:
    waiting = worker("worker0", waits=(waits(WaitKind.LINK, workers=("worker1",)),))
    assert explain(waiting, missing=(gone("worker1"),)) == [
        "worker0 waits for room on the link to worker1 (10.0 s), which worker1 does not read, and worker1 is silent: its "
        "process is stopped (SIGSTOP)"
    ]


# Starting points.


def test_names_lead_to_chains() -> None:
    graph = WaitGraph.of(group(*lock_cycle()))
    assert [graph.label(node) for node in graph.find("worker0")] == [
        "the main thread of worker0",
        "thread pool-0 of worker0",
    ]
    assert [graph.label(node) for node in graph.find("worker1#2")] == ["g on worker2"]
    assert graph.find("worker1#99") == graph.find("worker9") == []


def test_a_cycle_says_when_it_ends_by_itself() -> None:
    workers = lock_cycle()
    limited = replace(workers[0].calls[0], left=47.5)
    workers[0] = replace(workers[0], calls=(limited, *workers[0].calls[1:]))
    assert WaitGraph.of(group(*workers)).cycles()[0].expires == 47.5
    assert WaitGraph.of(group(*lock_cycle())).cycles()[0].expires is None


def test_nothing_waits() -> None:
    assert explain(worker("worker0"), worker("worker1")) == []
    assert explain() == []


def test_gatherings_of_different_workers_at_the_same_time_are_not_one() -> None:
    """worker0 gathers with worker1, worker2 with worker3, whose main thread waits for worker0; worker0 waits for neither."""
    first = worker(
        "worker0",
        calls=(call("worker3#1", "worker0", "f", RUNNING, 9, POOL),),
        waits=(
            waits(WaitKind.GATHERING, text="all_gather: …", workers=("worker1",)),
            waits(WaitKind.LOCK, POOL, serving="worker3#1", holder=MAIN),
        ),
    )
    second = worker("worker2", waits=(waits(WaitKind.GATHERING, text="all_gather: …", workers=("worker3",)),))
    third = worker("worker3", waits=(waits_for("worker3#1"),))
    graph = WaitGraph.of(group(first, worker("worker1"), second, third))
    assert graph.cycles() == []
    assert len([node for node in graph.nodes if node.kind is NodeKind.GATHERING]) == 2


def test_gatherings_that_turn_out_to_be_one_are_one() -> None:
    names = {
        "worker0": ("worker9",),
        "worker1": ("worker8",),
        "worker2": ("worker8", "worker9"),
        "worker3": ("worker0",),
    }
    arrivals = [
        worker(name, waits=(waits(WaitKind.GATHERING, text="all_gather: …", workers=late),))
        for name, late in names.items()
    ]
    (meeting,) = [node for node in WaitGraph.of(group(*arrivals)).nodes if node.kind is NodeKind.GATHERING]
    assert meeting.id == "all_gather"
    assert all("worker8 and worker9 have not come" in text for text in explain(*arrivals))


@pytest.mark.parametrize(
    ("age", "text"),
    [(None, ""), (0.04, " (0.0 s)"), (89.9, " (89.9 s)"), (424.9, " (7 min 4 s)"), (7500.0, " (2 h 5 min)")],
)
def test_ages_are_in_units_that_people_read(age: float | None, text: str) -> None:
    assert ago(age) == text
