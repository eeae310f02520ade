"""The effects that the reference machines ask for. Their driver (the table of `remora.rref`, or a test) carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from remora.vocabulary.ids import GloballyUniqueId, WorkerKey

Worker = WorkerKey
RRefId = GloballyUniqueId
ForkId = GloballyUniqueId


@dataclass(frozen=True, slots=True)
class AskOwner:
    """Holder to owner: count this fork (RREF_FORK_REQUEST). The answer goes to `Holder.confirm`; a refused
    fork is removed by `Holder.forget`."""

    owner: Worker
    rref: RRefId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class TellParent:
    """Child to parent: the owner counts me now (RREF_CHILD_ACCEPT)."""

    parent: Worker
    fork: ForkId


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Holder to owner: forget this fork (RREF_USER_DELETE)."""

    owner: Worker
    rref: RRefId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class Free:
    """The owner may drop the value."""

    rref: RRefId


@dataclass(frozen=True, slots=True)
class NeverMade:
    """The value will never exist: its creator is gone, or took the creation back. Its waiters must be told."""

    rref: RRefId


@dataclass(frozen=True, slots=True)
class AskSurvivors:
    """Owner to all others: a worker is lost; say so when you know, behind everything you had to say (`Owner.heard`)."""

    lost: Worker
    survivors: frozenset[Worker]


Effect = AskOwner | TellParent | Goodbye | Free | NeverMade | AskSurvivors
