"""The errors of a request whose arguments cannot be had: they name the caller, the callee and what to do."""

from __future__ import annotations

from remora.errors import SerializationError
from remora.vocabulary.ids import WorkerInfo
from remora.wire.enclosed import Missing, Reason
from remora.wire.frames import Frame


def missing(found: Missing, frame: Frame, caller: str, me: WorkerInfo) -> SerializationError:
    """Memory that belongs to the message could not be had."""
    if found.reason is Reason.NO_MEMORY:
        return too_large(frame, me)
    if found.reason is Reason.DAMAGED:
        return SerializationError(found.details)
    return SerializationError(
        f"the arguments are in shared memory of {caller} that {me.name} could not map. It is not used any more: retry the "
        "call"
    )


def unreadable(caller: str, me: WorkerInfo, error: SerializationError) -> SerializationError:
    """The body is no value."""
    return SerializationError(
        f"the arguments of a call from {caller} make no sense on {me.name}: {error}. The function did not run"
    )


def too_large(frame: Frame, me: WorkerInfo) -> SerializationError:
    """There is no memory for the value."""
    return SerializationError(f"the arguments ({frame.size} bytes) do not fit into the memory of {me.name}, the callee")
