"""The ends of calls travel as rows, and come out as they went in; nonsense is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.observer.model import CallKey, EventKind
from remora.observer.trace_rows import Rows, notes, operators
from remora.recorder import MADE, SERVED

FAILED = 1
ENDS: list[Any] = [
    (MADE, "worker1", 7, "m", "f", 0.0, 10.0, 12.5, 99, 0, 0, (60.0, "worker2", 3)),
    (MADE, "worker1", 8, None, "add", 0.0, 11.0, 11.5, 99, FAILED | 8, 0, None),
    (SERVED, "worker2", 3, "m", "g", 9.0, 9.5, 13.0, 98, 2, 400, None),
]


def test_the_ends_of_calls_come_out_as_they_went_in() -> None:
    rows = Rows.from_json(json.loads(json.dumps(Rows.of(ENDS, FAILED, 1000.0).to_json())))
    first, second, third = rows.events("worker0")
    assert (first.kind, first.call, first.function) == (EventKind.CALL_ENDED, CallKey(caller="worker0", id=7), "m.f")
    assert (first.time, first.seconds, first.thread) == (1012.5, 2.5, 99)
    assert first.parent == CallKey(caller="worker2", id=3)
    assert (second.kind, second.function, second.parent) == (EventKind.CALL_FAILED, "add", None)
    assert (third.kind, third.call) == (EventKind.RUN_ENDED, CallKey(caller="worker2", id=3))
    assert (third.time, third.seconds, third.bytes) == (1013.0, 3.5, 400)
    assert len(rows.texts) == len(set(rows.texts))


def test_a_span_of_the_program_alone_is_no_parent() -> None:
    """What a call outside of any served call has in the place of one, where OpenTelemetry is used."""
    ends: list[Any] = [(MADE, "worker1", 7, "m", "f", 0.0, 1.0, 2.0, 9, 0, 0, (60.0, "", 0, "00-1-2-01"))]
    assert Rows.of(ends, FAILED, 0.0).events("worker0")[0].parent is None


def test_notes_come_out_as_they_went_in() -> None:
    (event,) = notes([[12.5, "died", "worker1", "its process ended"]])
    assert (event.time, event.kind, event.peer) == (12.5, EventKind.DIED, "worker1")
    for wrong in ([12, "died", None, ""], [1.0, "dined", None, ""], [1.0, "died", 3, ""], [1.0, "died", None, None], []):
        with pytest.raises(ValueError):
            notes([wrong])


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=11) | st.dictionaries(st.sampled_from(["texts", "rows", "lost"]), inner),
    max_leaves=30,
)


@given(values)
def test_what_is_no_answer_is_refused_or_read(data: Any) -> None:
    for read in (lambda: Rows.from_json(data).events("w"), lambda: operators(data, {}, {}), lambda: notes(data)):
        try:
            read()
        except ValueError:
            pass


@pytest.mark.parametrize("place", range(11))
def test_each_number_of_a_row_is_checked(place: int) -> None:
    data = Rows.of(ENDS, FAILED, 0.0).to_json()
    for wrong in ("1", 1.5, None, 1 << 70, True):
        row = list(data["rows"][0])
        row[place] = wrong
        with pytest.raises(ValueError):
            Rows.from_json({**data, "rows": [row]})
