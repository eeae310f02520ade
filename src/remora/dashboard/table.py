"""Tables of the pages: rows and typed columns, filtered first, then sorted, then cut, and the number that was left out.

The browser draws any table from this, so a page says what its columns are and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """`kind` says how its values are drawn, and where they lead: "text", "worker", "workers", "call", "function",
    "reference", "pass", "thread", "link", "state", "seconds", "bytes", "count", "rate", "percent", "time", "spark" or
    "bar" (`CELLS` in static/ui.js)."""

    key: str
    label: str
    kind: str = "text"
    narrow: bool = True  # shown on narrow screens, too
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The choice of a reader: words that a row has to have, an order, the number of rows."""

    words: str = ""
    sort: str = ""
    descending: bool = True
    limit: int = 200

    @classmethod
    def of(cls, arguments: Mapping[str, str], limit: int = 200) -> View:
        """From the query of an address. Nonsense counts as nothing said."""
        sort = arguments.get("sort", "")
        asked = whole_number(arguments.get("limit", ""))
        return cls(
            words=arguments.get("filter", "")[:200],
            sort=sort.lstrip("-"),
            descending=sort.startswith("-"),
            limit=limit if asked is None or asked > 9999 else min(asked, 1000),
        )


def whole_number(text: str) -> int | None:
    """Read a whole number out of an address; None if there is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def table(columns: Iterable[Column], rows: Iterable[Row], view: View, *, left_out: int = 0, name: str = "") -> Row:
    """The table as JSON. Rows keep the order they come in unless `view` asks for another."""
    columns = list(columns)
    kept = [row for row in rows if _has(row, view.words)] if view.words else list(rows)
    if view.sort and any(column.key == view.sort for column in columns):
        kept.sort(key=lambda row: _rank(row.get(view.sort)), reverse=view.descending)
    return {
        "name": name,
        "columns": [asdict(column) for column in columns],
        "rows": kept[: view.limit],
        "total": len(kept) + left_out,
        "sort": view.sort,
        "descending": view.descending,
    }


def _has(row: Row, words: str) -> bool:
    text = " ".join(str(value) for value in row.values() if isinstance(value, (str, list))).lower()
    return all(word in text for word in words.lower().split())


def _rank(value: Any) -> tuple[int, Any]:
    """Any two values can be compared: what is not known comes below numbers, and these below texts."""
    if value is None:
        return 0, 0
    if isinstance(value, (int, float)):
        return 1, value
    return 2, str(value).lower()
