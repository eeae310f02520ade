"""The tables of `remora top`: which columns each has, and its rows out of a snapshot. Knows nothing of terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from remora.command.rates import History
from remora.command.text import clean, duration, size
from remora.command.verbs.calls_verb import whole_calls
from remora.observer.model import GroupSnapshot


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of a cell, and the value to sort it by."""

    text: str
    value: float | str


@dataclass(frozen=True, slots=True)
class Row:
    """`key` is the same in the next snapshot; `worker` is whose stacks it leads to."""

    key: str
    worker: str
    cells: tuple[Cell, ...]
    bad: bool = False

    def has(self, text: str) -> bool:
        """True if the text stands in any of its cells."""
        return any(text.lower() in cell.text.lower() for cell in self.cells)


@dataclass(frozen=True, slots=True)
class View:
    """One table. `first` is the column that it is sorted by at first."""

    title: str
    columns: tuple[str, ...]
    rows: Callable[[GroupSnapshot, History], list[Row]]
    first: int

    def sorted_rows(self, group: GroupSnapshot, history: History, column: int, reverse: bool, text: str) -> list[Row]:
        """Those that have the text, in order: numbers from the largest on, texts by the alphabet, unless reversed."""
        found = [row for row in self.rows(group, history) if row.has(text)]
        found.sort(key=lambda row: row.key)
        numbers = any(isinstance(row.cells[column].value, float) for row in found)
        found.sort(key=lambda row: _comparable(row.cells[column].value), reverse=numbers != reverse)
        return found


def _comparable(value: float | str) -> tuple[float, str]:
    return (value, "") if isinstance(value, float) else (0.0, value)


def _text(text: str | None) -> Cell:
    return Cell(clean(text or ""), clean(text or ""))


def _number(value: float | None, shown: str | None = None) -> Cell:
    if value is None:
        return Cell("", -1.0)
    return Cell(f"{value:,.0f}" if shown is None else shown, float(value))


def _workers(group: GroupSnapshot, history: History) -> list[Row]:
    rows = []
    for worker in group.workers:
        rate = history.rate(worker.name)
        oldest = max((call.age for call in worker.calls), default=None)
        cells = (
            _text(worker.name),
            _text("alive"),
            _number(worker.pool.running, f"{worker.pool.running}/{worker.pool.limit}"),
            _number(worker.pool.queued),
            _number(rate),
            _text(history.bars(worker.name)),
            _number(worker.calls_failed),
            _number(oldest, duration(oldest)),
            _number(worker.memory.resident, size(worker.memory.resident)),
            _number(worker.cpu, duration(worker.cpu)),
            _text(worker.host),
        )
        rows.append(Row(worker.name, worker.name, cells))
    for missing in group.missing:
        nothing = [_number(None)] * 3 + [_text("")] + [_number(None)] * 4
        state = f"{missing.state}: {missing.reason}" if missing.reason else missing.state
        row = (_text(missing.name), _text(state), *nothing, _text(missing.host))
        rows.append(Row(f"missing {missing.name}", missing.name, row, bad=missing.state != "left"))
    return rows


def _calls(group: GroupSnapshot, history: History) -> list[Row]:
    return [
        Row(
            str(whole.best.key),
            whole.best.callee,
            (
                _text(str(whole.best.key)),
                _text(whole.best.key.caller),
                _text(whole.best.callee),
                _text(whole.function),
                _text(whole.best.stage),
                _number(whole.age, duration(whole.age)),
                _number(whole.best.left, duration(whole.best.left)),
                _number(whole.best.bytes, size(whole.best.bytes)),
            ),
        )
        for whole in whole_calls(group)
    ]


def _links(group: GroupSnapshot, history: History) -> Iterable[Row]:
    return [
        Row(
            f"{worker.name} {link.peer}",
            link.peer,
            (
                _text(worker.name),
                _text(link.peer),
                _text(link.state + (", paused" if link.paused else "")),
                _text(link.transport),
                _number(link.bytes_sent, size(link.bytes_sent)),
                _number(link.bytes_received, size(link.bytes_received)),
                _number(link.queued_messages),
                _number(link.round_trip, duration(link.round_trip)),
                _number(link.reconnects),
                _text(link.reason),
            ),
            bad=link.state != "alive",
        )
        for worker in group.workers
        for link in worker.links
    ]


WORKERS = View(
    "Workers",
    ("Worker", "State", "Running", "Queued", "Calls/s", "", "Failed", "Oldest call", "Memory", "CPU", "Host"),
    _workers,
    first=0,
)
CALLS = View("Calls", ("Call", "From", "To", "Function", "Stage", "Age", "Left", "Bytes"), _calls, first=5)
LINKS = View(
    "Links",
    ("From", "To", "State", "By", "Sent", "Received", "Unacked", "Round trip", "Broke", "Why"),
    lambda group, history: list(_links(group, history)),
    first=7,
)
VIEWS = (WORKERS, CALLS, LINKS)
