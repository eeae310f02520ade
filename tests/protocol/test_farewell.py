"""The farewell of a worker never overtakes its answers: every interleaving of a small world, and how long is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from remora.protocol.member_rules import Farewell, Parting, on_farewell

Rule = Callable[[bool, bool, bool], Parting]
FAREWELL = -1
CALLS = 2
BREAKS = 2


@dataclass(frozen=True)
class Pair:
    """A caller, and a worker that leaves. `answers` is what the session of the caller's calls still has to bring, over one
    link or another; `news` is the other channel, on which the leaving worker calls."""

    asked: tuple[int, ...] = ()  # calls that wait at the worker
    unasked: int = CALLS
    answers: tuple[int, ...] = ()
    news: tuple[int, ...] = ()
    waiting: frozenset[int] = frozenset()  # calls of the caller without an outcome
    promised: frozenset[int] = frozenset()  # answered before the farewell
    failed: frozenset[int] = frozenset()
    said_behind_answers: bool = False
    said_on_news: bool = False
    leaving: bool = False  # as the caller knows
    linked: bool = True
    dialling: bool = False
    breaks: int = BREAKS
    over: bool = False


def steps(pair: Pair, rule: Rule) -> Iterator[Pair]:
    """What may happen next."""
    if pair.over:
        return
    if pair.unasked:
        call = pair.unasked
        yield replace(pair, unasked=call - 1, asked=(*pair.asked, call), waiting=pair.waiting | {call})
    for call in pair.asked:
        promised = pair.promised if pair.said_behind_answers else pair.promised | {call}
        asked = tuple(each for each in pair.asked if each != call)
        yield replace(pair, asked=asked, answers=(*pair.answers, call), promised=promised)
    if not pair.said_behind_answers:
        yield replace(pair, said_behind_answers=True, answers=(*pair.answers, FAREWELL))
    if not pair.said_on_news:
        yield replace(pair, said_on_news=True, news=(FAREWELL,))
    if pair.breaks and pair.linked:
        broken = replace(pair, linked=False, breaks=pair.breaks - 1)
        # What `PeerManager.lost` does: a worker that leaves is dialled again only for its answers.
        yield hang_up(broken) if pair.leaving and not pair.waiting else replace(broken, dialling=True)
    if pair.dialling:
        yield replace(pair, dialling=False, linked=True)
    if pair.news:
        yield notify(replace(pair, news=()), False, rule)
    if pair.linked and pair.answers:
        first, rest = pair.answers[0], pair.answers[1:]
        after = replace(pair, answers=rest)
        yield notify(after, True, rule) if first == FAREWELL else replace(after, waiting=pair.waiting - {first})


def notify(pair: Pair, behind_answers: bool, rule: Rule) -> Pair:
    pair = replace(pair, leaving=True)
    match rule(behind_answers, bool(pair.waiting), pair.linked):
        case Parting.HANG_UP:
            return hang_up(pair)
        case Parting.REDIAL:
            return replace(pair, dialling=True)
        case Parting.AWAIT_ANSWERS:
            return pair


def hang_up(pair: Pair) -> Pair:
    return replace(pair, over=True, failed=pair.waiting, waiting=frozenset())


def explore(rule: Rule) -> int:
    """Walk every interleaving; how many states there are."""
    seen, todo = {Pair()}, [Pair()]
    while todo:
        pair = todo.pop()
        assert not pair.failed & pair.promised, f"F1: an answer was overtaken: {pair}"
        following = list(steps(pair, rule))
        assert following or pair.over, f"F2: the caller never hangs up: {pair}"
        new = [each for each in following if each not in seen]
        seen.update(new)
        todo += new
    return len(seen)


def test_no_answer_is_overtaken_and_every_caller_hangs_up() -> None:
    assert explore(on_farewell) > 300


MUTANTS: dict[str, Rule] = {
    "hang up at the first farewell": lambda behind, wait, linked: Parting.HANG_UP,
    "hang up where there is no link": lambda behind, wait, linked: (
        Parting.AWAIT_ANSWERS if linked and not behind else Parting.HANG_UP
    ),
    "never hang up behind the answers": lambda behind, wait, linked: (
        Parting.AWAIT_ANSWERS if wait or linked or behind else Parting.HANG_UP
    ),
    "trust the other channel": lambda behind, wait, linked: Parting.AWAIT_ANSWERS if behind else Parting.HANG_UP,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_of_the_rule_is_found(mutant: str) -> None:
    with pytest.raises(AssertionError, match=r"F[12]"):
        explore(MUTANTS[mutant])


def looks(*seen: tuple[float, bool, int]) -> list[bool]:
    farewell = Farewell(0.0, patience=5.0, return_within=1.0)
    return [farewell.waits(linked, unheard, now) for now, linked, unheard in seen]


def test_a_peer_that_takes_something_is_waited_for() -> None:
    assert looks((0.0, True, 9), (4.9, True, 8), (9.8, True, 7), (14.7, True, 7), (14.9, True, 7)) == [
        True, True, True, True, False,
    ]  # fmt: skip


def test_one_that_has_hung_up_is_not() -> None:
    assert looks((0.0, True, 3), (0.1, False, 0)) == [True, False]


def test_one_whose_link_broke_may_come_back_soon() -> None:
    assert looks((0.0, True, 3), (4.0, False, 3), (4.9, False, 3), (5.0, False, 3)) == [True, True, True, False]
    assert looks((0.0, True, 3), (4.0, False, 3), (4.9, True, 3), (9.8, True, 3)) == [True] * 4
