"""A stranger who can write to the store: nothing it puts there leads a worker into another group."""

from __future__ import annotations

import json
import logging

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from remora.errors import AuthenticationError, RendezvousError
from remora.rendezvous.group import DynamicGroup, StaticGroup
from remora.rendezvous.record import WorkerRecord
from remora.rendezvous.seal import RecordSeal
from remora.rendezvous.static_join import Roster
from remora.rendezvous.store_table import StoreTable
from tests.rendezvous.meeting_places import at_once, record

SECRET = b"the secret that both groups have, as on one host"


def seal() -> RecordSeal:
    return RecordSeal(SECRET, "a secret was given")


def form(store: HashStore, *names: str) -> list[StaticGroup]:
    groups = [StaticGroup(store, len(names), 20.0, None, seal()) for _ in names]
    records = [record(name, rank) for rank, name in enumerate(names)]
    for joined in at_once(*(lambda g=g, r=r: g.join(r) for g, r in zip(groups, records, strict=True))):
        joined.result()
    return groups


def base(size: int) -> str:
    return f"remora/static/{seal().fingerprint}/{size}"


def refused(store: HashStore, me: WorkerRecord, size: int, timeout: float = 2.0) -> str:
    with pytest.raises(RendezvousError) as caught:
        StaticGroup(store, size, timeout, None, seal()).join(me)
    return str(caught.value)


def test_a_forged_roster_is_not_used() -> None:
    """With the id and a worker of another group that has the same secret."""
    other = form(HashStore(), "a", "b")[0]
    store, me = HashStore(), record("mine", 0)
    forged = Roster(other.group_id, (me, other.members()[1]))
    store.set(f"{base(2)}/0/roster", forged.to_json())
    error = refused(store, me, 2)
    assert f"{base(2)[7:]}/0/roster" in error
    assert "no seal made with this group's secret" in error
    assert "use a new one" in error


@pytest.mark.parametrize("what", ["generation", "0/1", "0/state"])
@pytest.mark.parametrize("value", ["0", "", "x" * 100_000, "\x1b[2J\nRMR1", "\xff\udcff".encode(errors="ignore").decode()])
def test_whatever_a_stranger_puts_there_is_named_and_printable(what: str, value: str) -> None:
    store, me = HashStore(), record("mine", 1 if what == "0/1" else 0)
    store.set(f"{base(2)}/{what}", value)
    error = refused(store, me, 2, timeout=0.3)
    assert error.isprintable()
    assert len(error) < 1000


def test_values_are_of_no_use_in_another_store() -> None:
    """Copied, with their seals, from the store of another group with the same secret."""
    stores = [TCPStore("127.0.0.1", 0, None, True) for _ in range(2)]
    DynamicGroup(stores[0], seal()).join(record("theirs", 0))
    key = "remora/dynamic/group"
    stores[1].set(key, stores[0].get(key))
    with pytest.raises(RendezvousError, match="was copied here"):
        DynamicGroup(stores[1], seal()).join(record("mine", 0))


def test_values_are_of_no_use_under_another_key() -> None:
    """A record that was sealed for rank 1 does not stand for rank 0."""
    store = HashStore()
    table = StoreTable(store, seal())
    table.put("static/x/1", record("one", 1).to_json().decode())
    store.set("remora/static/x/0", store.get("remora/static/x/1"))
    with pytest.raises(RendezvousError, match="written for 'static/x/1'"):
        table.take(["static/x/0"])


def test_a_changed_byte_anywhere_is_noticed() -> None:
    store = HashStore()
    table = StoreTable(store, seal())
    table.put("key", "value")
    whole = store.get("remora/key")
    for changed in [whole[:n] for n in range(1, len(whole))] + [whole + b"x"] + [
        whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in range(len(whole))
    ]:
        store.set("remora/key", changed)
        with pytest.raises(RendezvousError):
            table.take(["key"])
    store.set("remora/key", whole)
    assert table.take(["key"]) == ["value"]


def test_the_roster_of_an_earlier_group_is_of_no_use() -> None:
    """It is genuine, and names other incarnations."""
    store = HashStore()
    form(store, "a")
    old = {key: store.get(f"{base(1)}/{key}") for key in ("0/roster", "0/state", "0/0")}
    form(store, "a")
    for key, value in old.items():
        store.set(f"{base(1)}/{key}", value)
    StoreTable(store, seal()).put(f"{base(1)[7:]}/generation", "0")  # the old value, as a stranger may have kept it
    assert "a group that ended" in refused(store, record("a", 0), 1)


def test_a_line_of_a_stranger_is_left_out_and_the_group_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "remora")
    store, me = HashStore(), record("a", 0)
    group = DynamicGroup(store, seal())
    group.join(me)
    for number in range(2, 5):
        forged = json.dumps({"joined": json.loads(record("evil", number).to_json())})
        store.set(f"remora/{group._key(f'line/{number}')}", forged)
        StoreTable(store, seal()).add(group._key("lines"), 1)
    assert group.members() == [me]
    second = record("b", 1)
    assert DynamicGroup(store, seal()).join(second) == [me, second]
    assert group.members() == [me, second]
    assert len([each for each in caplog.records if "no worker of this group wrote" in each.message]) == 2, "one for each"


def test_a_count_that_a_stranger_raised_is_an_error_and_no_work() -> None:
    store = HashStore()
    group = DynamicGroup(store, seal())
    group.join(record("a", 0))
    StoreTable(store, seal()).add(group._key("lines"), 10**12)
    with pytest.raises(RendezvousError, match="a process outside the group changed it"):
        group.members()


def test_a_count_that_a_stranger_lowered_brings_no_member_back() -> None:
    """The lines are genuine: read again, that by which a worker joined would count, without that by which it left."""
    store, me, gone = HashStore(), record("a", 0), record("b", 1)
    group = DynamicGroup(store, seal())
    group.join(me)
    DynamicGroup(store, seal()).join(gone)
    group.leave(gone)
    assert group.members() == [me]
    table = StoreTable(store, seal())
    for lowered in (-3, 2):
        table.add(group._key("lines"), lowered)
        with pytest.raises(RendezvousError, match="a process outside the group changed it"):
            group.members()
    table.add(group._key("lines"), 1)
    assert group.members() == [me]


@pytest.mark.parametrize("hint", ["", "7", "[1,2]", '["\x1b[2J", 99999999, "f", "k"]', "[" * 100_000])
def test_the_hint_who_came_last_is_not_trusted_either(hint: str) -> None:
    store, me = HashStore(), record("mine", 0)
    group = StaticGroup(store, 2, 1.2, None, seal())
    original = StoreTable.put_hint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreTable, "put_hint", lambda self, key, value: original(self, key, hint))
        with pytest.raises(RendezvousError) as caught:
            group.join(me)
    assert str(caught.value).isprintable()


def test_another_secret_is_named_to_both() -> None:
    store = HashStore()
    seals = [seal(), RecordSeal(b"another secret, as long as the first", "no secret was given")]

    def join(rank: int) -> str:
        with pytest.raises(AuthenticationError) as caught:
            StaticGroup(store, 2, 20.0, None, seals[rank]).join(record(f"w{rank}", rank))
        return str(caught.value)

    for failed in at_once(lambda: join(0), lambda: join(1)):
        assert "a secret was given: 'w0' (rank 0)" in failed.result()
        assert "no secret was given: 'w1' (rank 1)" in failed.result()
    assert [each.group_id for each in form(store, "a", "b")], "the next group with one secret forms"


def test_a_dynamic_group_has_one_secret() -> None:
    store = HashStore()
    DynamicGroup(store, seal()).join(record("a", 0))
    with pytest.raises(AuthenticationError, match=r"'b' \(rank 1\) cannot join .*same secret"):
        DynamicGroup(store, RecordSeal(b"another one")).join(record("b", 1))


def test_in_an_insecure_group_a_stranger_can_seal_but_not_reach_the_terminal() -> None:
    """The key of the empty secret is known to all: so texts are looked at once more before people see them."""
    store = HashStore()
    table = StoreTable(store)
    base = f"static/{table.seal.fingerprint}/3/0"
    table.put(f"{base}/gone/1", "\x1b[2J\n" + "x" * 100_000)
    with pytest.raises(RendezvousError) as error:
        StaticGroup(store, 3, 0.5).join(record("worker0", 0))
    text = str(error.value)
    assert "Given up: ?[2J?xxx" in text
    assert text.isprintable()
    assert len(text) < 2000


@pytest.mark.parametrize("field", ["incarnation", "host", "addresses"])
def test_control_characters_in_a_record_are_refused(field: str) -> None:
    """Errors and logs show these texts."""
    fields = json.loads(record("worker0", 0).to_json())
    strange = "tcp:127.0.0.1:5000\x1b[2J"
    with pytest.raises(RendezvousError, match="not a worker's record") as error:
        WorkerRecord.from_json(json.dumps(fields | {field: [strange] if field == "addresses" else strange}))
    assert str(error.value).isprintable()


def test_the_error_in_a_roster_and_the_hint_of_a_dynamic_group_are_printable_and_short() -> None:
    assert Roster.from_json(Roster("", (), "\x1b[2J" + "x" * 9000).to_json()).error == "?[2J" + "x" * 4092
    store = HashStore()
    StoreTable(store).put_hint("dynamic/secret", "\x1b[2J\n" + "x" * 9000)
    with pytest.raises(AuthenticationError) as error:
        DynamicGroup(store, seal()).join(record("worker0", 0))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
