"""The kinds of faults, as values: of messages, of links, of workers. Plans are made of them; they do nothing.

What happens to a *message* happens on the wire, below the session (but for `fail`: the attempt to send a request fails,
as if it had never been made). What happens to *links* and *workers* happens at a time, or after a number of messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

from remora.vocabulary.messages import MessageType

ANY = "*"

Deed = Literal["fail", "delay", "drop", "duplicate", "reorder", "corrupt"]
DEEDS: tuple[Deed, ...] = get_args(Deed)
Choice = Literal["every", "first", "nth"]


@dataclass(frozen=True)
class Pair:
    """A sender and a receiver; `*` is any worker. `both`: in either direction."""

    sender: str = ANY
    receiver: str = ANY
    both: bool = False

    def matches(self, sender: str, receiver: str) -> bool:
        """Return True if a message from one to the other is meant."""
        return self._one_way(sender, receiver) or (self.both and self._one_way(receiver, sender))

    def _one_way(self, sender: str, receiver: str) -> bool:
        return self.sender in (ANY, sender) and self.receiver in (ANY, receiver)


@dataclass(frozen=True)
class Which:
    """A choice among the messages that match, counted apart for each sender and receiver.

    `every` (each n-th), the `first` n, or the `nth` alone. `each`: counted apart for each payload, too, so that what is
    sent again is known again (`fail` only, where payloads are seen).
    """

    choice: Choice = "every"
    n: int = 1
    each: bool = False

    def picks(self, count: int) -> bool:
        """Return True if the count-th message (from 1) is meant."""
        if self.choice == "every":
            return count % self.n == 0
        return count <= self.n if self.choice == "first" else count == self.n


@dataclass(frozen=True)
class MessageFault:
    """Something that happens to messages. `kind` None is every type of message, words like PING and ACK excepted."""

    deed: Deed
    kind: MessageType | None = None
    pair: Pair = field(default_factory=Pair)
    which: Which = field(default_factory=Which)
    chance: float = 1.0
    seconds: float = 0.0  # of a delay

    def __post_init__(self) -> None:
        if not 0.0 <= self.chance <= 1.0:
            raise ValueError(f"a chance is from 0 to 1, not {self.chance}")
        if not _is_time(self.seconds) or (self.seconds and self.deed != "delay"):
            raise ValueError(f"{self.deed} takes no time of {self.seconds} s")
        if self.which.n < 0 or (self.which.n < 1 and self.which.choice != "first"):
            raise ValueError(f"{self.deed}: messages are counted from 1, not from {self.which.n}")
        if self.which.each and self.deed != "fail":
            raise ValueError(f"{self.deed} cannot tell payloads apart: `each` goes with fail alone")


@dataclass(frozen=True)
class When:
    """After so many messages of a type (None: any) on that link or worker; else `at` so many seconds from the start."""

    at: float = 0.0
    after: int | None = None
    kind: MessageType | None = None

    def __post_init__(self) -> None:
        if not _is_time(self.at):
            raise ValueError(f"a fault cannot come at {self.at} s")
        if self.after is not None and (self.after < 0 or self.at):
            raise ValueError(f"a fault comes after a number of messages or at a time, not after {self.after} at {self.at} s")


class _Checked:
    def __post_init__(self) -> None:
        lasting: float | None = getattr(self, "lasting", None)
        if lasting is not None and not _is_time(lasting):
            raise ValueError(f"a fault cannot last for {lasting} s; without a time it lasts for good")
        if getattr(self, "worker", "") == ANY:
            raise ValueError("a freeze or a kill is of one worker: name it")


@dataclass(frozen=True)
class Cut(_Checked):
    """The connections between two workers break, and none can be made until they are healed, or for so long."""

    link: Pair
    when: When = field(default_factory=When)
    lasting: float | None = None


@dataclass(frozen=True)
class Heal:
    """The end of a cut: the two can connect again."""

    link: Pair
    when: When = field(default_factory=When)


@dataclass(frozen=True)
class Partition(_Checked):
    """All connections between the groups are cut. Workers that are in none of them are not concerned."""

    groups: tuple[tuple[str, ...], ...]
    when: When = field(default_factory=When)
    lasting: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.when.after is not None:
            raise ValueError("a partition counts no messages: say at what time it comes")

    def separates(self, one: str, other: str) -> bool:
        """Return True if two workers are in different groups."""
        sides = [i for name in (one, other) for i, group in enumerate(self.groups) if name in group]
        return len(sides) == 2 and sides[0] != sides[1]


@dataclass(frozen=True)
class Freeze(_Checked):
    """A worker is alive and silent, for so long or for good."""

    worker: str
    when: When = field(default_factory=When)
    lasting: float | None = None


@dataclass(frozen=True)
class Kill(_Checked):
    """A worker ends without a word."""

    worker: str
    when: When = field(default_factory=When)


def _is_time(seconds: float) -> bool:
    return 0.0 <= seconds < inf


WorkerFault = Freeze | Kill
Event = Cut | Heal | Partition | WorkerFault
Fault = MessageFault | Event
