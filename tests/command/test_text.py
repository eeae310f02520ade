"""Times, sizes and untrusted names as a terminal shows them."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as some

from remora.command.text import clean, counted, duration, seconds_of, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.0, "0 µs"),
        (27e-6, "27 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 m 00 s"),
        (245, "4 m 05 s"),
        (3599.7, "1 h 00 m"),
        (7300, "2 h 01 m"),
        (273600, "3 d 4 h"),
        (-2.0, "-2.0 s"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, ""), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes(count: int | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("200ms", 0.2), ("5s", 5.0), ("1.5m", 90.0), ("2h", 7200.0)])
def test_times_that_are_given(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5", "5 minutes", "1e3", "nan", "5s5"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        seconds_of(text)


def test_counts() -> None:
    assert [counted(1, "call"), counted(2500, "call"), counted(0, "child", "children")] == [
        "1 call",
        "2,500 calls",
        "0 children",
    ]


@pytest.mark.parametrize("bad", ["\x1b[2J", "a\nb", "\x07", "\x9b31m", "\u202egnp.exe", "\u2028", "\r", "\ud800"])
def test_nothing_that_a_terminal_obeys_is_left(bad: str) -> None:
    assert "\N{REPLACEMENT CHARACTER}" in clean(bad)


@given(some.text())
def test_clean_text_is_printable(text: str) -> None:
    cleaned = clean(text)
    assert len(cleaned) == len(text)
    assert not {unicodedata.category(c) for c in cleaned} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_names_of_people_stay() -> None:
    assert clean("worker-ü 日本 é") == "worker-ü 日本 é"
