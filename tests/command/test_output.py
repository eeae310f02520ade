"""Tables and lines: plain text where there is no terminal, colours where there is one, and nothing that a terminal obeys."""

from __future__ import annotations

import builtins
import io
from typing import Any

import pytest

from remora.command.output import Column, PlainOutput, RichOutput, Table, make_output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def some_table() -> Table:
    table = Table([Column("NAME"), Column("EMPTY"), Column("COUNT", right=True)])
    table.add("worker0", "", "7")
    table.add("w\x1b[31m1", "", "1,234", style="bad")
    return table


def test_plain_tables_are_aligned_and_leave_empty_columns_out() -> None:
    stream = io.StringIO()
    PlainOutput(stream).table(some_table())
    assert stream.getvalue().splitlines() == [
        "NAME     COUNT",
        "worker0      7",
        "w\ufffd[31m1  1,234",
    ]


def test_pipes_get_plain_text() -> None:
    assert isinstance(make_output(io.StringIO()), PlainOutput)


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    output = make_output(stream)
    assert isinstance(output, RichOutput)
    output.table(some_table())
    output.line("\x1b]0;evil\x07[bold]not markup[/bold]", "bad")
    text = stream.getvalue()
    assert "\x1b[1;31m" in text
    assert "\x1b]0" not in text
    assert "[bold]not markup[/bold]" in text


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    output = make_output(stream)
    output.line("bad news", "bad")
    output.table(some_table())
    assert "31m" not in stream.getvalue().replace("[31m1", "")


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert isinstance(make_output(Terminal()), PlainOutput)


def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_output(Terminal()), PlainOutput)
