"""Control messages that must arrive: what could not be sent is tried again, a few times, later and later.

Only a failure *to send* is followed by another try. What was sent is the session's business: it arrives once, or the peer
is given up. So without a fault plan nothing is ever tried again. Messages to one peer keep their order: while one waits
for its next try, those behind it wait, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from remora.agent.caller import Caller
from remora.agent.calls.call import Call
from remora.agent.peers.peer import Peer
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.timers import Timers
from remora.errors import CallNotSent, RemoraError
from remora.faults.worker_faults import WorkerFaults
from remora.wire.packed import Packed

Done = Callable[[BaseException | None], None]

MAX_RETRIES = 5
FIRST_GAP = 1.0  # seconds from one try to the next
BACKOFF = 1.5


def gaps(retries: int = MAX_RETRIES, first: float = FIRST_GAP, backoff: float = BACKOFF) -> list[float]:
    """Return the seconds between one try and the next: 1, 1, 1.5, 2.25, 3.375 by default. PyTorch's schedule."""
    return [first * backoff ** max(k - 1, 0) for k in range(retries)]


@dataclass(eq=False, slots=True)
class _ControlMessage:
    """One message that has to be sent with care."""

    peer: Peer
    kind: int
    packed: Packed
    what: str
    done: Done | None
    urgent: bool
    tries: int = 0


class Retries:
    """Sends the control messages of one worker."""

    def __init__(self, caller: Caller, pool: WorkerPool, timers: Timers, faults: WorkerFaults) -> None:
        self.gaps = gaps()
        self._caller = caller
        self._pool = pool
        self._timers = timers
        self._faults = faults
        self._lock = threading.RLock()  # guards: _waiting
        self._waiting: dict[Peer, deque[_ControlMessage]] = {}  # the first will be tried again, the others wait behind it

    def send(
        self, peer: Peer, kind: int, packed: Packed, what: str, done: Done | None = None, urgent: bool = True
    ) -> None:
        """Send a control message, and call `done` once: with None when the peer has answered, else with the error. Without
        `done` it is not answered.

        `done` runs on a thread of the pool; or before this returns, if the peer is known to be gone. If it is not urgent,
        the answer is looked at within half a second.
        """
        if self._faults.injector is None:
            self._start(peer, kind, packed, what, done, urgent)
        else:
            self._send_with_care(_ControlMessage(peer, kind, packed, what, done, urgent))

    def _start(self, peer: Peer, kind: int, packed: Packed, what: str, done: Done | None, urgent: bool) -> None:
        if done is None:
            self._caller.tell(peer, kind, packed)
            return
        call = Call(peer, what, lambda call: done(call.error()))
        try:
            self._caller.start_call(peer, call, kind, packed, 0, 0.0, control=True, urgent=urgent, asked=True)
        except RemoraError as error:  # the peer is gone, or we are
            done(error)

    # Under a fault plan.

    def _send_with_care(self, message: _ControlMessage) -> None:
        with self._lock:
            queue = self._waiting.get(message.peer)
            if queue is not None:
                queue.append(message)
                return
        self._try(message)

    def _try(self, message: _ControlMessage) -> None:
        """Try to send a message, and then those that wait behind it, as far as they get."""
        following: _ControlMessage | None = message
        while following is not None:
            message = following
            message.tries += 1
            if not self._refused(message):
                self._start(message.peer, message.kind, message.packed, message.what, message.done, message.urgent)
            elif message.tries <= len(self.gaps):
                self._hold(message)
                return
            elif message.done is not None:
                problem = f"The RPC has not succeeded after the specified number of max retries ({len(self.gaps)})."
                message.done(CallNotSent(f"{message.what}: {problem}"))
            following = self._behind(message)

    def _refused(self, message: _ControlMessage) -> bool:
        alive = self._caller.running and message.peer.state == "alive"  # else there is an answer already
        return alive and self._faults.refuse(message.peer.name, message.kind, message.packed.body)

    def _hold(self, message: _ControlMessage) -> None:
        """Try again when it is time; what is sent to the same peer meanwhile waits behind it."""
        with self._lock:
            self._waiting.setdefault(message.peer, deque([message]))
        when = self._timers.clock.now() + self.gaps[message.tries - 1]
        self._timers.at(when, lambda: self._pool.submit_system(lambda: self._try(message)))

    def _behind(self, message: _ControlMessage) -> _ControlMessage | None:
        """A message is out of the way: return the first of those that waited behind it."""
        with self._lock:
            queue = self._waiting.get(message.peer)
            if queue is None or queue[0] is not message:
                return None
            queue.popleft()
            if queue:
                return queue[0]
            del self._waiting[message.peer]
            return None
