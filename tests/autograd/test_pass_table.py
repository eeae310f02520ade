"""The table of passes alone: passes are opened, closed, ended and released with their contexts."""

from __future__ import annotations

import itertools
import threading

import pytest

from remora.autograd.backward_pass import Key
from remora.autograd.context import Context
from remora.autograd.pass_table import PassTable

KEY: Key = (7, 0, 1, True, False)


@pytest.fixture
def context() -> Context:
    return Context(7, itertools.count().__next__)


@pytest.fixture
def table() -> PassTable:
    return PassTable()


def test_a_pass_is_opened_once(table: PassTable, context: Context) -> None:
    first = table.open(context, KEY, serve=True)
    assert table.open(context, KEY, serve=False) is first
    assert table.running() == [first]


def test_a_closed_pass_is_not_opened_again(table: PassTable, context: Context) -> None:
    table.close(table.open(context, KEY, serve=False))
    assert table.running() == []
    with pytest.raises(RuntimeError, match="pass 1 of worker 0 is over"):
        table.open(context, KEY, serve=False)


def test_the_last_request_closes_a_pass_that_is_done(
    table: PassTable, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = table.open(context, KEY, serve=True)
    table.open(context, KEY, serve=True)
    monkeypatch.setattr(type(this), "done", True)
    table.served(this)
    assert table.running() == [this]
    table.served(this)
    assert table.running() == []


def test_the_end_of_a_pass_that_never_came_keeps_it_from_being_opened(table: PassTable, context: Context) -> None:
    assert table.end(context, KEY, None) == (None, set())
    with pytest.raises(RuntimeError, match="is over"):
        table.open(context, KEY, serve=False)


def test_a_released_context_opens_no_pass_and_leaves_nothing(table: PassTable, context: Context) -> None:
    this = table.open(context, KEY, serve=True)
    context.released = True
    assert table.release(context.id) == [this]
    with pytest.raises(RuntimeError, match="was released"):
        table.open(context, (7, 0, 2, True, False), serve=True)
    table.served(this)
    table.close(this)
    assert table.running() == []
    assert not table._contexts


def test_a_pass_whose_context_was_released_meanwhile_ends_on_the_workers_that_it_told(
    table: PassTable, context: Context
) -> None:
    this = table.open(context, KEY, serve=True)
    context.released = True
    table.release(context.id)
    assert table.end(context, KEY, this) == (this, this.told)
    assert not table._contexts


def test_a_release_finds_each_pass_or_the_pass_finds_the_release(table: PassTable) -> None:
    """Two threads at once, many times: no pass runs on in a context that was released."""
    for number in range(300):
        context = Context(number, itertools.count().__next__)
        start = threading.Barrier(2)
        opened: list[object] = []

        def open_one(context: Context = context, start: threading.Barrier = start, opened: list[object] = opened) -> None:
            start.wait(10.0)
            try:
                opened.append(table.open(context, (context.id, 0, 1, True, False), serve=True))
            except RuntimeError:
                pass

        thread = threading.Thread(target=open_one)
        thread.start()
        start.wait(10.0)
        context.released = True
        released = table.release(context.id)
        thread.join(10.0)
        assert released == opened
        assert not table._contexts
