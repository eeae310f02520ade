"""The failure of a pass: an error and the worker where it happened, on its way to the worker that began the pass."""

from __future__ import annotations

from dataclasses import dataclass

from remora.vocabulary.ids import WorkerInfo
from remora.wire import exceptions


@dataclass(frozen=True, slots=True)
class PassFailure:
    """An error of one worker, which ends the pass everywhere."""

    worker: int
    name: str
    failure: bytes
    local: BaseException | None = None  # the error itself, on the worker where it happened

    def __reduce__(self) -> tuple[type[PassFailure], tuple[int, str, bytes]]:
        return PassFailure, (self.worker, self.name, self.failure)

    def error(self) -> BaseException:
        """The error to raise: of its own type, and saying where it happened."""
        if self.local is not None:
            return self.local
        error = exceptions.load(self.failure)
        words = f"Error on Node {self.worker}: "
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (words + error.args[0],)
        else:
            error.add_note(words + f"in the backward pass on {self.name}")
        return error


def blame(error: BaseException, me: WorkerInfo) -> PassFailure:
    """Describe an error that happened here."""
    return PassFailure(me.id, me.name, exceptions.dump(exceptions.describe(error, repr(me))), error)
