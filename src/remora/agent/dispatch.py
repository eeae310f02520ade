"""From an arrived request to the handler for its type. Handlers register here; dispatch knows none of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from remora.agent.calls import NEVER
from remora.agent.channel import Channel
from remora.agent.crew import Crew
from remora.errors import ProtocolError, SerializationError
from remora.vocabulary.messages import MessageType
from remora.wire import failures, preamble
from remora.wire.frames import FAILED, Frame
from remora.wire.packed import Packed
from remora.wire.pickling import pack, unpack
from remora.wire.scopes import PackScope, UnpackScope

if TYPE_CHECKING:
    from remora.agent.peers import Peer

EXCEPTION = int(MessageType.EXCEPTION)
_ANSWERED_TO_CALLER_ALONE = (
    MessageType.PYTHON_CALL,
    MessageType.SCRIPT_CALL,
)  # others may wait for what remote() makes
LARGE = 1 << 17
AT_ONCE = 0.0  # what the kernel does not take now is copied: the function's result may be changed by the next function
_NOTHING = pack(None).body


class Request:
    """A request being served: what was asked, by whom, until when, and the way back."""

    __slots__ = (
        "_answered",
        "_dispatch",
        "_handler",
        "caller",
        "cancelled",
        "channel",
        "deadline",
        "frame",
        "on_cancel",
        "parkable",
    )

    def __init__(self, dispatch: Dispatch, caller: Peer, channel: Channel, frame: Frame, handler: Handler) -> None:
        self._dispatch = dispatch
        self._handler = handler
        self.caller = caller
        self.channel = channel
        self.frame = frame
        self.deadline = time.monotonic() + frame.timeout if frame.timeout else NEVER
        self.on_cancel: Callable[[], None] | None = None
        self.cancelled = False
        self.parkable = False  # it is the program's business, and may wait until its answer can leave
        self._answered = False

    def __call__(self) -> None:
        """Serve it. The request itself is the job: one object less for each call that waits in the backlog."""
        if self.cancelled:
            self.drop()
            return
        if self.parkable and self.channel.congested:
            self.channel.park(self)
            return
        try:
            self._handler(self)
        except BaseException as error:
            self.fail(error)

    def unpack(self) -> object:
        """The body as a value."""
        if self.frame.buffers is None:
            raise SerializationError(
                f"the arguments ({self.frame.size} bytes) do not fit into the memory of this worker"
            )
        return unpack(self.frame.body, self.frame.buffers, UnpackScope(self.caller, self.frame.arrival))

    def reply(self, kind: int, value: object) -> None:
        """Answer with a value; if it cannot be packed, with that error."""
        if self.channel.closed:
            self.drop()  # nobody hears it: do not hand out references in it
            return
        scope = PackScope(self.caller)
        try:
            packed = pack(value, scope)
        except BaseException as error:
            self.fail(error)
            return
        self._send(kind, packed, preamble.attach(packed, scope))

    def acknowledge(self, kind: int, then: Callable[[], None]) -> None:
        """Answer with nothing but the fact, in one write with whatever else `then` sends the caller."""
        self._answered = True
        self.channel.put_aside(kind, self.frame.call, _NOTHING)
        try:
            then()
        finally:
            self.channel.flush()
            self._dispatch.serving.pop((self.channel.session_id, self.frame.call), None)
            self.channel.job_done()

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        described = failures.describe(error, repr(self._dispatch.me))
        self._send(EXCEPTION, Packed(failures.dump(described), [], [], []), FAILED)

    def _send(self, kind: int, packed: Packed, flags: int) -> None:
        if self._answered:
            return
        self._answered = True
        channel, dispatch = self.channel, self._dispatch
        if not packed.buffers and len(packed.body) < LARGE:
            if dispatch.crew.backlog:
                channel.send_lazily(kind, self.frame.call, packed.body, flags)
            else:
                channel.send(kind, self.frame.call, packed.body, flags)
        else:
            channel.send_packed(kind, self.frame.call, packed, flags, 0.0, AT_ONCE)
        dispatch.serving.pop((channel.session_id, self.frame.call), None)
        channel.job_done()

    def cancel(self) -> None:
        """The caller does not wait any more: a function that has not begun never will, a coroutine is cancelled."""
        self.cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

    def abandon(self) -> None:
        """Nobody will hear the answer."""
        if self.on_cancel is not None:
            self.on_cancel()

    def drop(self) -> None:
        """Do not run it, and answer nothing: nobody waits."""
        self._answered = True
        self._dispatch.serving.pop((self.channel.session_id, self.frame.call), None)
        self.channel.job_done()


Handler = Callable[[Request], None]


def _refuse(request: Request) -> None:
    raise ProtocolError(f"messages of type {request.frame.kind:#x} are not known here")


_UNKNOWN: tuple[Handler, bool, bool] = (_refuse, False, True)


class Dispatch:
    """The table of handlers, and the requests being served."""

    def __init__(self, me: object, crew: Crew) -> None:
        self.me = me
        self.crew = crew
        self.serving: dict[tuple[str, int], Request] = {}
        self._handlers: dict[int, tuple[Handler, bool, bool]] = {}

    def on(self, kind: MessageType, handler: Handler, service: bool = False, inline: bool = False) -> None:
        """Have `handler` answer requests of this type. A service is our own work and is not held up by user code; what is
        inline runs on the thread that reads, in the order of arrival, and must be short."""
        self._handlers[int(kind)] = (handler, service, inline)

    def request(self, caller: Peer, channel: Channel, frame: Frame) -> None:
        """Queue an arrived request. Called by the thread that read it, which looks at the backlog next."""
        handler, service, inline = self._handlers.get(frame.kind, _UNKNOWN)
        request = Request(self, caller, channel, frame, handler)
        self.serving[channel.session_id, frame.call] = request
        request.parkable = not inline and not service
        if inline:
            request()
        elif frame.arrival is not None and frame.arrival.pending:
            frame.arrival.when_confirmed(partial(self.crew.submit, request))
        elif service:
            self.crew.serve_quickly(request)
        else:
            self.crew.submit(request, hurry=False)

    def cancel(self, channel: Channel, call: int) -> None:
        """A caller gave a call up."""
        request = self.serving.get((channel.session_id, call))
        if request is not None:
            request.cancel()

    def forget(self, channel: Channel) -> None:
        """The caller on this channel is gone: nobody waits for its coroutines. What has begun or waits in the backlog
        runs, as it would if the caller had gone a moment later."""
        for key, request in list(self.serving.items()):
            if key[0] == channel.session_id and request.frame.kind in _ANSWERED_TO_CALLER_ALONE:
                request.abandon()

    def counts(self) -> int:
        """Requests queued or running."""
        return len(self.serving)
