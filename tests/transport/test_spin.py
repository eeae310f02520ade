"""Looking for a reply before sleeping on it: only while that pays."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import pytest

from remora.transport import spin
from remora.transport.spin import INTERRUPTION, MOST_RESTS, Spin

MOMENT = 150e-6


class Clock:
    """Counts how often somebody looked at it, and goes on by a tenth of a moment each time."""

    def __init__(self) -> None:
        self.looks = 0
        self.now = 0.0
        self.step = MOMENT / 10

    def monotonic(self) -> float:
        self.looks += 1
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spin, "time", clock)
    monkeypatch.setattr(spin, "MOMENT", MOMENT)
    return clock


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


Pair = tuple[socket.socket, socket.socket]


def test_what_is_there_is_seen(pair: Pair, clock: Clock) -> None:
    pair[1].send(b"x")
    eager = Spin(pair[0].fileno())
    assert all(eager.watch() for _ in range(10))


def test_the_end_is_seen_too(pair: Pair, clock: Clock) -> None:
    pair[1].close()
    assert Spin(pair[0].fileno()).watch()


def test_whoever_looks_makes_way_for_others_all_the_time(
    pair: Pair, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the one who would answer may wait for this very processor until the look is over."""
    said = []

    def make_way() -> None:
        said.append(clock.now)
        if len(said) == 3:
            pair[1].send(b"x")

    monkeypatch.setattr(spin, "make_way", make_way)
    eager = Spin(pair[0].fileno())
    assert eager.watch()
    assert len(said) == 3, "what came meanwhile is seen at once"
    assert said[-1] < MOMENT
    assert eager.watch()
    assert len(said) == 3, "nobody need make way for what is there"


def test_looking_ends_after_a_moment(pair: Pair, clock: Clock) -> None:
    assert not Spin(pair[0].fileno()).watch()
    assert 10 <= clock.looks <= 13


def test_it_is_tried_more_and_more_rarely_while_it_is_in_vain(pair: Pair, clock: Clock) -> None:
    eager = Spin(pair[0].fileno())
    tried = []
    for i in range(4 * MOST_RESTS):
        before = clock.looks
        assert not eager.watch()
        if clock.looks > before:
            tried.append(i)
    gaps = [after - before - 1 for before, after in itertools.pairwise(tried)]
    assert gaps == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256][: len(gaps)]
    assert len(gaps) >= 9


def test_and_again_as_soon_as_it_pays(pair: Pair, clock: Clock) -> None:
    eager = Spin(pair[0].fileno())
    for _ in range(1 + 1 + 1):  # in vain; a rest; in vain
        assert not eager.watch()
    pair[1].send(b"x")
    assert [eager.watch() for _ in range(4)] == [False, False, True, True]
    pair[0].recv(1)
    assert [eager.watch(), eager.watch()] == [False, False]
    pair[1].send(b"x")
    assert eager.watch(), "one rest, as at the beginning"


def test_it_forgets_what_was_in_vain_little_by_little(pair: Pair, clock: Clock) -> None:
    eager = Spin(pair[0].fileno())
    for _ in range(1 + 1 + 1 + 2 + 1):  # in vain, and rests in between: next time it would be four
        assert not eager.watch()
    pair[1].send(b"x")
    assert [eager.watch() for _ in range(5)] == [False] * 4 + [True]
    pair[0].recv(1)
    assert not eager.watch()  # in vain
    pair[1].send(b"x")
    assert [eager.watch() for _ in range(5)] == [False] * 4 + [True], "half of eight"


@pytest.mark.parametrize("found", [True, False])
def test_whoever_was_interrupted_for_long_rests_for_long_though_it_found_something(
    pair: Pair, clock: Clock, found: bool
) -> None:
    eager = Spin(pair[0].fileno())
    if found:
        pair[1].send(b"x")
    clock.step = 2 * INTERRUPTION
    assert eager.watch() is found
    clock.step = MOMENT / 10
    if not found:
        pair[1].send(b"x")
    assert [eager.watch() for _ in range(MOST_RESTS + 2)] == [False] * MOST_RESTS + [True, True]
