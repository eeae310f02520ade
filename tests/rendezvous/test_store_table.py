"""The notice table: what it promises over any store, and what it makes of a store that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore  # type: ignore[attr-defined]

from remora.errors import RendezvousError
from remora.rendezvous.store_table import StoreTable, describe
from tests.rendezvous.meeting_places import KINDS, CountingStore, FrozenStore, meeting_place


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreTable]:
    with meeting_place(request.param, tmp_path) as store:
        boards = [StoreTable(store())]
        yield boards[0]
        boards[0].close()
        boards[0]._store = boards[0]._kept = None


def test_what_is_free_can_be_taken_once(table: StoreTable) -> None:
    assert table.swap("key", "mine") == "mine"
    assert table.swap("key", "yours") == "mine"
    assert table.swap("key", "", old="not what is there") == "mine"
    assert table.swap("key", "", old="mine") == ""
    assert table.swap("key", "yours") == "yours"


def test_values_come_back_as_they_were_put(table: StoreTable) -> None:
    table.put("a", "1 é")
    table.put("b", "")
    assert table.take(["a", "b", "a"]) == ["1 é", "", "1 é"]
    assert table.take([]) == []
    assert table.has(["a", "b"])
    assert not table.has(["a", "c"])


def test_numbers_count_from_nothing(table: StoreTable) -> None:
    assert [table.add("n", amount) for amount in (0, 2, -1)] == [0, 2, 1]


@pytest.mark.parametrize("timeout", [0.0, 0.0001, 0.2, -5.0])
def test_waiting_ends_at_the_deadline(table: StoreTable, timeout: float) -> None:
    """Also when less than a millisecond is left, which stores take for no limit at all."""
    start = time.monotonic()
    assert not table.wait("never", start + timeout)
    assert time.monotonic() - start < 5
    table.put("there", "x")
    assert table.wait("there", start + timeout)


def test_a_wait_looks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that Ctrl-C is heard in between: native code does not hear it. And not so often that many waiting are a load."""
    store = CountingStore(HashStore())
    assert not StoreTable(store).wait("never", time.monotonic() + 0.6)
    assert 4 < store.counts["check"] < 14
    assert store.counts["wait"] == 0


def test_a_process_group_may_use_the_same_names() -> None:
    store = HashStore()
    store.set("kind", "theirs")
    StoreTable(store).put("kind", "ours")
    assert store.get("kind") == b"theirs"
    assert store.get("remora/kind").endswith(b"ours")


class _Broken(CountingStore):
    def _ask(self, operation: str, *arguments: Any) -> Any:
        self.counts[operation] += 1
        raise RuntimeError("No space left on device.\nframe #0: far too much")


def test_a_store_that_failed_is_not_touched_again() -> None:
    store = _Broken(HashStore())
    table = StoreTable(store)
    for _ in range(2):
        for attempt in (
            lambda: table.put("a", "b"),
            lambda: table.swap("a", "b"),
            lambda: table.add("a", 1),
            lambda: table.has(["a"]),
            lambda: table.take(["a"]),
            lambda: table.wait("a", time.monotonic() + 10),
        ):
            with pytest.raises(RendezvousError, match=r"_Broken.*failed: No space left on device\. If") as caught:
                attempt()
            assert "frame" not in str(caught.value)
    assert sum(store.counts.values()) == 1
    assert "broken" in repr(table)


def test_a_store_that_does_not_answer_is_not_waited_for_for_long() -> None:
    """Its host may be frozen, or cut off; then it may be there again."""
    store = FrozenStore(HashStore())
    table = StoreTable(store, answer_timeout=0.05)
    for _ in range(3):
        with pytest.raises(RendezvousError, match=r"did not answer within 0\.05 s\. If .* frozen or cut off"):
            table.put("a", "b")
    store.thawed.set()
    deadline = time.monotonic() + 10.0
    while not _answers(table):
        assert time.monotonic() < deadline
    assert table.take(["a"]) == ["b"]
    assert store.counts["set"] == 1, "it was asked once"


def _answers(table: StoreTable) -> bool:
    try:
        return table.has(["a"])
    except RendezvousError:
        return False


def test_a_store_written_in_python_lives_as_long_as_the_board() -> None:
    table = StoreTable(CountingStore(HashStore()))  # nobody else holds it
    table.put("a", "b")
    assert table.take(["a"]) == ["b"]


def test_where_a_store_is(tmp_path: Path) -> None:
    file = FileStore(str(tmp_path / "x"), -1)
    assert describe(PrefixStore("a", PrefixStore("b", file))) == f"file://{tmp_path}/x"
    assert describe(HashStore()) == "HashStore"


@pytest.mark.parametrize("kind", ["tcp"])
def test_where_a_server_is(kind: str, tmp_path: Path) -> None:
    with meeting_place(kind, tmp_path) as store:
        assert describe(store()).startswith("tcp://127.0.0.1:")


def test_the_first_decides_on_the_kind_of_group(table: StoreTable) -> None:
    table.agree_on_kind("static")
    table.agree_on_kind("static")
    with pytest.raises(RendezvousError, match="RPC group mixes statically and dynamically initialized members"):
        table.agree_on_kind("dynamic")


