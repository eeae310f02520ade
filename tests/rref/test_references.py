"""References as programs use them, in a world of workers in one process."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.agent.channel.outbox import Outbox
from remora.errors import CallNotSent, OwnerDied
from remora.rpc.rref_proxy import RRefProxy
from remora.testing.world import World


class Counter:
    """A value with methods of every kind."""

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.release = threading.Event()

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    async def add_later(self, n: int) -> int:
        await asyncio.sleep(0)
        return self.add(n)

    @rpc.functions.async_execution
    def add_by_future(self, n: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(rpc.get_worker_info(), abs, args=(self.add(n),))

    def fail(self) -> None:
        raise KeyError("no such thing")

    def put(self, **words: int) -> dict[str, int]:
        return words


kept: dict[str, list[Any]] = {}
gate = threading.Event()


def keep(thing: Any) -> None:
    kept.setdefault(rpc.get_worker_info().name, []).append(thing)


def give_back(thing: Any) -> Any:
    return thing


def fetch(reference: rpc.RRef[Any]) -> Any:
    return reference.to_here()


def local(reference: rpc.RRef[Any]) -> tuple[bool, int]:
    return reference.is_owner(), id(reference.local_value())


def make_slowly(n: int) -> list[int]:
    assert gate.wait(10)
    return [n]


def own_name() -> str:
    return rpc.get_worker_info().name


def fail_to_make() -> None:
    raise LookupError("cannot be made")


@pytest.fixture
def world() -> Iterator[World]:
    kept.clear()
    gate.clear()
    with World(3) as found:
        yield found
        gate.set()
        kept.clear()


def counts(world: World, i: int) -> dict[str, int]:
    for worker in world.workers:
        worker.agent.peers.watch_all()
    return world[i].references.table.counts()


def nothing_is_left(world: World, *ranks: int) -> None:
    gc.collect()
    for rank in ranks:
        world.wait_until(lambda rank=rank: set(counts(world, rank).values()) == {0})  # type: ignore[misc]


def test_a_value_keeps_its_identity_on_its_owner_whatever_its_type(world: World) -> None:
    with world.acting(0):
        for value in ([1, 2], {"a": 1}, "text", 3, torch.ones(2), Counter()):
            reference = rpc.RRef(value)
            assert reference.local_value() is value
            assert reference.to_here() is value
            owned, where = rpc.rpc_sync("worker0", local, args=(reference,))
            assert (owned, where) == (True, id(value))


def test_methods_of_every_kind_are_called_on_the_owner(world: World) -> None:
    with world.acting(0):
        counter = rpc.remote("worker1", Counter, args=(10,))
        assert counter.rpc_sync().add(1) == 11
        assert counter.rpc_async().add(1).wait() == 12
        assert counter.remote().add(1).to_here() == 13
        assert counter.rpc_sync().add_later(1) == 14
        assert counter.rpc_sync().add_by_future(1) == 15
        with pytest.raises(KeyError, match="no such thing"):
            counter.rpc_sync().fail()
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            counter.rpc_sync().nothing()
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            counter.remote().nothing()


def add_through(proxy: Any) -> Any:
    found = proxy.add(5)
    return found.wait() if isinstance(found, torch.futures.Future) else found


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async"])
def test_a_proxy_can_be_sent(way: str, world: World) -> None:
    with world.acting(0):
        counter = rpc.remote("worker1", Counter, args=(10,))
        proxy = getattr(counter, way)(timeout=20.0)
        assert rpc.rpc_sync("worker2", add_through, args=(proxy,)) == 15
        assert add_through(copy.copy(proxy)) == 20
        assert rpc.rpc_sync("worker2", repr, args=(proxy,)).startswith(f"<{way} proxy of ")
        assert rpc.rpc_sync("worker1", add_through, args=(RRefProxy(counter, rpc.rpc_sync),)) == 25
        del counter, proxy
    nothing_is_left(world, 0, 1, 2)


def test_the_arguments_of_a_method_may_have_any_name(world: World) -> None:
    words = {"name": 1, "rref": 2, "api": 3, "timeout": 4, "args": 5, "kwargs": 6}
    with world.acting(0):
        counter = rpc.remote("worker1", Counter)
        assert counter.rpc_sync().put(**words) == words
        assert counter.rpc_async().put(**words).wait() == words
        assert counter.remote().put(**words).to_here() == words


def test_a_value_made_without_arguments_is_asked_for_by_the_number_of_its_function(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the request was pickled")

    with world.acting(0), monkeypatch.context() as patched:
        patched.setattr("remora.rref.create.pack_recorded", refuse)
        names = [rpc.remote("worker1", own_name) for _ in range(2)]
        assert [each.to_here() for each in names] == ["worker1"] * 2
        with pytest.raises(LookupError, match="cannot be made"):
            rpc.remote("worker1", fail_to_make).to_here()
        del names
    nothing_is_left(world, 0, 1)


def test_calls_on_a_value_that_is_being_made_are_sent_at_once_and_wait_there(world: World) -> None:
    with world.acting(0):
        reference = rpc.remote("worker1", make_slowly, args=(7,))
        fetched = reference.to_here_async()
        appended = reference.rpc_async().append(8)
        world.wait_until(lambda: world[1].agent.dispatch.counts() >= 3)  # all three are there
        assert not fetched.done()
        gate.set()
        assert fetched.wait()[0] == 7
        assert appended.wait() is None
        assert reference.to_here() == [7, 8]


def test_a_fetched_value_arrives_though_the_reference_is_dropped_at_once(world: World) -> None:
    with world.acting(0):
        futures = [rpc.remote("worker1", make, args=(n,)).to_here_async() for n in range(300)]
        assert [future.wait() for future in futures] == [[n] for n in range(300)]

        async def awaited() -> list[int]:
            return await rpc.remote("worker1", make, args=(5,))

        assert asyncio.run(awaited()) == [5]
    nothing_is_left(world, 0, 1)


def make(n: int) -> list[int]:
    return [n]


@pytest.mark.parametrize("owner", [0, 1, 2])
@pytest.mark.parametrize("to", [0, 1, 2])
def test_sharing_in_every_direction_and_back(world: World, owner: int, to: int) -> None:
    with world.acting(0):
        reference = rpc.remote(f"worker{owner}", make, args=(3,))
        assert rpc.rpc_sync(f"worker{to}", fetch, args=(reference,)) == [3]
        back = rpc.rpc_sync(f"worker{to}", give_back, args=({"deep": [reference, reference]},))["deep"]
        assert back[0] is back[1]
        assert back[0].to_here() == [3]
        assert back[0].confirmed_by_owner()
        del reference, back
    nothing_is_left(world, 0, 1, 2)


def test_a_reference_that_arrived_is_confirmed_before_the_function_runs(world: World) -> None:
    with world.acting(0):
        reference = rpc.remote("worker1", make, args=(1,))
        assert rpc.rpc_sync("worker2", rpc.RRef.confirmed_by_owner, args=(reference,)) is True


def test_a_thousand_references_in_one_message(world: World) -> None:
    with world.acting(0):
        references = [rpc.remote("worker1", make, args=(n,)) for n in range(1000)]
        assert rpc.rpc_sync("worker2", sum_of, args=(references,)) == sum(range(1000))
        del references
    nothing_is_left(world, 0, 1, 2)


def sum_of(references: list[rpc.RRef[list[int]]]) -> int:
    return sum(future.wait()[0] for future in [reference.to_here_async() for reference in references])


def test_other_picklers_refuse(world: World) -> None:
    with world.acting(0):
        reference = rpc.RRef([1])
        for attempt in (pickle.dumps, copy.deepcopy, copy.copy):
            with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
                attempt(reference)


def test_what_cannot_be_made_says_why_to_everybody(world: World) -> None:
    with world.acting(0):
        reference = rpc.remote("worker1", fail_to_make)
        with pytest.raises(LookupError, match="cannot be made"):
            reference.to_here()
        with pytest.raises(LookupError, match="cannot be made"):
            rpc.rpc_sync("worker2", fetch, args=(reference,))
        del reference
    nothing_is_left(world, 0, 1, 2)


class Material:
    """What a function works with; something big, perhaps."""


class Awkward(Exception):
    """Cannot be copied."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@dataclass(frozen=True)
class Frozen(Exception):
    """Cannot be changed."""

    text: str


materials: list[weakref.ref[Material]] = []


def fail_with_material(error: type[Exception], *words: str) -> None:
    material = Material()
    materials.append(weakref.ref(material))
    try:
        raise LookupError("at first")
    except LookupError as first:
        raise error(*words) from first


@pytest.mark.parametrize(
    ("owner", "error", "words"),
    [(1, ValueError, ["12"]), (0, ValueError, ["12"]), (1, Awkward, ["1", "2"]), (0, Frozen, ["12"]), (1, Frozen, ["12"])],
)
def test_what_could_not_be_made_keeps_nothing(
    world: World, owner: int, error: type[Exception], words: list[str]
) -> None:
    materials.clear()
    gc.disable()  # it would find what keeps itself, some day
    try:
        with world.acting(0):
            reference = rpc.remote(f"worker{owner}", fail_with_material, args=(error, *words))
            with pytest.raises(error, match="12") as caught:
                reference.to_here()
            if owner:
                assert "fail_with_material" in caught.value.remote_traceback  # type: ignore[attr-defined]
                assert "at first" in caught.value.remote_traceback  # type: ignore[attr-defined]
            else:
                assert isinstance(caught.value.__cause__, LookupError)
            deadline = time.monotonic() + 5
            while materials[0]() is not None and time.monotonic() < deadline:
                time.sleep(0.005)
            assert materials[0]() is None
    finally:
        gc.enable()


def test_a_creation_that_ends_in_time_is_not_timed_out_because_nobody_looks(world: World) -> None:
    with world.acting(0):
        for _ in range(3):
            rpc.rpc_sync("worker1", abs, args=(1,))  # from now on until the next tick nobody looks at the link
            reference = rpc.remote("worker1", abs, args=(-1,), timeout=0.2)
            passed = time.monotonic() + 0.25
            world.wait_until(lambda at=passed: time.monotonic() > at)  # type: ignore[misc]
            assert reference.to_here() == 1


def test_a_creation_that_took_too_long_is_told_apart_and_leaves_nothing(world: World) -> None:
    with world.acting(0):
        reference = rpc.remote("worker1", make_slowly, args=(1,), timeout=0.05)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            reference._get_future().wait()
        with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
            reference.to_here()
        with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
            rpc.rpc_sync("worker2", fetch, args=(reference,))
        gate.set()
        del reference
    nothing_is_left(world, 0, 1)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("will not be sent")


def test_a_message_that_could_not_be_packed_leaves_no_fork(world: World) -> None:
    with world.acting(0):
        mine, theirs = rpc.RRef([1]), rpc.remote("worker1", make, args=(1,))
        theirs.to_here()
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(TypeError, match="will not be sent"):
                call("worker2", keep, args=([mine, theirs, Unpicklable()],))
        world.wait_until(lambda: counts(world, 0)["num_forks"] == 0)
        assert not world[0].references.table.state.holder.parents
        del mine, theirs
    nothing_is_left(world, 0, 1, 2)


def test_a_result_that_could_not_be_packed_leaves_no_fork(world: World) -> None:
    with world.acting(0), pytest.raises(TypeError, match="will not be sent"):
        rpc.rpc_sync("worker1", own_and_fail)
    nothing_is_left(world, 0, 1)


def own_and_fail() -> Any:
    return [rpc.RRef([1]), Unpicklable()]


def test_a_call_that_was_never_sent_leaves_no_fork(world: World) -> None:
    world.kill(2)
    with world.acting(0):
        mine = rpc.RRef([1])
        with pytest.raises(CallNotSent):
            rpc.rpc_sync("worker2", keep, args=(mine,))
        with pytest.raises(CallNotSent):
            rpc.rpc_async("worker2", keep, args=(mine,)).wait()
    world.wait_until(lambda: counts(world, 0)["num_forks"] == 0)


def test_what_was_sent_is_not_taken_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception strikes behind the commit point: the callee has a reference that counts."""
    send = Outbox.send_low_priority

    def send_and_strike(outbox: Outbox, *message: Any) -> bool:
        send(outbox, *message)
        raise KeyboardInterrupt

    with world.acting(0):
        mine = rpc.RRef([1])
        monkeypatch.setattr(Outbox, "send_low_priority", send_and_strike)
        with pytest.raises(KeyboardInterrupt):
            rpc.remote("worker1", keep, args=(mine,))
        monkeypatch.undo()
        del mine
    world.wait_until(lambda: "worker1" in kept)
    with world.acting(1):
        assert kept["worker1"][0].to_here() == [1]
        kept.clear()
    nothing_is_left(world, 0, 1)


def test_a_late_reply_with_references_leaves_no_fork(world: World) -> None:
    with world.acting(0):
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_sync("worker1", own_slowly, timeout=0.05)
        gate.set()
    nothing_is_left(world, 0, 1)


def own_slowly() -> Any:
    assert gate.wait(10)
    return rpc.RRef([1])


def test_holders_of_a_dead_workers_values_are_told_at_once(world: World) -> None:
    with world.acting(0):
        ready, unmade = rpc.remote("worker1", make, args=(1,)), rpc.remote("worker1", make_slowly, args=(1,))
        ready.to_here()
        blocked = unmade.to_here_async()
        started = time.monotonic()
        world.kill(1)
        with pytest.raises(OwnerDied):
            blocked.wait()
        for reference in (ready, unmade):
            with pytest.raises(OwnerDied):
                reference.to_here()
            with pytest.raises(OwnerDied):
                reference.to_here_async().wait()
            with pytest.raises(OwnerDied):
                rpc.rpc_sync("worker2", fetch, args=(reference,))
        assert time.monotonic() - started < 3


def test_who_keeps_the_future_of_a_value_does_not_keep_the_reference(world: World) -> None:
    with world.acting(0):
        future = rpc.remote("worker1", make, args=(1,)).to_here_async()
        assert future.wait()[0] == 1
    nothing_is_left(world, 0, 1)
    assert future.done()


def test_what_only_a_dead_worker_held_is_freed_and_what_others_hold_is_not(world: World) -> None:
    with world.acting(0):
        only_there, elsewhere_too = rpc.RRef([1]), rpc.RRef([2])
        rpc.rpc_sync("worker1", keep, args=(only_there,))
        for name in ("worker1", "worker2"):
            rpc.rpc_sync(name, keep, args=(elsewhere_too,))
        assert counts(world, 0)["num_owner_rrefs"] == 2
        world.kill(1)
        world.wait_until(lambda: counts(world, 0)["num_owner_rrefs"] == 1)
        assert kept["worker2"][0].to_here() == [2]


def test_many_threads_may_drop_at_the_same_time(world: World) -> None:
    with world.acting(0):
        references = [rpc.remote("worker1", make, args=(n,)) for n in range(2000)]
    batches = [references[k::8] for k in range(8)]
    del references
    threads = [threading.Thread(target=batch.clear) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nothing_is_left(world, 0, 1)


def test_the_snapshot_lists_what_is_owned_and_held(world: World) -> None:
    with world.acting(0):
        reference = rpc.remote("worker1", torch.zeros, args=(10,))
        reference.to_here()
        (held,) = rpc.references().held
        assert (held.owner, held.state, held.id) == ("worker1", "confirmed", reference._handle.rref_id)
        assert "confirmed, of worker1" in repr(reference)
    with world.acting(1):
        (owned,) = rpc.references().owned
        assert (owned.type, owned.size, owned.holders) == ("torch.Tensor", 40, ["worker0"])
        assert "torch.Tensor, 40 bytes" in str(rpc.references())


def test_only_the_owner_has_the_local_value(world: World) -> None:
    with world.acting(0):
        reference = rpc.remote("worker1", make, args=(1,))
        with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user WorkerInfo\(id=0, name=worker0\)"):
            reference.local_value()


class Bystander:
    """What pickle takes, and no stencil does."""


def all_values(things: Any) -> list[Any]:
    """What the references in some containers mean, in order."""
    if isinstance(things, dict):
        things = list(things.values())
    if isinstance(things, rpc.RRef):
        return [things.to_here()]
    return [value for thing in things for value in all_values(thing)] if isinstance(things, list | tuple) else []


def test_references_arrive_wherever_they_are_in_the_arguments(world: World) -> None:
    with world.acting(0):
        one, two = rpc.remote("worker1", make, args=(1,)), rpc.remote("worker2", make, args=(2,))
        mine = rpc.RRef([3])
        tensor = torch.ones(4)
        for things, expected in (
            (one, [[1]]),
            ((one, two, tensor), [[1], [2]]),
            ([one, {"two": two, "more": (7, [mine, tensor])}], [[1], [2], [3]]),
            ({"a": one, "b": one}, [[1], [1]]),  # the same twice
            ([one, Bystander(), mine], [[1], [3]]),
        ):
            assert rpc.rpc_sync("worker1", all_values, args=(things,)) == expected
            assert rpc.rpc_async("worker2", all_values, kwargs={"things": things}).wait() == expected
            assert all_values(rpc.rpc_sync("worker1", give_back, args=(things,))) == expected
        with autograd.context():  # the same in messages that are recorded
            assert rpc.rpc_sync("worker1", all_values, args=((one, tensor, two),)) == [[1], [2]]
        del one, two, mine, things
    nothing_is_left(world, 0, 1, 2)


def test_references_that_could_not_be_sent_are_not_counted(world: World) -> None:
    with world.acting(0):
        mine = rpc.RRef([1])
        theirs = rpc.remote("worker1", make, args=(2,))
        for unsendable in (threading.Lock(), [mine, threading.Lock()]):
            with pytest.raises(TypeError, match="pickle"):
                rpc.rpc_sync("worker2", give_back, args=(mine, theirs, unsendable))
        del mine, theirs
    nothing_is_left(world, 0, 1, 2)
