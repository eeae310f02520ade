"""A plan at work, without sockets or a clock: who is hit, how often, what is cut when, and what is written down."""

from __future__ import annotations

import pytest

from remora.clock import NEVER
from remora.faults.plan import Plan
from remora.faults.plan_runner import PlanRunner
from remora.transport.fault_link import PASS, Fate
from remora.vocabulary.messages import MessageType

CALL, RET, PING = MessageType.PYTHON_CALL, MessageType.PYTHON_RET, MessageType.PING


def course(text: str, now: float = 0.0) -> PlanRunner:
    return PlanRunner(Plan.parse(text), now)


def hits(text: str, n: int = 6, sender: str = "a", receiver: str = "b", kind: MessageType = CALL) -> list[int]:
    """Which of n messages are dropped, counted from 1."""
    running = course(text)
    return [i for i in range(1, n + 1) if running.leaving(sender, receiver, kind, True, 0.0).copies == 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("drop * *", [1, 2, 3, 4, 5, 6]),
        ("drop * * 2", [1, 2]),
        ("drop * * #3", [3]),
        ("drop * * every 2", [2, 4, 6]),
        ("drop PYTHON_CALL a->b 1", [1]),
        ("drop PYTHON_CALL b->a 1", []),
        ("drop PYTHON_RET a->b 1", []),
        ("drop PYTHON_CALL a-b 1", [1]),
        ("drop PYTHON_CALL b-a 1", [1]),
        ("drop * *->b 1", [1]),
        ("drop * b->*", []),
    ],
)
def test_messages_are_chosen_by_type_pair_and_count(text: str, expected: list[int]) -> None:
    assert hits(text) == expected


def test_each_pair_is_counted_apart() -> None:
    running = course("drop * * 1")
    fates = [running.leaving(*pair, CALL, True, 0.0).copies for pair in (("a", "b"), ("a", "c"), ("b", "a"), ("a", "b"))]
    assert fates == [0, 0, 0, 1]


def test_words_are_hit_only_by_name() -> None:
    assert course("drop * *").leaving("a", "b", PING, False, 0.0) == PASS
    assert course("drop PING *").leaving("a", "b", PING, False, 0.0).copies == 0


def test_what_is_left_to_chance_is_decided_by_the_seed() -> None:
    chosen = {seed: hits(f"drop * * p=0.3; seed {seed}", 200) for seed in (1, 2)}
    assert chosen[1] == hits("drop * * p=0.3; seed 1", 200)
    assert chosen[1] != chosen[2]
    assert 30 < len(chosen[1]) < 90
    assert hits("drop * * p=0; seed 1", 50) == []


def test_chance_does_not_depend_on_what_others_send() -> None:
    busy = course("drop * * p=0.5; seed 5")
    alone = hits("drop * * p=0.5; seed 5", 50)
    found = []
    for i in range(1, 51):
        busy.leaving("x", "y", CALL, True, 0.0)
        if busy.leaving("a", "b", CALL, True, 0.0).copies == 0:
            found.append(i)
    assert found == alone


def test_several_faults_add_up() -> None:
    running = course("duplicate * *; delay * * 10ms; delay * * 5ms; corrupt * *; reorder * *")
    assert running.leaving("a", "b", CALL, True, 0.0) == Fate(copies=2, delay=0.015, damaged=True, swapped=True)
    assert course("duplicate * *; drop * *").leaving("a", "b", CALL, True, 0.0).copies == 0


def test_attempts_fail_by_payload() -> None:
    running = course("fail PYTHON_CALL * 2 each")
    attempts = [running.attempt("a", "b", CALL, payload, 0.0) for payload in (b"x", b"x", b"y", b"x", b"y", b"y")]
    assert attempts == [True, True, True, False, True, False]
    assert running.leaving("a", "b", CALL, True, 0.0) == PASS


def test_a_link_is_cut_after_so_many_messages_either_way() -> None:
    running = course("cut a-b after 3")
    steps = [running.passed(*pair, RET, True, 0.0) for pair in (("a", "b"), ("b", "a"), ("a", "c"), ("a", "b"), ("b", "a"))]
    assert steps == [False, False, False, True, False]
    assert running.severed("a", "b")
    assert running.severed("b", "a")
    assert not running.severed("a", "c")


def test_only_messages_of_that_type_count() -> None:
    running = course("kill b after 2 PYTHON_CALL")
    assert not running.passed("a", "b", RET, True, 0.0)
    assert not running.passed("a", "b", CALL, True, 0.0)
    assert not running.passed("a", "c", CALL, True, 0.0)
    assert running.passed("b", "c", CALL, True, 0.0)
    assert running.killed == {"b"}


def test_words_do_not_count_but_by_name() -> None:
    running = course("cut a-b after 1; kill b after 1 PING")
    assert running.passed("a", "b", PING, False, 0.0)
    assert running.killed == {"b"}
    assert not running.severed("a", "b")


def test_what_was_cut_heals_with_time_or_by_order() -> None:
    running = course("cut a-b for 2s; cut a-c; heal a-c at 3s", 10.0)
    assert running.severed("a", "b")
    assert running.next_time == 12.0
    assert not running.advance(11.9)
    assert running.advance(12.0)
    assert not running.severed("a", "b")
    assert running.severed("a", "c")
    running.advance(13.0)
    assert not running.severed("a", "c")
    assert running.next_time == NEVER


def test_the_last_word_on_a_link_counts() -> None:
    running = course("cut *; heal a-b at 1s; cut a-b at 2s for 1s")
    assert running.severed("b", "a")
    running.advance(1.0)
    assert not running.severed("a", "b")
    assert running.severed("a", "c")
    running.advance(2.0)
    assert running.severed("a", "b")
    running.advance(3.0)
    assert not running.severed("a", "b")


def test_a_partition_separates_groups_and_nobody_else() -> None:
    running = course("partition a,b|c at 1s for 1s")
    assert not running.severed("a", "c")
    running.advance(1.0)
    separated = [pair for pair in ("ab", "ac", "bc", "ad", "cd") if running.severed(*pair)]
    assert separated == ["ac", "bc"]
    running.advance(2.0)
    assert not running.severed("a", "c")


def test_a_frozen_worker_thaws() -> None:
    running = course("freeze b at 1s for 2s")
    running.advance(1.0)
    assert running.frozen == {"b": 3.0}
    running.advance(3.0)
    assert not running.frozen


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("freeze b for 5s; freeze b at 1s for 1s", 5.0),
        ("freeze b at 1s for 1s; freeze b for 5s", 5.0),
        ("freeze b for 2s; freeze b at 1s for 3s", 4.0),
        ("freeze b for 1s; freeze b at 500ms", NEVER),
        ("freeze b; freeze b at 1s for 1s", NEVER),
    ],
)
def test_who_is_frozen_twice_thaws_when_the_last_of_them_is_over(text: str, until: float) -> None:
    running = course(text)
    for now in (0.5, 1.0, 2.0, 3.0, 3.5):
        running.advance(now)
        assert running.frozen, now
    assert running.frozen == {"b": until}
    running.advance(10.0)
    assert bool(running.frozen) is (until == NEVER)
    assert [record.deed for record in running.records].count("thaw") == (until != NEVER)


def test_who_was_healed_before_its_time_is_not_healed_again() -> None:
    running = course("freeze b for 5s; cut a-b for 5s; freeze b after 1 for 5s")
    running.heal(1.0)
    running.passed("a", "b", CALL, True, 3.0)
    running.advance(5.0)
    assert running.frozen == {"b": 8.0}
    running.advance(8.0)
    assert [record.deed for record in running.records] == ["freeze", "cut", "heal", "freeze", "thaw"]


def test_everything_can_be_healed_at_once() -> None:
    running = course("cut a-b; freeze c")
    running.heal(1.0)
    assert not running.severed("a", "b")
    assert not running.frozen


def test_what_was_done_is_written_down() -> None:
    running = course("drop PYTHON_CALL a->b #2; cut a-b after 1 PYTHON_RET for 1s")
    for _ in range(3):
        running.leaving("a", "b", CALL, True, 0.5)
    running.passed("b", "a", RET, True, 1.0)
    running.advance(2.0)
    assert [str(record).split(maxsplit=2)[2] for record in running.records] == [
        "drop PYTHON_CALL a->b #2",
        "cut a-b",
        "heal a-b",
    ]
    assert running.records[0].at == 0.5
