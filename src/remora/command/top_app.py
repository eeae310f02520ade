"""The screen of `remora top`, by Textual. Snapshots are asked for on another thread: a silent worker delays no key."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static, TabbedContent, TabPane

from remora.command.arguments import partial_answer, troubles
from remora.command.output import Table
from remora.command.rates import History
from remora.command.text import clean, counted
from remora.command.verbs.stack_verb import show_stacks
from remora.command.views import VIEWS, Row, View
from remora.errors import RemoraError
from remora.observer.model import GroupSnapshot

Source = Callable[[bool], GroupSnapshot]
"""Takes a snapshot; True: with the stacks of all threads."""


class _Lines:
    """An `Output` that keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str = "", style: str = "") -> None:
        self.lines.append(clean(text))

    def table(self, table: Table) -> None:
        self.lines += ["  ".join(row) for row in table.rows]

    def clear(self) -> None:
        self.lines.clear()


class StackScreen(ModalScreen[None]):
    """The stacks of one worker."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter", "dismiss", "Back")]
    CSS = "StackScreen { align: center middle; } #stacks { width: 95%; height: 90%; border: round $accent; padding: 0 1; }"

    def __init__(self, worker: str, lines: list[str]) -> None:
        super().__init__()
        self._worker = worker
        self._lines = lines

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="stacks") as box:
            box.border_title = f"stacks of {clean(self._worker)} (Esc: back)"
            yield Static(Text("\n".join(self._lines)))


class TopApp(App[None]):
    """Workers, calls and links, again and again."""

    CSS = """
    #summary { height: 1; }
    #trouble { height: auto; color: $error; }
    #rates { height: 3; }
    #filter { display: none; }
    #filter.shown { display: block; }
    Screen { overflow: hidden; }
    TabbedContent, TabPane, DataTable { height: 1fr; }
    TabPane { padding: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("1", "view('workers')", "Workers"),
        ("2", "view('calls')", "Calls"),
        ("3", "view('links')", "Links"),
        ("s", "sort", "Sort"),
        ("r", "reverse", "Reverse"),
        ("slash", "filter", "Filter"),
        ("enter", "stack", "Stack"),
        ("p", "pause", "Pause"),
        ("q", "quit", "Quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, source: Source, interval: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._interval = interval
        self._history = History()
        self._snapshot: GroupSnapshot | None = None
        self._order = {view.title: (view.first, False) for view in VIEWS}
        self._filter = ""
        self._paused = False
        self._asking = False
        self._wanted: str | None = None  # the worker whose stacks are to be shown

    def compose(self) -> ComposeResult:
        yield Static("asking …", id="summary")
        yield Static("", id="trouble")
        yield Sparkline([], id="rates", summary_function=max)
        with TabbedContent(initial="workers"):
            for view in VIEWS:
                with TabPane(view.title, id=view.title.lower()):
                    yield DataTable(id=f"table-{view.title.lower()}", cursor_type="row", zebra_stripes=True)
        yield Input(placeholder="only rows with this text (Enter: done, Esc: all)", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self._table().focus()
        self.set_interval(self._interval, self._look)
        self._look()

    # Snapshots: one at a time is under way. All of this but `_ask` runs on the thread of the screen.

    def _look(self) -> None:
        if self._asking or (self._paused and self._wanted is None):
            return
        self._asking = True
        self._ask(self._wanted)

    @work(thread=True)
    def _ask(self, worker: str | None) -> None:
        try:
            snapshot = self._source(worker is not None)
        except RemoraError as error:
            self.call_from_thread(self._failed, str(error))
        else:
            self.call_from_thread(self._take, snapshot, worker)

    def _failed(self, text: str) -> None:
        self._asking, self._wanted = False, None
        for trouble in self.screen_stack[0].query("#trouble").results(Static):
            trouble.update(Text(clean(text)))

    def _take(self, snapshot: GroupSnapshot, worker: str | None) -> None:
        self._asking = False
        if worker is None:
            self._snapshot = snapshot
            self._history.add(snapshot)
            self._draw()
        else:
            self._wanted = None
            self._open(snapshot, worker)
        if self._wanted is not None:
            self._look()

    def _open(self, snapshot: GroupSnapshot, worker: str) -> None:
        lines = _Lines()
        show_stacks(snapshot, lines, worker, everything=False)
        self.push_screen(StackScreen(worker, lines.lines or [f"{clean(worker)} gives no stacks"]))

    # Drawing.

    @property
    def view(self) -> View:
        """The one that is shown."""
        active = self.query_one(TabbedContent).active
        return next(view for view in VIEWS if view.title.lower() == active)

    def _table(self) -> DataTable[Text]:
        table: DataTable[Text] = self.query_one(f"#table-{self.view.title.lower()}", DataTable)
        return table

    def rows(self) -> list[Row]:
        """The rows that the table shows now."""
        if self._snapshot is None:
            return []
        column, reverse = self._order[self.view.title]
        return self.view.sorted_rows(self._snapshot, self._history, column, reverse, self._filter)

    def _draw(self) -> None:
        if self._snapshot is None or not self.query("#summary"):  # other things are on the screen, or nothing is any more
            return
        self._draw_summary(self._snapshot)
        table, rows = self._table(), self.rows()
        row, scrolled = table.cursor_row, table.scroll_offset
        column, reverse = self._order[self.view.title]
        table.clear(columns=True)
        for n, head in enumerate(self.view.columns):
            mark = (" ▲" if reverse else " ▼") if n == column else ""
            table.add_column(Text(head + mark, style="bold"))
        for each in rows:
            table.add_row(*(Text(cell.text, style="red" if each.bad else "") for cell in each.cells), key=each.key)
        if rows:
            table.move_cursor(row=min(row, len(rows) - 1), scroll=False)
            table.scroll_to(*scrolled, animate=False)

    def _draw_summary(self, snapshot: GroupSnapshot) -> None:
        rates = list(self._history.total)
        calls = len({call.key for worker in snapshot.workers for call in worker.calls})
        text = f"group {clean(snapshot.group[:8])}   {counted(len(snapshot.workers), 'worker')}   "
        text += f"{calls:,} under way   " + (f"{rates[-1]:,.0f} calls/s   " if rates else "")
        text += time.strftime("%H:%M:%S", time.localtime(snapshot.time)) + ("   paused" if self._paused else "")
        text += f"   filter: {self._filter}" if self._filter else ""
        self.query_one("#summary", Static).update(Text(text))
        told = partial_answer(snapshot) if troubles(snapshot) else ""
        self.query_one("#trouble", Static).update(Text(clean(told)))
        self.query_one("#rates", Sparkline).data = rates

    # Keys.

    def action_view(self, name: str) -> None:
        self.query_one(TabbedContent).active = name

    def on_tabbed_content_tab_activated(self) -> None:
        self._draw()
        self._table().focus()

    def action_sort(self) -> None:
        column, _ = self._order[self.view.title]
        self._order[self.view.title] = (column + 1) % len(self.view.columns), False
        self._draw()

    def action_reverse(self) -> None:
        column, reverse = self._order[self.view.title]
        self._order[self.view.title] = column, not reverse
        self._draw()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._draw()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value.strip()
        self._draw()

    def on_input_submitted(self) -> None:
        self._leave_filter()

    def key_escape(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._leave_filter()

    def _leave_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("shown")
        self._table().focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        found = next((row for row in self.rows() if row.key == event.row_key.value), None)
        if found is not None:
            self._wanted = found.worker
            self._look()
