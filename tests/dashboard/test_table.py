"""Tables are filtered, then sorted, then cut, and say how many rows there were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remora.dashboard.table import Column, View, table

COLUMNS = (Column("name", "Name"), Column("size", "Size", "bytes"))
rows = st.lists(
    st.fixed_dictionaries(
        {"name": st.text(max_size=5), "size": st.one_of(st.none(), st.integers(), st.floats(allow_nan=False))}
    )
)


@given(rows, st.booleans(), st.integers(0, 5))
def test_rows_are_sorted_and_cut(found: list[dict[str, object]], descending: bool, limit: int) -> None:
    made = table(COLUMNS, found, View(sort="size", descending=descending, limit=limit), left_out=3)
    assert made["total"] == len(found) + 3
    assert len(made["rows"]) == min(limit, len(found))
    known = [row["size"] for row in made["rows"] if row["size"] is not None]
    assert known == sorted(known, reverse=descending)


def test_the_filter_comes_before_the_limit() -> None:
    found = [{"name": f"worker{n}", "size": n} for n in range(1000)]
    made = table(COLUMNS, found, View(words="WORKER 999", limit=10))
    assert [row["name"] for row in made["rows"]] == ["worker999"]
    assert made["total"] == 1


def test_an_order_that_no_column_has_is_ignored() -> None:
    found = [{"name": "b", "size": 1}, {"name": "a", "size": 2}]
    assert table(COLUMNS, found, View(sort="nothing"))["rows"] == found


def test_nonsense_in_an_address_counts_as_nothing_said() -> None:
    view = View.of({"limit": "-1", "sort": "--size", "filter": "x" * 1000})
    assert (view.limit, view.sort, view.descending, len(view.words)) == (200, "size", True, 200)
    assert View.of({"limit": "99999999999"}).limit == 200
    assert View.of({"limit": "٣"}).limit == 200
    assert View.of({"limit": "9999"}).limit == 1000
