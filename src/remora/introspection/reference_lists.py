"""The references of a worker as observers see them: the values it owns, and the references to values of others."""

from __future__ import annotations

from collections.abc import Iterator

from remora.introspection.subject import Subject
from remora.names import Name, joined
from remora.observer.model import HeldReference, OwnedReference, PassStatus
from remora.rref.reference_snapshot import Snapshot
from remora.vocabulary.effects import RRefId


def id_text(rref: RRefId) -> str:
    """Return the name of a value in the whole group: the worker that numbered it, and the number."""
    return f"{rref.created_on}:{rref.local_id}"


def owned(snapshot: Snapshot) -> Iterator[OwnedReference]:
    """Yield the values that other workers hold."""
    for each in snapshot.owned:
        size, device = (None, None) if each.state != "ready" else each.measured
        yield OwnedReference(
            id=id_text(each.id),
            type=each.type if each.state == "ready" else "",
            state=each.state,
            age=max(each.age, 0.0),
            bytes=size,
            device=device,
            holders=tuple(each.holders),
            unconfirmed=each.unconfirmed,
            function=_named(each.maker),
            site=each.site or None,
        )


def held(snapshot: Snapshot) -> Iterator[HeldReference]:
    """Yield the references to values of others."""
    for each in snapshot.held:
        yield HeldReference(
            id=id_text(each.id),
            owner=each.owner,
            state=each.state,
            age=max(each.age, 0.0),
            function=_named(each.maker),
            site=each.site or None,
        )


def passes(subject: Subject, now: float) -> Iterator[PassStatus]:
    """Yield the backward passes that this worker takes part in. `now`: of `time.monotonic`."""
    peers = subject.agent.peers
    for each in subject.autograd.running():
        starter = peers.of_id(each.root)
        yield PassStatus(
            context=each.context.id,
            number=each.number,
            started_by=str(each.root) if starter is None else starter.name,
            phase=each.phase,
            age=max(now - each.began, 0.0),
            owes=each.owes(),
            awaits=each.awaits(),
        )


def _named(maker: Name | None) -> str | None:
    return None if maker is None else joined(*maker)
