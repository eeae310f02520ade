"""What the machine that decides who reads a link decides, one step at a time. (Interleavings: tests/model.)"""

from __future__ import annotations

import pytest

from remora.protocol.reader import (
    ARM,
    ARM_AGAIN,
    COMPLETE,
    DEFER,
    FLUSH,
    NOTHING,
    PASS_ON,
    POOL,
    READ,
    ROUND,
    UNDECIDED,
    WAKE,
    WRITE,
    Reader,
    Registration,
    Thresholds,
)
from remora.transport import poller


@pytest.fixture
def reader() -> Reader:
    return Reader(Thresholds(round=1.0, memory=5.0))


def test_its_words_for_the_poller_are_those_of_the_poller() -> None:
    assert (READ, WRITE) == (poller.READ, poller.WRITE)


# What the poller watches for.


def wanted(reader: Reader, holder: object = None, sorting: bool = False, outbox: bool = False, paused: bool = False) -> int:
    return reader.wanted_events(holder, sorting, outbox, paused)


def test_the_poller_looks_while_no_thread_reads(reader: Reader) -> None:
    assert wanted(reader) == READ
    assert wanted(reader, holder="a thread") == 0
    assert wanted(reader, paused=True) == 0
    assert wanted(reader, outbox=True) == READ | WRITE
    assert wanted(reader, holder="a thread", outbox=True) == WRITE
    reader.sent()
    assert wanted(reader) == 0


def test_the_poller_looks_beside_a_reader_that_does_not_go_on(reader: Reader) -> None:
    stuck, other = object(), object()
    assert reader.tick(stuck) == NOTHING
    assert not reader.may_replace(stuck)
    assert reader.tick(stuck) == (ARM_AGAIN,)
    assert reader.tick(stuck) == NOTHING  # it is known
    assert [reader.may_replace(holder) for holder in (stuck, other, None)] == [True, False, False]
    assert wanted(reader, stuck) == READ
    assert wanted(reader, other) == 0
    assert wanted(reader, stuck, sorting=True) == 0  # no thread could read


def test_a_reader_that_moves_is_not_replaced(reader: Reader) -> None:
    for role in [object() for _ in range(5)]:
        assert reader.tick(role) == NOTHING
    assert reader.tick(None) == NOTHING


def test_a_reader_that_was_replaced_is_woken_once_and_the_poller_looks_away_for_that(reader: Reader) -> None:
    role = object()
    reader.tick(role)
    reader.tick(role)
    assert reader.replaced(role, has_met=False) == NOTHING
    assert reader.replaced(role, has_met=True) == (ARM, WAKE)
    assert wanted(reader, role) == 0
    assert reader.tick(role) == (ARM_AGAIN,)  # it has not moved: a signal handler keeps it
    assert reader.replaced(role, has_met=True) == NOTHING
    assert wanted(reader, role) == READ


@pytest.mark.parametrize(
    ("events", "armed", "lasts"), [(READ | 4, READ, True), (READ, READ | WRITE, True), (READ, READ, False)]
)
def test_the_last_word_of_the_poller_is_asked_for_again(events: int, armed: int, lasts: bool) -> None:
    registration = Registration()
    registration.armed = armed
    registration.told(events, lasts)
    assert registration.again


def test_what_lasts_is_not_asked_for_again() -> None:
    registration = Registration()
    registration.armed = READ
    registration.told(READ, True)
    assert not registration.again
    assert not registration.must_ask(READ, READ, unread=False)
    assert registration.must_ask(READ, READ, unread=True)
    assert registration.must_ask(0, READ, unread=False)


def test_a_decision_is_undecided_until_it_is_made() -> None:
    registration = Registration()
    registration.armed, registration.unsure, registration.again = READ, True, True
    assert registration.decide() == READ
    assert (registration.armed, registration.unsure) == (UNDECIDED, False)
    assert registration.must_ask(READ, READ, unread=False)
    assert not registration.again
    registration.check()


# Waiters.


def test_a_caller_that_reads_has_the_poller_look_away_once(reader: Reader) -> None:
    assert reader.sent() == (ARM,)
    assert reader.sent() == NOTHING


def test_a_thread_that_parks_has_the_poller_look(reader: Reader) -> None:
    assert reader.watch() == NOTHING
    reader.sent()
    assert reader.watch() == (ARM,)
    assert reader.watch_again() == (ARM_AGAIN,)


def test_a_reader_that_leaves_while_others_wait_has_the_poller_look(reader: Reader) -> None:
    reader.sent()
    assert reader.left() == NOTHING
    reader.pending[1] = "a call"
    reader.low_priority.add(1)
    assert reader.left() == NOTHING
    assert reader.unwatched
    reader.pending[2] = "another"
    assert reader.left() == (ARM,)
    assert not reader.unwatched


def test_a_waiter_leaves_the_link_to_the_next_one(reader: Reader) -> None:
    assert reader.left_async(has_outbox=False) == (ARM,)
    reader.waiter_owned = True
    assert reader.left_async(has_outbox=False) == NOTHING
    assert reader.left_async(has_outbox=True) == (ARM,)
    assert reader.unwatched
    reader.parked.add("a thread")
    assert reader.left_async(has_outbox=False) == (ARM,)
    reader.parked.clear()
    reader.notify_ids.add(1)
    assert reader.left_async(has_outbox=False) == (ARM,)
    assert not reader.unwatched


def test_a_handler_that_read_wakes_the_frame_below(reader: Reader) -> None:
    assert reader.left_to_frame_below() == (WAKE,)


def test_a_link_that_was_read_to_its_end_stays_armed(reader: Reader) -> None:
    registration = Registration()
    registration.armed = READ
    assert reader.was_read(registration, unread=False, has_outbox=False, paused=False) == NOTHING
    for of in ("unread", "has_outbox", "paused"):
        facts = dict.fromkeys(("unread", "has_outbox", "paused"), False) | {of: True}
        assert reader.was_read(registration, **facts) == (ARM,)
    registration.armed = UNDECIDED
    assert reader.was_read(registration, unread=False, has_outbox=False, paused=False) == (ARM,)


def test_a_pool_thread_that_has_read_watches_for_those_that_found_it_reading(reader: Reader) -> None:
    registration = Registration()
    registration.armed = READ
    reader.sent()
    assert reader.was_read(registration, unread=False, has_outbox=False, paused=False) == (ARM,)
    assert reader.unwatched
    reader.pending[1] = "a call"
    reader.was_read(registration, unread=False, has_outbox=False, paused=False)
    assert not reader.unwatched


# Replies.


def test_a_waiter_completes_its_own_replies_and_empty_ones(reader: Reader) -> None:
    assert reader.disposal(is_quiet=True, is_empty=False, is_mine=True, is_notified=True) is COMPLETE
    assert reader.disposal(is_quiet=True, is_empty=True, is_mine=False, is_notified=False) is COMPLETE
    assert reader.disposal(is_quiet=False, is_empty=True, is_mine=True, is_notified=False) is POOL  # code of the program


def test_the_replies_of_others_are_deferred_only_if_threads_come_for_them(reader: Reader) -> None:
    def others(is_notified: bool = False) -> object:
        return reader.disposal(is_quiet=True, is_empty=False, is_mine=False, is_notified=is_notified)

    assert others() is POOL
    reader.waiter_owned = True
    assert others() is DEFER
    assert others(is_notified=True) is POOL
    reader.parked.add("a thread")
    assert others() is POOL


def test_what_is_deferred_is_passed_on_when_no_thread_comes_for_it(reader: Reader) -> None:
    reader.waiter_owned = True
    assert not reader.must_pass_on(closed=True)
    reader.deferred_long[1] = "a call"
    assert reader.must_pass_on(closed=True)
    assert not reader.must_pass_on(closed=False)
    reader.parked.add("a thread")
    assert reader.must_pass_on(closed=False)
    reader.parked.clear()
    reader.waiter_owned = False
    assert reader.must_pass_on(closed=False)
    reader.check()


# The timer.


def test_waiters_are_counted_on_for_a_while(reader: Reader) -> None:
    assert reader.sent_async(100.0) == NOTHING  # none ever came, and the poller looks
    reader.sent()
    assert reader.sent_async(100.0) == (ARM,)
    reader.came(100.0)
    assert reader.sent_async(104.0) == (ROUND,)
    assert reader.owned() == NOTHING
    assert reader.waiter_owned
    assert not reader.is_deserted(105.0, closed=False)
    assert reader.is_deserted(106.0, closed=False)
    assert reader.give_up() == (FLUSH, ARM_AGAIN, PASS_ON)
    assert (reader.waiter_owned, reader.unwatched) == (False, False)


def test_a_channel_that_is_closed_is_given_up(reader: Reader) -> None:
    reader.came(100.0)
    assert reader.is_deserted(100.0, closed=True)


def test_a_call_does_not_rely_on_a_timer_that_has_run(reader: Reader) -> None:
    reader.came(100.0)
    reader.sent_async(100.0)
    reader.is_deserted(200.0, closed=False)
    reader.give_up()
    assert reader.owned() == (FLUSH, ARM_AGAIN, PASS_ON)
    assert not reader.waiter_owned
