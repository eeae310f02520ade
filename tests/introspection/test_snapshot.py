"""What a worker says of itself: every part of the snapshot, also while everything in the worker is stuck."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.introspection.snapshot import take
from remora.observer.model import CallKey, EventKind, Query, Stage, WaitKind, WorkerSnapshot
from remora.observer.snapshot_json import from_json, to_json
from remora.testing.world import World
from tests.eventually import eventually

gate = threading.Event()
running = threading.Semaphore(0)  # released by each function that has begun


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    global running
    gate.clear()
    running = threading.Semaphore(0)
    yield
    gate.set()


def block() -> int:
    running.release()
    gate.wait(30)
    return 1


async def block_later() -> int:
    running.release()
    while not gate.is_set():
        await asyncio.sleep(0.005)
    return 1


async def await_block(to: str) -> int:
    running.release()
    return await rpc.rpc_async(to, block)


def call_on(to: str) -> int:
    running.release()
    return rpc.rpc_sync(to, block)


def work(x: Any) -> Any:
    return x


def look(world: World, i: int, **query: Any) -> WorkerSnapshot:
    found = take(world[i].subject, Query(**query))
    assert from_json(WorkerSnapshot, to_json(found)) == found
    return found


def release(*futures: Any) -> None:
    gate.set()
    for future in futures:
        future.wait()


def test_a_worker_says_who_it_is() -> None:
    with World(2) as world:
        found = look(world, 1)
        assert (found.name, found.rank, found.group) == ("worker1", 1, world[0].group.group_id)
        assert found.versions.keys() == {"remora", "torch", "python"}
        assert found.memory.resident > 1 << 20
        assert found.pool.limit == 4
        assert found.cpu > 0
        assert 0 <= found.up < 60


def test_a_call_is_seen_at_both_ends_under_one_name() -> None:
    with World(2) as world, world.acting(0):
        future = rpc.rpc_async("worker1", block, timeout=50.0)
        assert running.acquire(timeout=10)
        (theirs,) = look(world, 1).calls
        (mine,) = look(world, 0).calls  # later, so the call is older
        assert mine.key == theirs.key == CallKey(caller="worker0", id=mine.key.id)
        assert (mine.callee, theirs.callee) == ("worker1", "worker1")
        assert mine.function == theirs.function == f"{__name__}.block"
        assert (mine.stage, theirs.stage) == (Stage.SENT, Stage.RUNNING)
        assert mine.asynchronous
        assert theirs.kind == "PYTHON_CALL"
        assert mine.age >= theirs.age >= 0
        assert mine.left is not None
        assert 0 < mine.left < 50
        assert theirs.thread in {each.id for each in look(world, 1).threads if each.role == "pool"}
        release(future)


def test_a_nested_call_says_for_which_it_was_made_and_what_waits_for_it() -> None:
    with World(3) as world, world.acting(0):
        future = rpc.rpc_async("worker1", call_on, args=("worker2",))
        assert running.acquire(timeout=10)
        assert running.acquire(timeout=10)
        middle = look(world, 1)
        (outer,) = [each for each in middle.calls if each.key.caller == "worker0"]
        (inner,) = [each for each in middle.calls if each.key.caller == "worker1"]
        assert inner.parent == outer.key
        assert inner.thread == outer.thread is not None
        (wait,) = middle.waits
        assert (wait.kind, wait.call, wait.serving, wait.workers) == (WaitKind.CALL, inner.key, outer.key, ("worker2",))
        assert wait.thread == outer.thread
        (thread,) = [each for each in middle.threads if each.id == outer.thread]
        assert thread.serving == outer.key
        assert any("call_on" in line for line in thread.stack)
        release(future)


def test_threads_of_the_program_wait_for_futures_and_collections() -> None:
    with World(2) as world:

        def wait_for_one() -> None:
            with world.acting(0):
                rpc.rpc_async("worker1", block).wait()

        def wait_for_two() -> None:
            with world.acting(0):
                torch.futures.wait_all([rpc.rpc_async("worker1", block) for _ in range(2)])

        threads = [threading.Thread(target=each) for each in (wait_for_one, wait_for_two)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(look(world, 0).waits) == 3)
        found = look(world, 0)
        assert {wait.call for wait in found.waits} == {call.key for call in found.calls if call.key.caller == "worker0"}
        assert sorted(found.waits.count(each) for each in found.waits) == [1, 1, 1]
        assert {wait.thread for wait in found.waits} == {thread.ident for thread in threads}
        assert look(world, 1).waits == ()  # the threads belong to worker0, though the process is the same
        gate.set()
        for thread in threads:
            thread.join()


def test_a_coroutine_says_what_it_waits_for_and_serves() -> None:
    with World(3) as world, world.acting(0):
        future = rpc.rpc_async("worker1", await_block, args=("worker2",))
        assert running.acquire(timeout=10)
        assert running.acquire(timeout=10)
        eventually(lambda: look(world, 1).waits)
        found = look(world, 1)
        (wait,) = found.waits
        (outer,) = [each for each in found.calls if each.key.caller == "worker0"]
        assert (wait.kind, wait.serving, wait.thread, wait.workers) == (WaitKind.CALL, outer.key, None, ("worker2",))
        assert found.pool.coroutines == 1
        release(future)


def test_requests_that_wait_for_a_slot() -> None:
    with World(2, threads=1) as world, world.acting(0):
        futures = [rpc.rpc_async("worker1", block) for _ in range(3)]
        assert running.acquire(timeout=10)
        eventually(lambda: len(look(world, 1).waits) == 2)
        found = look(world, 1)
        stages = [each.stage for each in found.calls]
        assert sorted(stages) == [Stage.QUEUED, Stage.QUEUED, Stage.RUNNING]
        assert {wait.kind for wait in found.waits} == {WaitKind.POOL}
        assert {wait.serving for wait in found.waits} == {each.key for each in found.calls if each.stage is Stage.QUEUED}
        assert (found.pool.running, found.pool.queued) == (1, 2)
        release(*futures)


def test_a_reference_that_is_being_made() -> None:
    with World(2) as world, world.acting(0):
        reference = rpc.remote("worker1", block)
        thread = threading.Thread(target=world.run, args=(0, reference.to_here))
        thread.start()
        eventually(lambda: look(world, 1).owned and look(world, 0).waits)
        (owned,), (held,) = look(world, 1).owned, look(world, 0).held
        assert owned.id == held.id
        assert (owned.state, owned.holders, held.owner) == ("being made", ("worker0",), "worker1")
        assert owned.function == held.function == f"{__name__}.block"
        gate.set()
        thread.join()
        eventually(lambda: look(world, 1).owned[0].state == "ready")
        assert look(world, 1).owned[0].type == "builtins.int"
        del reference


def test_a_fetch_waits_for_the_value_and_not_for_a_slot() -> None:
    """Also while the pool is full: a fetch needs none of its slots."""
    with World(2, threads=1) as world, world.acting(0):
        reference = rpc.remote("worker1", block)
        thread = threading.Thread(target=world.run, args=(0, reference.to_here))
        thread.start()
        eventually(lambda: [each for each in look(world, 1).waits if each.kind is WaitKind.REFERENCE])
        found = look(world, 1)
        (fetch,) = [each for each in found.calls if each.kind == "PYTHON_RREF_FETCH_CALL"]
        (maker,) = [each for each in found.calls if each.kind == "PYTHON_REMOTE_CALL"]
        assert maker.makes == found.owned[0].id
        assert (fetch.function, fetch.stage, fetch.thread) == ("to_here()", Stage.RUNNING, None)
        (wait,) = found.waits
        assert (wait.serving, wait.reference, wait.workers) == (fetch.key, found.owned[0].id, ("worker1",))
        gate.set()
        thread.join()
        del reference


def test_each_call_says_which_value_it_makes() -> None:
    """One that runs on a thread, one that waits for a slot, and a coroutine."""
    with World(2, threads=1) as world, world.acting(0):
        running_one = rpc.remote("worker1", block_later)
        eventually(lambda: [each for each in look(world, 1).threads if each.role == "coroutine"])
        others = [rpc.remote("worker1", block) for _ in range(2)]
        eventually(lambda: sorted(each.stage for each in look(world, 1).calls).count(Stage.QUEUED) == 1)
        found = look(world, 1)
        assert {each.makes for each in found.calls} == {each.id for each in found.owned}
        assert len(found.calls) == len(found.owned) == 3
        assert {each.makes: each.function for each in found.calls if each.function} == {
            each.id: each.function for each in found.owned if each.function
        }
        gate.set()
        for each in (running_one, *others):
            each.to_here()
        del running_one, others, each


def test_a_thread_of_the_owner_that_waits_for_a_value() -> None:
    with World(2) as world:
        reference = world.run(0, rpc.remote, "worker0", block)
        thread = threading.Thread(target=world.run, args=(0, reference.local_value))
        thread.start()
        eventually(lambda: [each for each in look(world, 0).waits if each.kind is WaitKind.REFERENCE])
        (wait,) = [each for each in look(world, 0).waits if each.kind is WaitKind.REFERENCE]
        assert wait.reference in {each.id for each in look(world, 0).owned}
        assert wait.thread == thread.ident
        gate.set()
        thread.join()
        del reference


class Hooked(torch.nn.Linear):
    """A module whose size can only be measured without running its code."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a snapshot ran code of the program")

    def __repr__(self) -> str:
        raise AssertionError("a snapshot ran code of the program")


class Touchy:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("a snapshot ran code of the program")


class TouchyTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a snapshot ran code of the program")


def make_touchy() -> Any:
    return [Touchy(), torch.Tensor._make_subclass(TouchyTensor, torch.zeros(3)), torch.zeros(5)]


def make_hooked() -> Any:
    return Hooked(10, 10)


def test_references_have_sizes_and_no_code_of_the_program_is_run() -> None:
    with World(2) as world, world.acting(0):
        held = [
            rpc.remote("worker1", make_hooked),
            rpc.remote("worker1", make_touchy),
            rpc.remote("worker1", torch.zeros, args=(100,)),
            rpc.remote("worker1", work, args=({"a": [torch.zeros(10)], "b": b"12345"},)),
        ]
        eventually(lambda: [each.state for each in look(world, 1).owned] == ["ready"] * 4)
        found = {each.function.rpartition(".")[2]: each for each in look(world, 1).owned if each.function}
        assert {name: each.bytes for name, each in found.items()} == {
            "make_hooked": 440,
            "make_touchy": 20,
            "zeros": 400,
            "work": 45,
        }
        assert found["make_hooked"].type == f"{__name__}.Hooked"
        assert {each.device for each in found.values()} == {"cpu"}
        held.clear()


def test_creation_sites_are_recorded_if_asked_for() -> None:
    with World(2, record_sites=True) as world, world.acting(0):
        reference = rpc.remote("worker1", work, args=(1,))
        own = rpc.RRef(5)
        rpc.rpc_sync("worker1", keep, args=(own,))
        (held,), (owned,) = look(world, 0).held, look(world, 0).owned
        assert held.site is not None
        assert held.site.rpartition(":")[0] == __file__
        assert owned.site is not None
        assert owned.site.rpartition(":")[0] == __file__
        kept.clear()
        del reference, own
    with World(2) as world, world.acting(0):
        reference = rpc.remote("worker1", work, args=(1,))
        assert look(world, 0).held[0].site is None
        del reference


kept: list[Any] = []


def keep(value: Any) -> None:
    kept.append(value)


def test_hundreds_of_references_are_told_apart_by_function_and_holder() -> None:
    with World(3) as world:
        leaked = [world.run(i, rpc.remote, "worker2", work, args=(i,)) for i in (0, 1) for _ in range(100 + 50 * i)]
        leaked += [world.run(0, rpc.remote, "worker2", make_hooked)]
        ready = ["ready"] * len(leaked)
        eventually(lambda: [each.state for each in look(world, 2, limit=10_000).owned] == ready)
        by_maker: dict[tuple[str | None, str], int] = {}
        for each in look(world, 2, limit=10_000).owned:
            (holder,) = each.holders
            by_maker[each.function, holder] = by_maker.get((each.function, holder), 0) + 1
        assert by_maker == {
            (f"{__name__}.work", "worker0"): 100,
            (f"{__name__}.work", "worker1"): 150,
            (f"{__name__}.make_hooked", "worker0"): 1,
        }
        found = look(world, 2, limit=20, function="make_hooked")
        assert len(found.owned) == 1  # filtered first, and cut after that
        assert found.left_out == {}
        assert look(world, 2, limit=20, parts=("owned",)).left_out == {"owned": 231}
        leaked.clear()


def test_references_are_not_looked_at_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be very many, and `remora ps --watch` asks often."""
    with World(1) as world:
        looked: list[str] = []
        state = world[0].subject.references.table.state

        class Watched(dict):  # type: ignore[type-arg]
            def copy(self) -> Any:
                looked.append("values")
                return dict(self)

        monkeypatch.setattr(state, "values", Watched(state.values))
        monkeypatch.setattr(state.owner, "values", Watched(state.owner.values))
        look(world, 0, parts=())
        look(world, 0, parts=("calls", "threads", "links", "events"))
        assert looked == []
        look(world, 0, parts=("owned",))
        look(world, 0, parts=("waits",))
        assert len(looked) == 2


def test_what_is_left_out_is_counted() -> None:
    with World(2) as world, world.acting(0):
        for _ in range(30):
            rpc.rpc_sync("worker1", work, args=(1,))
        found = look(world, 0, parts=("events",), limit=10, function="work")
        assert len(found.events) == 10
        assert found.left_out == {"events": 20}
        last = look(world, 0, parts=("events",), function="work").events[-1]
        assert found.events[-1] == last  # of events, the newest stay
        assert look(world, 0, parts=("events",), since=last.time).events == ()
        assert look(world, 0, parts=("calls",)).events == ()


def test_filters_by_age_peer_and_function() -> None:
    with World(3) as world, world.acting(0):
        futures = [rpc.rpc_async(f"worker{i}", block) for i in (1, 2)]
        assert running.acquire(timeout=10)
        assert running.acquire(timeout=10)
        assert len(look(world, 0).calls) == 2
        assert [each.callee for each in look(world, 0, peer="worker2").calls] == ["worker2"]
        assert [each.peer for each in look(world, 0, peer="worker2").links] == ["worker2"]
        assert look(world, 0, function="no such").calls == ()
        assert look(world, 0, older_than=100.0).calls == ()
        release(*futures)


def test_events_and_histograms_match_the_calls_that_were_made() -> None:
    with World(2) as world, world.acting(0):
        for n in range(5):
            rpc.rpc_sync("worker1", work, args=(n,))
        with pytest.raises(TypeError):
            rpc.rpc_sync("worker1", work)  # type: ignore[arg-type]
        mine, theirs = look(world, 0), look(world, 1)
        made = [each for each in mine.events if each.function == f"{__name__}.work"]
        ran = [each for each in theirs.events if each.function == f"{__name__}.work"]
        assert [each.kind for each in made] == [EventKind.CALL_ENDED] * 5 + [EventKind.CALL_FAILED]
        assert [each.kind for each in ran] == [EventKind.RUN_ENDED] * 5 + [EventKind.RUN_FAILED]
        assert [each.call for each in made] == [each.call for each in ran]
        for whole, part in zip(made, ran, strict=True):
            assert whole.seconds is not None
            assert part.seconds is not None
            assert part.queued is not None
            assert part.seconds + part.queued <= whole.seconds + 1e-3
        counts = {each.measure: (each.count, each.failed) for each in (*mine.histograms, *theirs.histograms)}
        assert counts == {"call": (6, 1), "queue": (6, 0), "run": (6, 1)}
        assert (mine.calls_made, mine.calls_failed, theirs.calls_served) == (6, 1, 6)
        kinds = {each.kind for each in mine.events}
        assert {EventKind.JOINED, EventKind.CONNECTED} <= kinds


def test_a_limit_cuts_calls_that_are_over_before_what_is_seldom() -> None:
    with World(2) as world, world.acting(0):
        for _ in range(50):
            rpc.rpc_sync("worker1", work, args=(1,))
        events = look(world, 0, parts=("events",), limit=20).events
        assert EventKind.JOINED in {each.kind for each in events}
        assert sum(each.kind is EventKind.CALL_ENDED for each in events) >= 10  # and not the other way round
        assert [each.time for each in events] == sorted(each.time for each in events)
        assert len(events) == 20


def test_links_count_bytes_and_messages_at_both_ends() -> None:
    with World(2, transports=["tcp"]) as world, world.acting(0):
        for _ in range(10):
            rpc.rpc_sync("worker1", work, args=(torch.zeros(1000),))

        def settled() -> bool:
            (here,), (there,) = look(world, 0).links, look(world, 1).links
            return here.messages_sent == there.messages_received and here.messages_received == there.messages_sent

        eventually(settled)
        (here,), (there,) = look(world, 0).links, look(world, 1).links
        assert (here.peer, here.transport, here.state) == ("worker1", "tcp", "alive")
        assert here.bytes_sent >= 40_000
        assert there.bytes_received >= 40_000
        assert here.round_trip is not None
        assert 0 < here.round_trip < 1
        assert here.reconnects == 0
        world[0].agent.peers.find("worker1").outgoing.cut(ConnectionError("on purpose"))
        rpc.rpc_sync("worker1", work, args=(1,))
        assert look(world, 0).links[0].reconnects == 1
        assert look(world, 0).links[0].bytes_sent >= here.bytes_sent
        assert EventKind.DISCONNECTED in {each.kind for each in look(world, 0).events}


@pytest.mark.parametrize(("transport", "shown"), [("inproc", "inproc"), ("unix", "unix")])
def test_links_have_names_of_transports(transport: str, shown: str) -> None:
    with World(2, transports=[transport]) as world, world.acting(0):
        rpc.rpc_sync("worker1", work, args=(1,))
        assert [look(world, i).links[0].transport for i in (0, 1)] == [shown, shown]


def test_a_dead_peer_is_a_link_with_a_reason_and_an_event() -> None:
    with World(2) as world, world.acting(0):
        rpc.rpc_sync("worker1", work, args=(1,))
        world.kill(1)
        eventually(lambda: look(world, 0).links[0].state == "dead")
        assert look(world, 0).links[0].reason
        assert EventKind.DIED in {each.kind for each in look(world, 0).events}


def test_a_gathering_says_who_has_not_come() -> None:
    with World(3) as world:
        threads = [
            threading.Thread(target=world.run, args=(i, rpc.api._barrier, {"worker0", "worker1", "worker2"})) for i in (0, 1)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: [each.workers for each in look(world, 0).waits] == [("worker2",)])
        (wait,) = look(world, 0).waits
        assert wait.kind is WaitKind.GATHERING
        assert wait.text == "_barrier: worker2 has not come"
        eventually(lambda: [each.workers for each in look(world, 1).waits] == [("worker0",)])
        world.run(2, rpc.api._barrier, {"worker0", "worker1", "worker2"})
        for thread in threads:
            thread.join()


def test_shutdown_says_who_has_not_come() -> None:
    with World(2) as world:
        thread = threading.Thread(target=lambda: world.run(0, rpc.shutdown))
        thread.start()
        awaited = [(WaitKind.SHUTDOWN, ("worker1",))]
        eventually(lambda: [(each.kind, each.workers) for each in look(world, 0).waits] == awaited)
        world.run(1, rpc.shutdown)
        thread.join()


class Held(torch.autograd.Function):
    """Holds up the backward pass of the worker that it is on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        running.release()
        gate.wait(30)
        return gradients


def held_up(x: torch.Tensor) -> torch.Tensor:
    return Held.apply(x * 2)  # type: ignore[no-any-return, no-untyped-call]


def test_a_backward_pass_says_what_is_owed() -> None:
    with World(2) as world:

        def train() -> None:
            with world.acting(0), autograd.context() as context:
                x = torch.ones(3, requires_grad=True)
                y = rpc.rpc_sync("worker1", held_up, args=(x,))
                autograd.backward(context, [y.sum()])

        thread = threading.Thread(target=train)
        thread.start()
        assert running.acquire(timeout=20)
        eventually(lambda: look(world, 0).passes and look(world, 1).passes)
        (mine,), (theirs,) = look(world, 0).passes, look(world, 1).passes
        assert (mine.context, mine.number, mine.started_by) == (theirs.context, theirs.number, "worker0")
        assert mine.awaits == {"worker1": 1}
        assert theirs.owes == {"worker0": 1}
        assert theirs.phase == "computing gradients"
        (wait,) = [each for each in look(world, 0).waits if each.kind is WaitKind.BACKWARD]
        assert wait.context == mine.context
        assert wait.workers == ("worker1",)
        gate.set()
        thread.join()
        assert look(world, 0).passes == ()


def test_everything_of_a_worker_may_be_stuck() -> None:
    """Every lock of the worker is held by a thread that is stuck, every slot is taken, the event loop too."""
    with World(2, threads=2) as world, world.acting(0):
        futures = [rpc.rpc_async("worker1", block) for _ in range(3)]
        for _ in range(2):
            assert running.acquire(timeout=10)
        worker = world[1]
        worker.agent.coroutines.run(block_later(), *_loop_arguments(world))
        assert running.acquire(timeout=10)
        worker.agent.coroutines.loop.call_soon_threadsafe(gate.wait, 30)  # type: ignore[union-attr]
        held = threading.Event()

        def hold() -> None:
            peers = worker.agent.peers.all()
            locks: list[Any] = [worker.agent.pool._lock, worker.agent.peers.table._lock, worker.agent.listener._lock]
            locks += [worker.handshake_client._lock, worker.agent.coroutines._starting, *(each.lock for each in peers)]
            locks += [threading._active_limbo_lock]  # type: ignore[attr-defined]
            for lock in locks:
                lock.acquire()
            held.set()
            gate.wait(30)
            for lock in locks:
                lock.release()

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(10)
        try:
            found: list[WorkerSnapshot] = []
            # (`Thread.start` would wait for the lock of the `threading` module)
            _thread.start_new_thread(lambda: found.append(take(worker.subject)), ())
            eventually(lambda: found)
            assert len(found[0].calls) == 3
        finally:
            gate.set()
            thread.join()
        release(*futures)


def _loop_arguments(world: World) -> tuple[Any, ...]:
    channel = world[1].agent.peers.find("worker0").outgoing
    return contextvars.copy_context(), channel.flow_control, lambda held, error: None
