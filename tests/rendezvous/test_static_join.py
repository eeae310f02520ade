"""Groups of known size: on every kind of store, one after the other, with workers missing, double or giving up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from remora.errors import RendezvousError
from remora.long_wait import LongWait
from remora.rendezvous import static_join, store_table
from remora.rendezvous.group import DynamicGroup, StaticGroup
from remora.rendezvous.record import WorkerRecord
from remora.rendezvous.seal import RecordSeal
from remora.rendezvous.static_join import Roster, StaticJoin
from remora.testing.virtual_clock import VirtualClock
from tests.rendezvous.meeting_places import KINDS, CountingStore, Open, at_once, meeting_place, record


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    with meeting_place(request.param, tmp_path) as store:
        yield store


def meet(store: Any, size: int, *records: WorkerRecord, timeout: float = 20.0) -> list[StaticGroup]:
    """All join at once, each over a store of its own; returns their groups in order."""

    def join(each: WorkerRecord) -> StaticGroup:
        group = StaticGroup(store(), size, timeout)
        assert group.join(each) == group.members()
        return group

    return [joined.result() for joined in at_once(*(lambda each=each: join(each) for each in records))]


def failures(store: Any, size: int, *records: WorkerRecord, timeout: float = 20.0) -> list[str]:
    """All join at once and nobody succeeds; returns the errors."""

    def fail(each: WorkerRecord) -> str:
        with pytest.raises(RendezvousError) as caught:
            StaticGroup(store(), size, timeout).join(each)
        return str(caught.value)

    return [failed.result() for failed in at_once(*(lambda each=each: fail(each) for each in records))]


def test_all_get_the_same_roster_by_rank(place: Open) -> None:
    records = [record(f"w-{rank}", rank) for rank in (2, 0, 3, 1)]
    groups = meet(place, 4, *records)
    assert len({group.group_id for group in groups}) == 1
    for group in groups:
        assert group.members() == sorted(records, key=lambda each: each.id)
    assert "4 of 4 workers" in repr(groups[0])


def test_a_group_of_one(place: Open) -> None:
    me = record("alone", 0)
    assert meet(place, 1, me)[0].members() == [me]


def test_twenty_workers_at_once() -> None:
    with meeting_place("tcp", Path()) as store:
        groups = meet(store, 20, *(record(f"w{rank}", rank) for rank in range(20)))
    assert len({group.group_id for group in groups}) == 1
    assert all(len(group.members()) == 20 for group in groups)


def test_one_group_after_the_other_with_other_names_and_ranks(place: Open) -> None:
    seen = set()
    for turn in range(4):
        records = [record(f"g{turn}-{index}", (index + turn) % 3) for index in range(3)]
        groups = meet(place, 3, *records)
        assert [each.name for each in groups[0].members()] == [f"g{turn}-{(rank - turn) % 3}" for rank in range(3)]
        seen |= {group.group_id for group in groups}
    assert len(seen) == 4


def test_groups_of_different_sizes_do_not_mix(place: Open) -> None:
    for size in (3, 2, 3, 1, 2):
        groups = meet(place, size, *(record(f"w{rank}", rank) for rank in range(size)))
        assert [len(group.members()) for group in groups] == [size] * size


def test_a_fast_worker_may_come_back_before_the_others_have_left() -> None:
    """It signs in for the next group while the rest still read the roster of this one."""
    store = HashStore()
    first = meet(lambda: store, 2, record("a", 0), record("b", 1))
    again = meet(lambda: store, 2, record("b", 1), record("a", 0))
    assert first[0].group_id != again[0].group_id


def test_who_saw_the_generation_and_came_too_late_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    store, late, attend = HashStore(), record("late", 0), StaticJoin.attend
    first: list[StaticGroup] = []
    complete = threading.Event()

    def attend_late(self: StaticJoin, deadline: float) -> Roster:
        if self._record is late and not first:
            first.extend(meet(lambda: store, 2, record("a", 0), record("b", 1)))
            complete.set()
        return attend(self, deadline)

    def partner() -> list[WorkerRecord]:
        assert complete.wait(20)
        return StaticGroup(store, 2, 20).join(record("c", 1))

    monkeypatch.setattr(StaticJoin, "attend", attend_late)
    mine = StaticGroup(store, 2, 20)
    joined = at_once(lambda: mine.join(late), partner)
    assert [each.name for each in joined[0].result()] == ["late", "c"]
    assert mine.group_id != first[0].group_id


# --- what it costs ---


@pytest.mark.parametrize("size", [2, 5, 20])
def test_joining_takes_a_fixed_number_of_steps(size: int) -> None:
    shared = HashStore()
    stores = [CountingStore(shared) for _ in range(size)]
    iterator = iter(stores)
    meet(lambda: next(iterator), size, *(record(f"w{rank}", rank) for rank in range(size)))
    costs = sorted(map(steps, stores))
    assert costs[:-1] == [8] * (size - 1)
    assert costs[-1] == 13  # the last to come reads all records in one go, and publishes the roster
    assert sum(store.counts["multi_get"] for store in stores) == 1


def steps(store: CountingStore) -> int:
    """What it took, but for looking whether the others are there."""
    return sum(store.counts.values()) - store.counts["check"]


def test_a_simple_store_is_read_one_by_one_by_the_last_only() -> None:
    shared = HashStore()
    stores = [CountingStore(shared, extended=False) for _ in range(6)]
    iterator = iter(stores)
    meet(lambda: next(iterator), 6, *(record(f"w{rank}", rank) for rank in range(6)))
    assert sorted(map(steps, stores)) == [8] * 5 + [13 + 5]
    assert not any(store.counts["multi_get"] for store in stores)


# --- who does not fit ---


def test_a_name_used_twice_fails_everywhere(place: Open) -> None:
    records = [record(name, rank) for rank, name in enumerate(["a", "b", "a"])]
    errors = failures(place, 3, *records)
    assert all("'a' is not unique" in error and "ranks 0, 2" in error for error in errors)
    groups = meet(place, 3, *(record(f"w{rank}", rank) for rank in range(3)))  # and the store can be used again
    assert len(groups) == 3


def test_an_id_used_twice_fails_everywhere(place: Open) -> None:
    errors = failures(place, 3, record("a", 0), record("b", 1), record("c", 1))
    assert all("Worker id 1 is not unique" in error for error in errors)
    assert all("'b'" in error and "'c'" in error for error in errors)
    assert len(meet(place, 3, *(record(f"w{rank}", rank) for rank in range(3)))) == 3


@pytest.mark.parametrize("rank", [3, 100])
def test_an_id_out_of_range_is_refused_at_once(rank: int) -> None:
    with pytest.raises(RendezvousError, match=r"cannot be one of 3.*last rank is 2"):
        StaticGroup(HashStore(), 3, 20).join(record("a", rank))


def test_a_group_of_none_is_refused() -> None:
    with pytest.raises(RendezvousError, match="world_size is 0"):
        StaticGroup(HashStore(), 0, 20)


@pytest.mark.parametrize("first", ["static", "dynamic"])
def test_static_and_dynamic_members_refuse_each_other(first: str, place: Open) -> None:
    groups = [StaticGroup(place(), 1, 20), DynamicGroup(place())]
    if first == "dynamic":
        groups.reverse()
    groups[0].join(record("a", 0))
    with pytest.raises(RuntimeError, match="RPC group mixes statically and dynamically initialized members"):
        groups[1].join(record("b", 0))


# --- who does not come ---


def test_the_missing_are_named_in_time(place: Open) -> None:
    start = time.monotonic()
    errors = failures(place, 4, record("a", 0), record("c", 2), timeout=0.6)
    assert time.monotonic() - start < 5
    for error in errors:
        assert "Missing: rank 1, rank 3." in error
        assert "'a' (rank 0)" in error
        assert "'c' (rank 2)" in error
        assert "tcp://" in error or "file://" in error or "HashStore" in error


def test_a_worker_that_asked_for_another_size_is_pointed_out_to_all_at_once() -> None:
    store, start = HashStore(), time.monotonic()
    failed = at_once(
        lambda: failures(lambda: store, 2, record("a", 0), timeout=60),
        lambda: failures(lambda: store, 3, record("b", 1), record("c", 2), timeout=60),
    )
    for error in [each for done in failed for each in done.result()]:
        assert "world_size=2" in error
        assert "world_size=3" in error
        assert "with the same world_size" in error
    assert time.monotonic() - start < 20


def test_after_different_sizes_a_group_can_form() -> None:
    store = HashStore()
    at_once(
        lambda: failures(lambda: store, 1 + 1, record("a", 0), timeout=60),
        lambda: failures(lambda: store, 3, record("b", 1), timeout=60),
    )
    assert len(meet(lambda: store, 2, record("a", 0), record("b", 1))) == 2


def test_a_rank_that_came_with_torchs_own_rpc_is_pointed_out() -> None:
    store, start = HashStore(), time.monotonic()
    store.set("rpc_prefix_0/0/1", "what torch's rank 1 writes")
    error = failures(lambda: store, 2, record("a", 0), timeout=60)[0]
    assert "Rank 1 came with torch.distributed.rpc" in error
    assert time.monotonic() - start < 20


def test_what_torchs_own_rpc_left_in_the_store_is_no_obstacle_to_its_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one store for several groups, as torchrun has it: first one of torch.distributed.rpc, then one of ours."""
    monkeypatch.setattr(static_join, "_LOOK_AROUND", 0.02)
    store, looked = HashStore(), threading.Event()
    for rank in (0, 1):  # our own one, too
        store.set(f"rpc_prefix_0/0/{rank}", "what torch's rank wrote")
    look_around = StaticJoin._look_around

    def look(self: StaticJoin) -> None:
        try:
            look_around(self)
        finally:
            looked.set()

    def come_late() -> list[WorkerRecord]:
        assert looked.wait(20)
        return StaticGroup(store, 2, 20).join(record("b", 1))

    monkeypatch.setattr(StaticJoin, "_look_around", look)
    joined = at_once(lambda: StaticGroup(store, 2, 20).join(record("a", 0)), come_late)
    assert [each.name for each in joined[0].result()] == ["a", "b"]
    assert joined[1].result() == joined[0].result()


def test_who_looks_around_when_the_group_is_formed_sees_nothing_of_the_next() -> None:
    """A group of another size may sign in meanwhile: those who are in the roster fail neither."""
    store = HashStore()
    call = StaticJoin(StaticGroup(store, 1, 20)._table, 1, record("a", 0))
    assert len(call.attend(time.monotonic() + 20).workers) == 1
    next_one = StaticJoin(call._table, 2, record("b", 1))
    next_one._sign_in()
    next_one._table.put(static_join._LAST, '["b", 2]')
    call._look_around()
    assert not next_one._table.has([next_one._key("roster")])


def look_at(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """A worker that waits for a roster looks around at these times, in seconds of its wait, and then gives up."""
    clock = VirtualClock()

    def wait(table: store_table.StoreTable, key: str, deadline: float, look: Callable[[], None]) -> bool:
        began = clock.now()
        for seconds in times:
            clock.advance(began + seconds - clock.now())
            look()
        return False

    monkeypatch.setattr(static_join, "LongWait", lambda describe: LongWait(describe, clock))
    monkeypatch.setattr(static_join, "_LOOK_AROUND", 0.0)
    monkeypatch.setattr(store_table.StoreTable, "wait", wait)


def test_a_long_wait_says_for_whom(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at(monkeypatch, 9.9, 10.1, 19.9, 20.1)
    failures(lambda: HashStore(), 3, record("a", 1))
    line = "init_rpc: still waiting for ranks 0, 2 of 3 at HashStore, {} s"
    assert [each.getMessage() for each in caplog.records] == [line.format(10), line.format(20)]


def test_a_rank_0_that_hosts_the_store_and_does_not_come_is_pointed_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came with torch.distributed.rpc waits in torch's rendezvous, and has written nothing that could be seen."""
    look_at(monkeypatch, 10.0)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    text = "Rank 0 hosts this store and has not called init_rpc of remora.rpc: if it uses torch.distributed.rpc, import"
    assert text in failures(lambda: store, 2, record("b", 1))[0]
    assert text in caplog.records[0].getMessage()
    assert caplog.records[0].getMessage().endswith("(see docs/migrating.md), 10 s")
    assert text not in failures(lambda: store, 3, record("a", 0), timeout=0.05)[0], "it is another one that is missing"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert text not in failures(lambda: store, 2, record("b", 1), timeout=0.05)[0], "the launcher hosts it"


def test_hundreds_of_missing_workers_are_not_all_listed() -> None:
    error = failures(lambda: HashStore(), 500, record("a", 0), timeout=0.05)[0]
    assert "and 483 more" in error
    assert len(error) < 600


def test_who_gave_up_may_come_again(place: Open) -> None:
    failures(place, 2, record("a", 0), timeout=0.05)
    failures(place, 2, record("b", 1), timeout=0.05)
    groups = meet(place, 2, record("b", 1), record("a", 0))
    assert [each.name for each in groups[0].members()] == ["a", "b"]


def test_who_gave_up_does_not_disturb_those_who_wait() -> None:
    store = HashStore()
    impatient = record("a", 0)

    def come_twice() -> list[WorkerRecord]:
        with pytest.raises(RendezvousError):
            StaticGroup(store, 3, 0.05).join(impatient)
        given_up.set()
        return StaticGroup(store, 3, 20).join(record("a", 0))

    def come_late() -> list[WorkerRecord]:
        assert given_up.wait(20)
        return StaticGroup(store, 3, 20).join(record("c", 2))

    given_up = threading.Event()
    joined = at_once(lambda: StaticGroup(store, 3, 20).join(record("b", 1)), come_twice, come_late)
    assert joined[0].result() == joined[1].result() == joined[2].result()
    assert impatient not in joined[0].result()


def test_ctrl_c_gives_the_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    group = StaticGroup(store, 2, 20)

    def interrupted(key: str, deadline: float, look: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(group._table, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.join(record("a", 0))
    groups = meet(lambda: store, 2, record("b", 1), record("a", 0))
    assert [each.name for each in groups[0].members()] == ["a", "b"]


def test_waiting_for_ever_is_possible() -> None:
    store = HashStore()
    groups = meet(lambda: store, 2, record("a", 0), record("b", 1), timeout=0)
    assert len(groups) == 2


def test_who_gives_up_while_the_last_gathers_is_not_in_the_roster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last worker has read all records when the first takes its own back: the roster must not stand."""
    store = HashStore()
    quitter, last = StaticJoin(StaticGroup(store, 2, 20)._table, 2, record("a", 0)), record("b", 1)
    assert quitter._table.swap(quitter._key(0), quitter._mine) == quitter._mine
    quitter._table.add(quitter._key("arrived"), 1)
    gather = StaticJoin._gather
    gathered: list[Roster | None] = []

    def gather_slowly(self: StaticJoin) -> Roster | None:
        gathered.append(gather(self))
        if len(gathered) == 1:
            assert quitter._withdraw()
        return gathered[-1]

    monkeypatch.setattr(StaticJoin, "_gather", gather_slowly)
    with pytest.raises(RendezvousError, match=r"Given up: 'a' \(rank 0\)"):
        StaticGroup(store, 2, 0.1).join(last)
    assert gathered[0] is not None
    assert not any(gathered[1:])


def test_too_late_to_give_up_means_to_take_part() -> None:
    store = HashStore()
    shown = StaticGroup(store, 2, 20)._table
    slow, last = StaticJoin(shown, 2, record("a", 0)), StaticJoin(shown, 2, record("b", 1))
    shown.swap(slow._key(0), slow._mine)
    shown.add(slow._key("arrived"), 1)
    roster = last.attend(time.monotonic() + 20)
    slow._give_up()  # returns, for the roster is there
    assert roster.has(slow._record)


def test_a_last_worker_that_dies_on_the_way_blocks_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_join, "_GRACE", 0.05)
    store = HashStore()
    call = StaticJoin(StaticGroup(store, 2, 20)._table, 2, record("a", 0))
    call._table.swap(call._key("state"), "closed by one that died before it could publish the roster")
    with pytest.raises(RendezvousError, match="ended before the group was formed"):
        call.attend(time.monotonic() + 0.05)
    assert len(meet(lambda: store, 2, record("a", 0), record("b", 1))) == 2


class _Jittery(CountingStore):
    """Takes its time now and then, so that operations of different workers interleave in every way."""

    def __init__(self, inner: HashStore, seed: int) -> None:
        super().__init__(inner)
        self.random = random.Random(seed)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 0.002)
        return super()._ask(operation, *arguments)


@pytest.mark.parametrize("seed", range(4))
def test_impatient_workers_end_up_in_one_group(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes when it likes, gives up after milliseconds and comes again as somebody new. Whoever is in a roster must
    have got it, or the others would never find their fourth. One group after the other, until many have given up."""
    monkeypatch.setattr(store_table, "_FIRST_PAUSE", 0.001)
    shared, chance, deadline = HashStore(), random.Random(seed), time.monotonic() + 40
    given_up: list[str] = []

    def insist(rank: int, mood: random.Random) -> tuple[list[WorkerRecord], WorkerRecord]:
        while time.monotonic() < deadline:
            time.sleep(mood.random() * 0.02)
            me = record(f"w{rank}", rank)
            group = StaticGroup(_Jittery(shared, mood.randrange(10**6)), 4, 0.001 + mood.random() * 0.02)
            try:
                return group.join(me), me
            except RendezvousError as error:
                given_up.append(str(error))
        raise AssertionError("no group in time")

    while len(given_up) < 40:
        moods = [random.Random(chance.random()) for _ in range(4)]
        done = at_once(*(lambda rank=rank, mood=mood: insist(rank, mood) for rank, mood in enumerate(moods)))
        results = [each.result() for each in done]
        assert all(members == results[0][0] for members, _ in results)
        assert [me for _, me in results] == results[0][0]
    assert all("waited" in error for error in given_up)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("first", ["successor", "other"])
def test_who_died_while_it_waited_is_replaced(first: str, counted: bool, place: Open) -> None:
    """All were started again, since one of them had failed before it came: the dead are not waited for, nor in the way."""
    dead = record("a", 0)
    call = StaticJoin(StaticGroup(place(), 2, 20)._table, 2, dead)
    assert call._table.swap(call._key(0), call._mine) == call._mine
    call._table.add(call._key("arrived"), int(counted))
    members = [record("a", 0), record("b", 1)]

    def join(each: WorkerRecord) -> list[WorkerRecord]:
        return StaticGroup(place(), 2, 60.0, lambda other: other == dead).join(each)

    def join_later(each: WorkerRecord) -> list[WorkerRecord]:
        while call._table.add(call._key("arrived"), 0) == int(counted):
            time.sleep(0.001)
        return join(each)

    early, late = members if first == "successor" else members[::-1]
    assert [each.result() for each in at_once(lambda: join(early), lambda: join_later(late))] == [members, members]


def test_the_last_to_come_is_not_overlooked_though_the_place_was_left_in_the_same_moment() -> None:
    """Who gives up says so first, and is taken off the count then: meanwhile another may have come in its place."""
    shown = StaticGroup(HashStore(), 2, 20)._table
    quitter, members = StaticJoin(shown, 2, record("a", 0)), [record("a", 0), record("b", 1)]
    assert shown.swap(quitter._key(0), quitter._mine) == quitter._mine
    shown.add(quitter._key("arrived"), 1)
    shown.swap(quitter._key(0), "", old=quitter._mine)
    waiting, last = (StaticJoin(shown, 2, each) for each in members[::-1])
    joined = at_once(
        lambda: waiting.attend(time.monotonic() + 5.0),
        lambda: shown.wait(waiting._key(1), time.monotonic() + 5.0) and last.attend(time.monotonic() + 5.0),
    )
    assert [each.result().workers for each in joined] == [tuple(members)] * 2  # type: ignore[union-attr]


def signed_in(store: HashStore, each: WorkerRecord, *dead: WorkerRecord) -> StaticJoin:
    """One of two workers, which has signed in. If it is the last, it stands still before it decides on the roster."""
    join = StaticJoin(store_table.StoreTable(store), 2, each, lambda other: other in dead)
    join._sign_in()
    join._say_who_came()
    join._table.add(join._key("arrived"), 1)
    return join


def test_who_waited_long_enough_for_a_slow_last_worker_decides_in_its_place() -> None:
    """All are there: a worker whose time is over has no reason to give up, and the slow one finds the roster."""
    store, members = HashStore(), [record("a", 0), record("b", 1)]
    waiting, last = (signed_in(store, each) for each in members)
    waiting._give_up()  # returns, for the roster is there
    last._close()
    rosters = [each.attend(time.monotonic() + 20) for each in (waiting, last)]
    assert list(rosters[0].workers) == members
    assert rosters[0] == rosters[1]


def test_a_last_worker_that_ended_on_the_way_is_missing() -> None:
    store, dead = HashStore(), record("b", 1)
    waiting, _ = signed_in(store, record("a", 0), dead), signed_in(store, dead)
    with pytest.raises(RendezvousError, match=r"Missing: rank 1\. Present: 'a' \(rank 0\)"):
        waiting._give_up()
    assert len(meet(lambda: store, 2, record("a", 0), record("b", 1))) == 2


# --- a store that fails ---


def test_a_store_whose_host_ends_is_an_error_now_and_not_at_the_deadline() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))
    where = f"tcp://127.0.0.1:{server.port}"
    group = StaticGroup(TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30)), 2, 60)
    servers, start = [server], time.monotonic()
    del server

    def end() -> None:
        while not servers[0].check([f"remora/static/{RecordSeal().fingerprint}/2/0/arrived"]):
            time.sleep(0.005)
        servers.clear()

    def fail() -> str:
        with pytest.raises(RendezvousError) as caught:
            group.join(record("a", 0))
        return str(caught.value)

    failed = at_once(fail, end)[0]
    assert where in failed.result()
    assert "ended" in failed.result()
    assert time.monotonic() - start < 20


def test_garbage_in_the_store_is_named() -> None:
    store = HashStore()
    shown = store_table.StoreTable(store)
    shown.put(f"static/{shown.seal.fingerprint}/1/generation", "0")
    shown.put(f"static/{shown.seal.fingerprint}/1/0/0", "garbage")
    with pytest.raises(RendezvousError, match="garbage"):
        StaticGroup(store, 1, 0.2).join(record("a", 0))
    with pytest.raises(RendezvousError, match="not a roster"):
        Roster.from_json('{"workers": 7}')
