"""The table of connections that have proven nothing: who makes room for whom."""

from __future__ import annotations

from dataclasses import dataclass

from remora.agent.peers.pending_connections import BEGUN, GREETED, REMEMBERED, SILENT, PendingTable


@dataclass(eq=False)
class Connection:
    source: str
    stage: int = SILENT


def enter(table: PendingTable[Connection], source: str, stage: int = SILENT) -> tuple[Connection, Connection | None]:
    """Enter a connection as the listener does: what makes room leaves."""
    connection = Connection(source)
    victims = [table.add(connection)]
    if stage != SILENT:
        victims.append(table.advance(connection, stage))
    for victim in victims:
        if victim is not None:
            assert table.remove(victim)
    return connection, next((each for each in victims if each is not None), None)


def test_it_is_bounded_whatever_comes() -> None:
    for stage in (SILENT, BEGUN, GREETED):
        table: PendingTable[Connection] = PendingTable(100)
        for number in range(1000):
            enter(table, f"source {number}", stage)
        assert len(table) <= 100
        assert len(table._sources) <= 100


def test_a_greeted_one_is_not_closed_for_others() -> None:
    table: PendingTable[Connection] = PendingTable(100)
    greeted = [enter(table, "them", GREETED)[0] for _ in range(50)]
    for stage in (SILENT, BEGUN) * 500:
        enter(table, "flood", stage)
    assert all(each in table for each in greeted)


def test_half_sent_greetings_do_not_cost_a_silent_caller_its_place() -> None:
    table: PendingTable[Connection] = PendingTable(100)
    callers = [enter(table, f"caller {number}")[0] for number in range(30)]
    for number in range(1000):
        enter(table, f"flood {number % 7}", BEGUN)
    assert all(each in table for each in callers)


def test_silent_connections_do_not_cost_one_its_place_that_has_begun() -> None:
    table: PendingTable[Connection] = PendingTable(100)
    callers = [enter(table, f"caller {number}", BEGUN)[0] for number in range(30)]
    for number in range(1000):
        enter(table, f"flood {number % 7}")
    assert all(each in table for each in callers)


def test_one_source_leaves_room_for_others() -> None:
    table: PendingTable[Connection] = PendingTable(100)
    for stage in (SILENT, BEGUN) * 500:
        enter(table, "flood", stage)
    assert len(table) == 75
    callers = [enter(table, f"caller {number}")[0] for number in range(20)]
    for stage in (SILENT, BEGUN) * 500:
        enter(table, "flood", stage)
    assert all(each in table for each in callers)


def test_what_has_left_leaves_nothing() -> None:
    table: PendingTable[Connection] = PendingTable(10)
    for stage in (SILENT, BEGUN, GREETED):
        connection, _ = enter(table, "source", stage)
        assert table.remove(connection)
        assert not table.remove(connection)
        assert table.advance(connection, GREETED) is None
    assert len(table) == 0
    assert not table._sources
    assert not list(table)


def test_the_last_greetings_are_remembered_and_no_more() -> None:
    table: PendingTable[Connection] = PendingTable(100)
    said = [number.to_bytes(32, "big") for number in range(REMEMBERED + 10)]
    assert all(table.is_new(each) for each in said)
    assert not any(table.is_new(each) for each in said[10:])
    assert len(table._greetings) == REMEMBERED
