"""Prints lines and tables: by rich where that is installed and a terminal is there, else as plain aligned text.

Every text is cleaned here (`text.clean`), whatever it came from. Colours obey NO_COLOR.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from remora.command.text import clean


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column. Numbers stand at the right."""

    head: str
    right: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts. A row may have a style: "bad" or "faint"."""

    columns: Sequence[Column]
    rows: list[Sequence[str]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)

    def add(self, *cells: str, style: str = "") -> None:
        self.rows.append([clean(cell) for cell in cells])
        self.styles.append(style)

    def used(self) -> list[int]:
        """The columns that have anything in them: the others need no room."""
        return [n for n, _ in enumerate(self.columns) if any(row[n] for row in self.rows)]


class Output(Protocol):
    """The terminal, file or pipe that a verb prints to."""

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line. Styles: "bad", "good", "head", "faint"."""

    def table(self, table: Table) -> None:
        """Print a table without its empty columns."""

    def clear(self) -> None:
        """Begin a new picture in the place of the last one."""


class PlainOutput:
    """Aligned text, without a colour."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._shown = False

    def line(self, text: str = "", style: str = "") -> None:
        self._print(clean(text))

    def table(self, table: Table) -> None:
        used = table.used()
        heads = [table.columns[n].head for n in used]
        rows = [[row[n] for n in used] for row in table.rows]
        widths = [max(len(row[n]) for row in [heads, *rows]) for n, _ in enumerate(used)]
        for row in [heads, *rows]:
            cells = [
                cell.rjust(width) if table.columns[n].right else cell.ljust(width)
                for n, cell, width in zip(used, row, widths, strict=True)
            ]
            self._print("  ".join(cells).rstrip())

    def clear(self) -> None:
        if self._shown:
            self._print("\x1b[H\x1b[2J" if self._stream.isatty() else "")
        self._shown = True

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class RichOutput:
    """Colours, and tables that fit the terminal."""

    STYLES = {"bad": "bold red", "good": "green", "head": "bold", "faint": "dim", "": ""}

    def __init__(self, stream: Any) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)

    def line(self, text: str = "", style: str = "") -> None:
        self._console.print(clean(text), style=self.STYLES[style] or None, markup=False, emoji=False, soft_wrap=True)

    def table(self, table: Table) -> None:
        from rich.table import Table as RichTable
        from rich.text import Text

        drawn = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
        used = table.used()
        for n in used:
            column = table.columns[n]
            drawn.add_column(column.head, justify="right" if column.right else "left", overflow="fold")
        for row, style in zip(table.rows, table.styles, strict=True):
            drawn.add_row(*(Text(row[n]) for n in used), style=self.STYLES[style] or None)
        self._console.print(drawn)

    def clear(self) -> None:
        self._console.clear()


def make_output(stream: Any = None) -> Output:
    """The best that there is for a stream: standard output if none is named."""
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        try:
            return RichOutput(stream)
        except ImportError:
            pass
    return PlainOutput(stream)


def lines(output: Output, texts: Iterable[str], style: str = "") -> None:
    """Print several lines."""
    for text in texts:
        output.line(text, style)
