"""A handle: the value itself (on its owner), or one fork of it (elsewhere). It is the inside of an `RRef`.

The destructor of a handle lets go of its fork. So a fork that arrived in a message has a handle from the moment at which
the message is read, though it may never be unpickled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from remora.agent.calls.blocking import going_down
from remora.agent.calls.call import UNSET_TIMEOUT
from remora.agent.calls.call_context import current_call_context, pack_recorded
from remora.agent.calls.error_copies import fresh
from remora.agent.calls.future import Future
from remora.agent.peers.manager import Peer
from remora.errors import CallNotSent, CallOutcomeUnknown, OwnerDied, WorkerLost
from remora.names import Word
from remora.options import check_timeout
from remora.rref.references import References
from remora.rref.value import Value
from remora.vocabulary.effects import ForkId, RRefId
from remora.vocabulary.messages import MessageType
from remora.wire.id_codec import pack_id
from remora.wire.pack_scope import PackScope
from remora.wire.packed import Packed

FETCH_CALL, SCRIPT_FETCH_CALL = int(MessageType.PYTHON_RREF_FETCH_CALL), int(MessageType.SCRIPT_RREF_FETCH_CALL)


TO_HERE = Word("to_here()")


class Handle:
    """Has a value or a fork, never both."""

    __slots__ = (
        "__weakref__", "_created", "creation_error", "fork", "owner", "references", "rref_id", "script", "value",
    )  # fmt: skip

    def __init__(
        self,
        references: References,
        owner: Peer,
        rref_id: RRefId,
        fork: ForkId | None,
        value: Value | None,
        script: bool,
    ) -> None:
        self.references = references
        self.owner = owner
        self.rref_id = rref_id
        self.value = value
        self.script = script  # the value is made by a torch operator or a TorchScript function
        self._created: Future[None] | None = None
        self.creation_error: BaseException | None = None  # on the owner: the call that makes the value failed
        self.fork = fork  # last: the destructor needs what is above

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter goes down there may be no globals any more, and no thread to say goodbye. An error here would
        # be printed, which imports modules, and a thread that is gone may have the lock for that.
        fork = getattr(self, "fork", None)
        if fork is not None and not is_finalizing():
            table = self.references.table
            if not table.closed:
                table.held.releases.put(fork)

    # The value.

    def wait_for_own(self, value: Value) -> Any:
        """The value, on its owner. A destructor that the collector runs in the midst of a message of this worker to itself,
        or of a step of a reference, cannot wait for it: that message or step may be the one that has it made."""
        if not value.ready:
            me = self.references.me
            is_reading = me.incoming is not None and me.incoming.takes_in()
            if is_reading or me.outgoing.in_midst() or self.references.table.in_midst():
                raise CallOutcomeUnknown(
                    f"the value of {self.rref_id} is being made: a signal handler or destructor asked for it while Remora "
                    f"was in the midst of a message or a reference of this worker on the same thread, so it cannot be "
                    f"waited for there."
                )
            me.outgoing.flush()  # the call that makes it may be waiting to share a write
        return value.get()

    def fetch(self, timeout: float) -> Any:
        """Ask the owner for a copy of the value, and wait for it."""
        try:
            kind, packed, flags = self._fetch_request()
            return self.references.agent.caller.call(self.owner, kind, packed, flags, timeout, TO_HERE)
        except (WorkerLost, CallNotSent) as error:
            raise self._translated(error) from None

    def fetch_async(self, timeout: float) -> Future[Any]:
        """A future of the value (on its owner) or of a copy."""
        if timeout != UNSET_TIMEOUT:  # checked before there is a future, which would keep this handle if it were refused
            check_timeout(timeout, "the timeout of to_here_async()")
        if self.value is not None:
            return self._local_future(self.value)
        self.check_usable("to_here() on it")
        kind, packed, flags = self._fetch_request()
        future: Future[Any] = self.references.agent.caller.call_async(
            self.owner, kind, packed, flags, timeout, TO_HERE, translate=self._translated
        )
        future._when_settled(partial(_keep, self))  # else its goodbye could free the value before it is fetched
        return future

    def _local_future(self, value: Value) -> Future[Any]:
        future: Future[Any] = Future(f"the value of {self.rref_id}")

        def ready() -> None:
            if value.error is not None:
                future._fail(value.error)
            else:
                future._succeed(value.get())

        value.when_ready(ready)
        return future

    def _fetch_request(self) -> tuple[int, Packed, int]:
        """The type of the message that asks for the value, the message, and its flags."""
        kind = SCRIPT_FETCH_CALL if self.script else FETCH_CALL
        context = current_call_context.get()
        if context is None:
            return kind, Packed(pack_id(self.rref_id), [], [], []), 0
        return kind, *pack_recorded(self.rref_id, PackScope(self.owner, ordered=True), context)

    def check_usable(self, doing: str) -> None:
        """Raise the reason for which a fork does not work."""
        if sys.is_finalizing():
            raise going_down(f"{doing} of {self.stream_form()}")
        assert self.fork is not None
        table = self.references.table
        failure = table.state.failures.get(self.fork)
        if failure is None and not table.closed:
            return
        if failure is None or getattr(failure, "deleted", False):
            raise RuntimeError(f"{self.stream_form()} was deleted by shutdown. Cannot call {doing} after deletion.")
        raise fresh(failure)

    def _translated(self, error: BaseException) -> BaseException:
        """An error of a call to the owner, in terms of the reference if the owner is gone."""
        if isinstance(error, WorkerLost | CallNotSent) and self.owner.state != "alive":
            return OwnerDied(f"{self!r}: its owner {self.owner.info} is gone: {self.owner.reason}")
        return error

    # Its creation.

    def created(self) -> Future[None]:
        """A future that is done when the owner has made the value."""
        if self._created is None:
            done: Future[None] = Future(f"the creation of {self.rref_id}")
            self._created = done
            if self.creation_error is not None:
                self._settle_created(done)
            elif self.value is not None:
                self.value.when_ready(partial(self._settle_created, done))
            else:
                assert self.fork is not None
                self.references.table.held.when_confirmed(self.fork, partial(self._settle_created, done))
        return self._created

    def creation_failed(self, error: BaseException) -> None:
        """On the owner: the call that makes the value failed, so the value may never be made."""
        self.creation_error = error
        if self._created is not None:
            self._settle_created(self._created)

    def _settle_created(self, done: Future[None]) -> None:
        failure = self.creation_error
        if done.done():
            return
        if failure is None and self.fork is not None:
            failure = self.references.table.state.failures.get(self.fork)
        if failure is None:
            done._succeed(None)
        else:
            done._fail(failure.__cause__ or failure)

    # Texts.

    def stream_form(self) -> str:
        """The form in which PyTorch's errors name a reference."""
        if self.fork is None:
            return f"OwnerRRef(rref_id={self.rref_id})"
        return f"UserRRef(rref_id={self.rref_id}, fork_id={self.fork})"

    def _state(self) -> str:
        if self.value is not None:
            how = "being made" if not self.value.ready else ("failed" if self.value.error else "ready")
            return f"{how} on {self.references.me.name}"
        assert self.fork is not None
        state = self.references.table.state
        if self.fork in state.failures:
            return f"unusable, of {self.owner.name}"
        return f"{'confirmed' if state.is_confirmed(self.fork) else 'pending'}, of {self.owner.name}"

    def __str__(self) -> str:
        if self.fork is None:
            return f"OwnerRRef({self.rref_id})"
        return f"UserRRef(RRefId = {self.rref_id}, ForkId = {self.fork})"

    def __repr__(self) -> str:
        return f"<{self} {self._state()}>"


def _keep(handle: Handle, _: object) -> None:
    """Does nothing: a future that may call it keeps the handle."""
