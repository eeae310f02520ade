"""Who is in a group: what entries on this host and other workers say, put together."""

from __future__ import annotations

import pytest

from remora.observer.directory import WorkerEntry
from remora.observer.members import Member, Members
from remora.observer.snapshot_json import to_json


def entry(incarnation: str) -> WorkerEntry:
    return WorkerEntry(
        name=f"w-{incarnation}",
        rank=ord(incarnation),
        group="g",
        incarnation=incarnation,
        pid=1,
        started=1,
        host="here",
        home="h",
        addresses=("unix://@x",),
    )


def said(incarnation: str, **more: object) -> object:
    return to_json(Member(name=f"w-{incarnation}", rank=ord(incarnation), incarnation=incarnation, **more))  # type: ignore[arg-type]


def names(members: Members) -> tuple[str, str]:
    return (
        "".join(known.member.incarnation for known in members.present()),
        "".join(known.member.incarnation for known in members.gone()),
    )


def test_a_worker_of_this_host_that_is_there_no_more_has_ended() -> None:
    members = Members()
    members.see([entry("a"), entry("b")])
    members.see([entry("b")])
    assert names(members) == ("b", "a")
    (gone,) = members.gone()
    assert "ended" in gone.member.reason


def test_what_workers_say_is_added_and_entries_keep_their_own() -> None:
    members = Members()
    members.see([entry("a")])
    members.hear([said("a", state="suspected", reason="slow"), said("b", addresses=("tcp://h:1",)), said("c", state="dead")])
    assert names(members) == ("ab", "c")
    a, b = members.present()
    assert (a.member.state, a.member.host, a.entry) == ("suspected", "here", entry("a"))
    assert b.member.addresses == ("tcp://h:1",)
    assert b.entry is None


def test_the_dead_do_not_come_back_by_hearsay() -> None:
    members = Members()
    members.hear([said("a", state="dead", reason="killed")])
    members.hear([said("a")])
    assert names(members) == ("", "a")


def test_a_silent_tale_keeps_the_addresses_that_are_known() -> None:
    members = Members()
    members.hear([said("a", addresses=("tcp://h:1",))])
    members.hear([said("a")])
    assert members.present()[0].member.addresses == ("tcp://h:1",)


@pytest.mark.parametrize("told", [None, {}, [1], [{"name": 1}], [{}]])
def test_nonsense_is_refused(told: object) -> None:
    with pytest.raises(ValueError):
        Members().hear(told)
