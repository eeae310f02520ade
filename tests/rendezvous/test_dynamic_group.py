"""Groups that workers join and leave at any time, on every kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from remora.errors import RendezvousError
from remora.rendezvous.group import DynamicGroup
from remora.rendezvous.record import WorkerRecord
from remora.rendezvous.store_table import StoreTable
from tests.rendezvous.meeting_places import KINDS, CountingStore, Open, at_once, meeting_place, record


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    with meeting_place(request.param, tmp_path) as store:
        yield store


def joined(store: object, *records: WorkerRecord) -> DynamicGroup:
    group = DynamicGroup(store)  # type: ignore[arg-type]
    for each in records:
        group.join(each)
    return group


def test_everybody_sees_who_joined_and_left(place: Open) -> None:
    a, b, c = record("a-1", 5), record("b:2", 0), record("c_3", 9)
    ours, theirs = DynamicGroup(place()), DynamicGroup(place())
    assert ours.join(a) == [a]
    assert theirs.join(b) == [b, a]
    assert ours.group_id == theirs.group_id != ""
    assert theirs.join(c) == ours.members() == [b, a, c]
    ours.leave(a)
    assert theirs.members() == ours.members() == [b, c]
    assert "2 workers" in repr(theirs)


def test_workers_that_join_at_once_see_each_other() -> None:
    shared = HashStore()
    records = [record(f"w{rank}", rank) for rank in range(20)]
    groups = [DynamicGroup(shared) for _ in records]
    joins = at_once(*(lambda g=g, r=r: g.join(r) for g, r in zip(groups, records, strict=True)))
    assert any(len(done.result()) == 20 for done in joins)
    assert all(group.members() == records for group in groups)
    assert len({group.group_id for group in groups}) == 1


@pytest.mark.parametrize(("name", "rank", "text"), [("a", 7, "name 'a' is not unique"), ("b", 5, "id 5 is not unique")])
def test_a_name_or_id_that_is_taken_is_refused(place: Open, name: str, rank: int, text: str) -> None:
    a = record("a", 5)
    group = joined(place(), a)
    with pytest.raises(RuntimeError, match=rf"{text}.*'a' \(rank 5\) has it"):
        joined(place(), record(name, rank))
    assert group.members() == [a]
    b = record("b", 7)  # nothing is left of the attempt: its name and id are free
    assert group.join(b) == [a, b]


def test_only_one_of_many_gets_a_name(place: Open) -> None:
    records = [record("same", rank) for rank in range(8)]

    def attempt(each: WorkerRecord) -> bool:
        try:
            joined(place(), each)
        except RendezvousError as error:
            assert "is not unique" in str(error)  # noqa: PT017
            return False
        return True

    attempts = at_once(*(lambda each=each: attempt(each) for each in records))
    winners = [each for each, done in zip(records, attempts, strict=True) if done.result()]
    assert len(winners) == 1
    assert DynamicGroup(place()).members() == winners


def test_who_left_may_come_again_as_another(place: Open) -> None:
    first = record("a", 0)
    group = joined(place(), first)
    group.leave(first)
    for again in (record("a", 0), record("a", 3), record("b", 0)):
        assert group.join(again) == [again]
        group.leave(again)
    assert group.members() == []


def test_the_dead_make_room_when_they_are_declared_dead(place: Open) -> None:
    dead, alive, new = record("a", 0), record("b", 1), record("a", 0)
    witness = joined(place(), dead, alive)
    newcomer = DynamicGroup(place())
    with pytest.raises(RendezvousError, match="neither left nor been declared dead"):
        newcomer.join(new)
    for each in newcomer.holders(new):
        newcomer.leave(each)
    assert newcomer.join(new) == [new, alive]
    assert witness.members() == [new, alive]


def test_a_survivor_may_remove_the_dead(place: Open) -> None:
    dead, alive = record("a", 0), record("b", 1)
    survivor = joined(place(), dead, alive)
    survivor.leave(dead)
    survivor.leave(dead)  # two survivors may have the same idea
    again = record("a", 0)
    assert joined(place(), again).members() == [again, alive]
    survivor.leave(dead)  # and a third one late: that must not hit who came after
    with pytest.raises(RendezvousError, match="is not unique"):
        joined(place(), record("a", 0))


def test_who_has_a_name_or_an_id_is_told(place: Open) -> None:
    a, b = record("a", 0), record("b", 1)
    group = joined(place(), a, b)
    assert group.holders(record("a", 1)) == sorted([a, b], key=lambda each: each.to_json())
    assert group.holders(record("a", 7)) == group.holders(record("c", 0)) == [a]
    assert group.holders(a) == group.holders(record("c", 7)) == []
    group.leave(a)
    assert group.holders(record("a", 0)) == []


def test_a_survivor_that_died_while_it_struck_somebody_off_leaves_a_name_that_can_be_freed(place: Open) -> None:
    """The line was written, and the keys were not released."""
    a = record("a", 0)
    group = joined(place(), a)
    group._write({"left": a.incarnation})
    assert group.members() == []
    assert group.holders(record("a", 0)) == [a]
    group.leave(a)
    again = record("a", 0)
    assert group.join(again) == [again]


def test_a_worker_that_dies_while_joining_disturbs_nobody() -> None:
    store = HashStore()
    a = record("a", 0)
    group = joined(store, a)
    StoreTable(store).add(group._key("lines"), 1)  # one drew a number and was killed before it wrote its line
    b = record("b", 1)
    assert joined(store, b).members() == [a, b]
    assert group.members() == [a, b]
    late = record("late", 2)
    StoreTable(store).put(group._key("line/2"), f'{{"joined":{late.to_json().decode()}}}')  # or was just slow
    assert group.members() == [a, b, late]


def test_a_line_may_be_read_after_the_one_that_ends_it() -> None:
    store = HashStore()
    group = joined(store, record("a", 0))
    slow = record("slow", 1)
    assert StoreTable(store).add(group._key("lines"), 1) == 2
    StoreTable(store).put(group._key("line/3"), f'{{"left":"{slow.incarnation}"}}')
    assert StoreTable(store).add(group._key("lines"), 1) == 3
    assert [each.name for each in group.members()] == ["a"]
    StoreTable(store).put(group._key("line/2"), f'{{"joined":{slow.to_json().decode()}}}')
    assert [each.name for each in group.members()] == ["a"]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"joined": 7}', "[" * 100_000])
def test_a_line_that_nobody_wrote_is_named(line: str) -> None:
    store = HashStore()
    group = joined(store, record("a", 0))
    StoreTable(store).put(group._key("line/2"), line or " ")
    StoreTable(store).add(group._key("lines"), 1)
    with pytest.raises(RendezvousError, match="no worker wrote"):
        group.members()


# --- what it costs ---


@pytest.mark.parametrize("size", [1, 10, 50])
def test_joining_takes_a_fixed_number_of_steps(size: int) -> None:
    shared = HashStore()
    records = [record(f"w{rank}", rank) for rank in range(size)]
    group = joined(shared, *records)
    store = CountingStore(shared)
    newcomer = DynamicGroup(store)
    newcomer.join(record("new", size))
    assert sum(store.counts.values()) == 10
    assert store.counts["multi_get"] == 1
    store.counts.clear()
    newcomer.members()
    assert sum(store.counts.values()) == 1  # nothing new
    group.leave(records[0])
    store.counts.clear()
    newcomer.members()
    assert sum(store.counts.values()) == 3
