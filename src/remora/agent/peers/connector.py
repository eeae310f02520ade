"""Gets links to peers, one dial at a time for each, few at a time for all; and what to make of it when there is none.

    nothing listens at its address            its process is gone: dead, at once
    its host does not answer                  cut off or switched off: dead when `reconnect_timeout` has passed
    its host answers, and the worker does not busy or frozen: suspected, dead after `silence_limit`
    it proves itself and does not let us in   it gave us up, or another one took its place: dead for us
    it says so and proves nothing             as if it were silent: a stranger may have said it
    it does not know the secret               the calls that wait fail, and the next one tries again; on a redial, as above
    we lack descriptors, memory or ports      says nothing of the peer: the calls that wait fail, and it stays

Times are counted while we ourselves are running (`remora.protocol.member_rules.OwnTime`).

It blocks: a thread of the pool does it, and comes back at once when the worker stops.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from remora.agent.calls.call import NEVER
from remora.agent.peers.handshake_client import (
    GivenUp,
    HandshakeClient,
    LocalTrouble,
    PeerLeaving,
    PeerRefused,
    PeerSilent,
)
from remora.agent.peers.lifecycle import PeerLifecycle
from remora.agent.peers.peer import ENDED, Peer
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.try_lock import may_be_struck
from remora.errors import AuthenticationError, CallNotSent, CallOutcomeUnknown, ProtocolError
from remora.long_wait import LongWait
from remora.options import Settings
from remora.transport.link import StreamLink

log = logging.getLogger("remora")

LEFT = "it left the group"
AT_ONCE = 8  # dials
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
LOCAL_PATIENCE = 2.0  # seconds in which descriptors or memory of our own may become free
LAST_TRY = 1.0  # however long a host has not been heard of, it gets this long to answer a new connection


class DialQueue:
    """Lets few dials run at a time: a hundred threads that shake hands at once only take the interpreter from each other.

    A dial that takes long makes room for the next one: peers that do not answer hold up no other.
    """

    def __init__(self, serve: Callable[[Callable[[], None]], object]) -> None:
        self._serve = serve
        self._lock = threading.RLock()  # guards: _running and _waiting
        self._running = 0
        self._waiting: deque[Callable[[Callable[[], None]], None]] = deque()

    def submit(self, dial: Callable[[Callable[[], None]], None]) -> None:
        """Have a thread call `dial(make_room)`, soon."""
        with self._lock:
            if self._running >= AT_ONCE:
                self._waiting.append(dial)
                return
            self._running += 1
        self._serve(partial(self._run, dial))

    def _run(self, dial: Callable[[Callable[[], None]], None]) -> None:
        made: list[None] = []  # `append` and `len` in one: who appends first makes the room

        def make_room() -> None:
            if not made:
                made.append(None)
                self._next()

        try:
            dial(make_room)
        finally:
            make_room()

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                self._running -= 1
                return
            dial = self._waiting.popleft()
        self._serve(partial(self._run, dial))


class Connector:
    """Dials the peers of one worker, and judges them by what comes of that. Threads of the pool dial; any thread may ask."""

    def __init__(
        self, lifecycle: PeerLifecycle, handshake_client: HandshakeClient, pool: WorkerPool, settings: Settings
    ) -> None:
        self.table = lifecycle.table
        self.lifecycle = lifecycle
        self._handshake_client = handshake_client
        self.pool = pool
        self.settings = settings
        self._clock = settings.clock
        self.own_time = handshake_client.own_time
        self._dials = DialQueue(pool.submit_system)
        self.parting = False  # we have begun to tell the others that we leave: a peer that has heard it hangs up
        self.stopping = threading.Event()  # we are about to leave

    def begin_parting(self) -> None:
        """Note that we tell the others from now on that we leave."""
        self.parting = True

    def stop(self) -> None:
        """Dial no more; a thread that dials comes back at once. A link that breaks now stays broken, and no peer is
        suspected or given up for it."""
        self.stopping.set()
        self._handshake_client.stop()

    def probe(self, names: Iterable[str]) -> None:
        """Connect to those of these peers that we have no link with: if one is gone, that is found out."""
        for name in names:
            peer = self.table.by_name.get(name)
            if peer is not None and not peer.gone and peer.outgoing.link is None:
                self.connect(peer)

    def connect(self, peer: Peer) -> None:
        """Give the channel to a peer a link, soon."""
        if may_be_struck():
            self.pool.submit_final(partial(self._connect, peer))  # else a strike between the steps could leave it undialled
        else:
            self._connect(peer)

    def _connect(self, peer: Peer) -> None:
        if self.parting and not peer.gone and not peer.outgoing.pending:
            return  # it has answered our farewell: that its link is gone is no reason to wonder whether it lives
        with peer.lock:
            if not peer.gone and (peer.dialling or peer.outgoing.link is not None):
                return
            peer.dialling = not peer.gone
            peer.dialling_since = NEVER  # it waits for its turn, which is no fault of the peer
        if peer.dialling:
            self._dials.submit(partial(self._dial, peer))
        else:
            peer.outgoing.fail_pending(lambda call: peer.lost_error(call.what), answered_too=False)

    def _dial(self, peer: Peer, make_room: Callable[[], None]) -> None:
        """Give a peer's outgoing channel a link, or find out why not. `make_room` is called if that takes long."""
        peer.dialling_since = started = self._clock.now()
        pause = FIRST_PAUSE
        report = LongWait(lambda: self._still_waiting(peer), self._clock)

        def takes_long() -> None:
            make_room()
            report.look()

        try:
            while not self.stopping.is_set() and not peer.gone and not self._try(peer, started, takes_long):
                takes_long()
                self._clock.block(self.stopping.wait, self._clock.now() + pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            peer.dialling = False
            if peer.outgoing.link is None and not peer.gone and peer.outgoing.pending and not self.stopping.is_set():
                self.connect(peer)  # messages came after the dial had failed

    def _still_waiting(self, peer: Peer) -> str:
        calls, me = len(peer.outgoing.pending), self._handshake_client.me.name
        again = "again " if peer.outgoing.ever_connected else ""
        return f"{me} still waits for a connection with {peer.name} {again}({calls} call{'s' * (calls != 1)} pending)"

    def _left(self, peer: Peer, started: float) -> float:
        """Return the seconds that the host of a peer has left to answer."""
        now, since = self._clock.now(), self.own_time.since
        silent = since(started if peer.unreachable_since is None else peer.unreachable_since, now)
        return max(self.settings.reconnect_timeout - silent, LAST_TRY - since(started, now))

    def _try(self, peer: Peer, started: float, make_room: Callable[[], None]) -> bool:
        """Dial once. Return True if that settled it."""
        try:
            # Not all of the time that is left: what is known of its host may be news by then.
            once = max(self.settings.reconnect_timeout / 2, LAST_TRY)
            until = self._clock.now() + min(self._left(peer, started), once)
            self._use(peer, *self._handshake_client.to(peer.record, peer.outgoing, until, make_room))
        except PeerRefused as error:
            peer.gave_us_up = isinstance(error, GivenUp)
            if isinstance(error, PeerLeaving):
                self.lifecycle.declare_gone(peer, LEFT, "left")
            if peer.gave_us_up and self.parting:  # what we still wanted of it will not be
                self._fail_pending(peer, f"this worker is leaving, and {peer.name} has heard so")
            else:
                self.lifecycle.declare_gone(peer, str(error))
        except (ConnectionRefusedError, FileNotFoundError) as error:
            if peer.leaving:
                self.lifecycle.declare_gone(peer, LEFT, "left")
            log.debug("nothing listens for %s any more: %s", peer.name, error)
            peer.process_ended = self._handshake_client.is_here(peer.record)
            self.lifecycle.declare_gone(peer, ENDED if peer.process_ended else "nothing listens at its addresses any more")
        except LocalTrouble as error:
            return self._lacks_something(peer, started, error)
        except PeerSilent as error:
            peer.unreachable_since = None
            return self._is_silent(peer, started, error)
        except OSError as error:
            return self._is_unreachable(peer, started, error)
        except (AuthenticationError, ProtocolError) as error:
            peer.outgoing.fail_pending(lambda call, error=error: type(error)(f"{call.what}: {error}"))  # type: ignore[misc]
        except Exception as error:
            log.exception("cannot connect to %s", peer.name)
            what = f"{type(error).__name__} while connecting: {error}"
            peer.outgoing.fail_pending(lambda call: CallOutcomeUnknown(f"{call.what}: {what}"))
        return True

    def _fail_pending(self, peer: Peer, why: str) -> None:
        """Fail the calls that wait for a connection with a peer."""
        kind = CallOutcomeUnknown if peer.outgoing.ever_connected else CallNotSent
        peer.outgoing.fail_pending(lambda call: kind(f"{call.what}: {why}"))

    def _use(self, peer: Peer, link: StreamLink, arrived: int, leftover: bytes) -> None:
        if self.stopping.is_set():
            link.close()
            return
        peer.unreachable_since = None
        try:
            peer.outgoing.attach(link, arrived, leftover)
            peer.note_link(link)
        except OSError as error:
            link.close()
            raise LocalTrouble(f"cannot use a connection with {peer.name}: {error}; {peer.name} is not to blame") from error
        except BaseException:
            link.close()
            raise
        log.info("%s is connected with %s", self._handshake_client.me.name, link.where)
        self.lifecycle.trust(peer)

    def _is_silent(self, peer: Peer, started: float, error: OSError) -> bool:
        """Judge a peer whose host took the connection. A sign of life on the link that it dialled itself counts as
        well."""
        calling = peer.incoming.link if peer.incoming is not None else None
        heard = started if calling is None else max(started, calling.last_heard)
        silence = self.own_time.since(heard, self._clock.now())
        if silence < self.settings.silence_limit:
            return False
        self.lifecycle.declare_gone(peer, f"it has been silent for {silence:.0f} s: {error}")
        return True

    def _is_unreachable(self, peer: Peer, started: float, error: OSError) -> bool:
        if self._left(peer, started) > FIRST_PAUSE:
            return False
        if peer.unreachable_since is None:
            peer.unreachable_since = started
        self.lifecycle.declare_gone(peer, f"it cannot be reached: {error}")
        return True

    def _lacks_something(self, peer: Peer, started: float, error: LocalTrouble) -> bool:
        """Our own process cannot make a connection. That may pass; if it does not soon, the calls that wait fail."""
        if self.own_time.since(started, self._clock.now()) < LOCAL_PATIENCE:
            return False
        self._fail_pending(peer, str(error))
        log.warning("%s", error)
        return True
