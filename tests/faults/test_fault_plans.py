"""Fault plans are values: they print, read back as the same plan, and say what is wrong with one that makes no sense."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.faults.kinds import (
    DEEDS,
    Cut,
    Fault,
    Freeze,
    Heal,
    Kill,
    MessageFault,
    Pair,
    Partition,
    When,
    Which,
)
from remora.faults.plan import Plan
from remora.vocabulary.messages import MessageType

names = st.from_regex(r"[A-Za-z0-9\-_:]{1,8}", fullmatch=True)
somebody = names | st.just("*")
kinds = st.sampled_from(list(MessageType))
times = st.floats(0.0, 1e6, allow_nan=False, allow_subnormal=False)
moments = st.builds(When, at=times) | st.builds(When, after=st.integers(0, 99), kind=st.none() | kinds)
links = st.builds(Pair, somebody, somebody, st.just(True))
lasting = st.none() | times


def counts(each: bool) -> st.SearchStrategy[Which]:
    apart = st.booleans() if each else st.just(False)
    first = st.builds(Which, st.just("first"), st.integers(0, 99), apart)
    return first | st.builds(Which, st.sampled_from(["every", "nth"]), st.integers(1, 99), apart)


@st.composite
def message_faults(draw: st.DrawFn) -> MessageFault:
    deed = draw(st.sampled_from(DEEDS))
    pair = draw(st.builds(Pair, somebody, somebody, st.booleans()))
    seconds = draw(times) if deed == "delay" else 0.0
    return MessageFault(deed, draw(st.none() | kinds), pair, draw(counts(deed == "fail")), draw(st.floats(0, 1)), seconds)


faults: st.SearchStrategy[Fault] = st.one_of(
    message_faults(),
    st.builds(Cut, links, moments, lasting),
    st.builds(Heal, links, moments),
    st.builds(
        Partition,
        st.lists(st.lists(names, min_size=1, max_size=3).map(tuple), min_size=2, max_size=3).map(tuple),
        st.builds(When, at=times),
        lasting,
    ),
    st.builds(Freeze, names, moments, lasting),
    st.builds(Kill, names, moments),
)
plans = st.builds(Plan, st.lists(faults, max_size=5).map(tuple), st.integers(0, 2**63))


@given(plans)
def test_what_is_printed_reads_back_as_the_same_plan(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    "text",
    [
        "drop RREF_FORK_REQUEST a->b 1; delay RREF_USER_DELETE c->b 50ms; cut a-b after 3",
        "fail PYTHON_CALL * 3 each; duplicate * a->* every 2 p=0.25; reorder * *->b #7; corrupt PYTHON_RET a-b",
        "cut a-b at 1s for 500ms; heal a-b at 2s; partition a,b|c at 1.5s for 2s; freeze c after 4 for 3s; kill d; seed 7",
        "kill worker-1 after 2 PYTHON_CALL; cut worker-1<->worker-2",
    ],
)
def test_the_notation_is_short(text: str) -> None:
    assert str(Plan.parse(text)) == text


def test_statements_may_stand_on_lines_of_their_own() -> None:
    assert Plan.parse("\n  drop * a->b\n\n  kill b at 1s\n") == Plan.parse("drop * a->b; kill b at 1s")
    assert Plan.parse("") == Plan()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("drp * *", "'drp' is no deed: choose from fail, delay, drop"),
        ("drop PYTHON_CAL a->b", "'PYTHON_CAL' is not a message type"),
        ("drop PYTHON_CALL", "a pair of workers is missing"),
        ("drop * a->b->c", "'a->b->c' is not a pair of workers"),
        ("cut a-b-c", "may mean several pairs: write a<->b"),
        ("delay * a->b", "a time is missing"),
        ("delay * a->b 5", "'5' is not a time: write 50ms or 2s"),
        ("drop * a->b 1 2", "'2' is not understood"),
        ("drop * a->b #0", "messages are counted from 1"),
        ("drop * a->b 2 each", "`each` goes with fail alone"),
        ("drop * a->b p=1.5", "a chance is from 0 to 1"),
        ("drop * a->b p=x", "'p=x' is not a chance"),
        ("partition a,b", "is not a division into groups"),
        ("partition a|b after 3", "'after' is not understood"),
        ("freeze a>b", "'a>b' is not the name of a worker"),
        ("freeze *", "'*' is not the name of a worker"),
        ("kill * at 1s", "'*' is not the name of a worker"),
        ("cut a-b after -3", "-3 is not a number of messages"),
        ("delay * * 1e999s", "'1e999s' is not a time"),
        ("cut a-b for 1e999ms", "'1e999ms' is not a time"),
        ("seed x", "'x' is not a seed"),
        ("drop * *; kill", "in the fault plan statement 'kill'"),
    ],
)
def test_a_plan_that_makes_no_sense_says_why(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        Plan.parse(text)
    assert problem in str(caught.value)
    assert "in the fault plan statement" in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MessageFault("delay", seconds=float("nan")),
        lambda: MessageFault("delay", seconds=float("inf")),
        lambda: When(at=-1.0),
        lambda: When(at=float("nan")),
        lambda: When(after=-1),
        lambda: When(at=1.0, after=1),
        lambda: Cut(Pair("a", "b", both=True), lasting=-1.0),
        lambda: Partition((("a",), ("b",)), lasting=float("nan")),
        lambda: Partition((("a",), ("b",)), When(after=1)),
        lambda: Freeze("a", lasting=float("inf")),
        lambda: Freeze("*"),
        lambda: Kill("*"),
    ],
)
def test_neither_can_a_fault_be_made_that_would_never_come_or_not_read_back(make: Callable[[], Fault | When]) -> None:
    with pytest.raises(ValueError):
        make()


def test_plans_add_up() -> None:
    assert Plan.parse("drop * a->b; seed 3") + Plan.parse("kill b; seed 4") == Plan.parse("drop * a->b; kill b; seed 3")
    assert not Plan.parse("seed 3")
