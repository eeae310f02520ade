"""Fault plans: values that print, and read back as the same plan. They do nothing.

    drop RREF_FORK_REQUEST a->b 1; delay RREF_USER_DELETE c->b 50ms; cut a-b after 3

The notation:

    fail|drop|duplicate|reorder|corrupt  TYPE  PAIR  [COUNT [each]]  [p=CHANCE]
    delay                                TYPE  PAIR  TIME  [COUNT]   [p=CHANCE]
    cut        LINK             [at TIME | after N [TYPE]]  [for TIME]
    heal       LINK             [at TIME | after N [TYPE]]
    partition  a,b|c,d          [at TIME]                   [for TIME]
    freeze     WORKER           [at TIME | after N [TYPE]]  [for TIME]
    kill       WORKER           [at TIME | after N [TYPE]]
    seed       N

TYPE is the name of a message type, or `*`. PAIR is `a->b`, `a-b` (either way; `a<->b` where names have dashes), `*->b`,
or `*`. COUNT is `3` (the first three), `#3` (the third), `every` (what is meant if nothing is said) or `every 3`. TIME is
`50ms` or `2s`. Statements end at `;` or at the end of the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from remora.faults.kinds import (
    ANY,
    DEEDS,
    Cut,
    Deed,
    Event,
    Fault,
    Freeze,
    Heal,
    Kill,
    MessageFault,
    Pair,
    Partition,
    When,
    Which,
    WorkerFault,
)
from remora.vocabulary.messages import MessageType

_NAME = re.compile(r"[A-Za-z0-9\-_:]+|\*")
_TIME = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)(ms|s)")


@dataclass(frozen=True)
class Plan:
    """A list of faults to inject. `seed` decides what is left to chance: the same messages, the same fate."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def __add__(self, other: Plan) -> Plan:
        """Both; the seed is that of the first."""
        return Plan(self.faults + other.faults, self.seed)

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __str__(self) -> str:
        statements = [_write_fault(fault) for fault in self.faults]
        return "; ".join(statements + ([f"seed {self.seed}"] if self.seed else []))

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan that a text means; ValueError says what is wrong with it, and where."""
        faults: list[Fault] = []
        seed = 0
        for statement in re.split(r"[;\n]", text):
            words = _Words(statement)
            if not words.left:
                continue
            verb = words.next("a deed")
            if verb == "seed":
                seed = words.number("a seed")
            elif verb in _READERS:
                faults.append(_READERS[verb](words))
            else:
                raise words.wrong(f"{verb!r} is no deed: choose from {', '.join((*_READERS, 'seed'))}")
            if words.left:
                raise words.wrong(f"{words.left[0]!r} is not understood")
        return Plan(tuple(faults), seed)


class _Words:
    """The words of one statement, read one after the other."""

    def __init__(self, statement: str) -> None:
        self.statement = statement.strip()
        self.left = self.statement.split()

    def wrong(self, problem: str) -> ValueError:
        return ValueError(f"{problem}, in the fault plan statement {self.statement!r}")

    def next(self, wanted: str) -> str:
        if not self.left:
            raise self.wrong(f"{wanted} is missing")
        return self.left.pop(0)

    def take(self, word: str) -> bool:
        """Read the next word if it is this one, and return True then."""
        if self.left and self.left[0] == word:
            del self.left[0]
            return True
        return False

    def number(self, wanted: str) -> int:
        word = self.next(wanted)
        try:
            return int(word)
        except ValueError:
            raise self.wrong(f"{word!r} is not {wanted}") from None

    def seconds(self) -> float:
        word = self.next("a time")
        match = _TIME.fullmatch(word)
        seconds = inf if match is None else float(match[1]) / (1000.0 if match[2] == "ms" else 1.0)
        if seconds == inf:
            raise self.wrong(f"{word!r} is not a time: write 50ms or 2s")
        return seconds

    def kind(self) -> MessageType | None:
        word = self.next("a message type")
        if word == ANY:
            return None
        try:
            return MessageType[word]
        except KeyError:
            raise self.wrong(f"{word!r} is not a message type") from None

    def name(self) -> str:
        word = self.next("a worker")
        if not _NAME.fullmatch(word) or word == ANY:
            raise self.wrong(f"{word!r} is not the name of a worker")
        return word

    def pair(self) -> Pair:
        word = self.next("a pair of workers")
        if word == ANY:
            return Pair()
        sender, receiver, both = self._split(word)
        if not _NAME.fullmatch(sender) or not _NAME.fullmatch(receiver):
            raise self.wrong(f"{word!r} is not a pair of workers: write a->b, a-b, *->b or *")
        return Pair(sender, receiver, both)

    def _split(self, word: str) -> tuple[str, str, bool]:
        for arrow, both in (("<->", True), ("->", False)):
            if arrow in word:
                sender, _, receiver = word.rpartition(arrow)  # `>` is in no name, so there is one arrow at most
                return sender, receiver, both
        if word.count("-") > 1:
            raise self.wrong(f"{word!r} may mean several pairs: write a<->b")
        sender, _, receiver = word.partition("-")
        return sender, receiver, True


def _message_fault(deed: Deed, words: _Words) -> MessageFault:
    kind, pair = words.kind(), words.pair()
    seconds = words.seconds() if deed == "delay" else 0.0
    which = _which(words)
    chance = 1.0
    if words.left and words.left[0].startswith("p="):
        word = words.next("a chance")
        try:
            chance = float(word[2:])
        except ValueError:
            raise words.wrong(f"{word!r} is not a chance: write p=0.1") from None
    try:
        return MessageFault(deed, kind, pair, which, chance, seconds)
    except ValueError as error:
        raise words.wrong(str(error)) from None


def _which(words: _Words) -> Which:
    which = Which()
    head = words.left[0] if words.left else ""
    if words.take("every"):
        which = Which(n=words.number("a number") if words.left and words.left[0].isdigit() else 1)
    elif re.fullmatch(r"#\d+", head):
        which = Which("nth", int(words.next("a number")[1:]))
    elif head.isdigit():
        which = Which("first", words.number("a number"))
    return Which(which.choice, which.n, each=True) if words.take("each") else which


def _link(words: _Words) -> Pair:
    pair = words.pair()
    return Pair(pair.sender, pair.receiver, both=True) if pair != Pair() else pair


def _groups(words: _Words) -> tuple[tuple[str, ...], ...]:
    word = words.next("groups of workers")
    groups = tuple(tuple(group.split(",")) for group in word.split("|"))
    if len(groups) < 2 or not all(_NAME.fullmatch(name) and name != ANY for group in groups for name in group):
        raise words.wrong(f"{word!r} is not a division into groups: write a,b|c,d")
    return groups


def _when(words: _Words, counted: bool = True) -> When:
    if words.take("at"):
        return When(words.seconds())
    if counted and words.take("after"):
        count = words.number("a number of messages")
        if count < 0:
            raise words.wrong(f"{count} is not a number of messages")
        named = bool(words.left) and words.left[0] in MessageType.__members__
        return When(after=count, kind=words.kind() if named else None)
    return When()


def _lasting(words: _Words) -> float | None:
    return words.seconds() if words.take("for") else None


_READERS: dict[str, Callable[[_Words], Fault]] = {
    **{deed: partial(_message_fault, deed) for deed in DEEDS},
    "cut": lambda words: Cut(_link(words), _when(words), _lasting(words)),
    "heal": lambda words: Heal(_link(words), _when(words)),
    "partition": lambda words: Partition(_groups(words), _when(words, counted=False), _lasting(words)),
    "freeze": lambda words: Freeze(words.name(), _when(words), _lasting(words)),
    "kill": lambda words: Kill(words.name(), _when(words)),
}


# Writing.


def _write_fault(fault: Fault) -> str:
    if isinstance(fault, MessageFault):
        words = [fault.deed, ANY if fault.kind is None else fault.kind.name, _pair(fault.pair)]
        words += [_time(fault.seconds)] if fault.deed == "delay" else []
        words += [*_count(fault.which), f"p={_figure(fault.chance)}" if fault.chance != 1.0 else ""]
    else:
        words = [type(fault).__name__.lower(), write_target(fault), _moment(fault.when)]
        lasting: float | None = getattr(fault, "lasting", None)
        words += [] if lasting is None else [f"for {_time(lasting)}"]
    return " ".join(filter(None, words))


def write_target(fault: Event) -> str:
    """Return the worker, the link or the groups that it happens to, as they stand in a plan."""
    if isinstance(fault, WorkerFault):
        return fault.worker
    return "|".join(map(",".join, fault.groups)) if isinstance(fault, Partition) else _pair(fault.link)


def _pair(pair: Pair) -> str:
    if pair == Pair():
        return ANY
    if not pair.both:
        return f"{pair.sender}->{pair.receiver}"
    return f"{pair.sender}{'<->' if '-' in pair.sender + pair.receiver else '-'}{pair.receiver}"


def _count(which: Which) -> list[str]:
    words = {"first": [str(which.n)], "nth": [f"#{which.n}"], "every": ["every"] + [str(which.n)] * (which.n != 1)}
    shown = [] if which == Which() else words[which.choice]
    return shown + (["each"] if which.each else [])


def _time(seconds: float) -> str:
    milliseconds = seconds * 1000.0
    exact = seconds < 1.0 and milliseconds / 1000.0 == seconds
    return f"{_figure(milliseconds)}ms" if exact else f"{_figure(seconds)}s"


def _figure(number: float) -> str:
    """The shortest text that reads back as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _moment(when: When) -> str:
    if when.after is not None:
        return f"after {when.after}" + ("" if when.kind is None else f" {when.kind.name}")
    return f"at {_time(when.at)}" if when.at else ""
