"""The failure of a pass: an error and the worker where it happened, on its way to the worker that began the pass."""

from __future__ import annotations

from dataclasses import dataclass

from remora.vocabulary.ids import WorkerInfo
from remora.vocabulary.messages import PassFailure
from remora.wire import exceptions


@dataclass(frozen=True, slots=True)
class LocalFailure(PassFailure):
    """A failure on the worker where it happened, with the error itself. What arrives elsewhere is a `PassFailure`."""

    local: BaseException


def error_of(failure: PassFailure) -> BaseException:
    """The error to raise: of its own type, with the worker where it happened in its text."""
    if isinstance(failure, LocalFailure):
        return failure.local
    error = exceptions.load(failure.failure)
    words = f"Error on Node {failure.worker}: "
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (words + error.args[0],)
    else:
        error.add_note(words + f"in the backward pass on {failure.name}")
    return error


def failure_of(error: BaseException, me: WorkerInfo) -> PassFailure:
    """Describe an error that happened here."""
    return LocalFailure(me.id, me.name, exceptions.dump(exceptions.describe(error, repr(me))), error)
