"""Suspects peers, trusts them again, and gives them up. The only place that changes the state of a peer.

When a peer is given up, every call that waits for it fails at once, by name, its channels close, and the listeners of
`on_gone` are told. Whether to give it up is decided elsewhere: `remora.agent.peers.connector` and
`remora.agent.peers.failure_detector`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from remora.agent.peers.membership_events import MembershipEvents
from remora.agent.peers.peer import Peer, State
from remora.agent.peers.peer_table import PeerTable
from remora.agent.serving.dispatch import Dispatch
from remora.protocol.member_rules import Died, Left, Recovered, Suspected
from remora.recorder import DIED, LEFT, RECOVERED, SUSPECTED, Recorder

log = logging.getLogger("remora")


class PeerLifecycle:
    """Changes the state of peers, and tells the listeners. Any thread may call it."""

    def __init__(self, table: PeerTable, dispatch: Dispatch, events: MembershipEvents, recorder: Recorder) -> None:
        self.table = table
        self._dispatch = dispatch
        self._events = events
        self._recorder = recorder
        self.on_gone: list[Callable[[Peer], None]] = []  # called when a peer left or died, on a thread of the pool

    def suspect(self, peer: Peer, reason: str) -> None:
        """A peer does not answer. Its calls wait on; programs that ask or listen may know."""
        with peer.lock:
            news = not peer.gone and not peer.suspicion
            peer.suspicion, peer.suspected_at = reason, self._dispatch.now()
        if news:
            log.info("%s suspects %s: %s", self._dispatch.me, peer.info, reason)
            self._recorder.note(SUSPECTED, peer.name, reason)
            self._events.publish(Suspected(peer.info, reason))

    def trust(self, peer: Peer) -> None:
        """A peer answers (again)."""
        with peer.lock:
            news, peer.suspicion, peer.unreachable_since = bool(peer.suspicion), "", None
        if news and not peer.gone:
            self._recorder.note(RECOVERED, peer.name)
            self._events.publish(Recovered(peer.info))

    def declare_gone(self, peer: Peer, reason: str, state: State = "dead") -> None:
        """End everything with a peer from which nothing more will come. Idempotent."""
        with peer.lock:
            if peer.gone:
                return
            peer.state = state
            peer.reason = reason
        self._recorder.note(LEFT if state == "left" else DIED, peer.name, reason)
        self.table.mark_departed(peer)
        if state == "dead":
            log.warning("%s%s is gone: %s", peer.name, f" (pid {peer.pid})" if peer.pid else "", reason)
            log.debug("%s lost %s, which listened at %s", self._dispatch.me, peer.info, ", ".join(peer.record.addresses))
        else:
            log.info("%s left", peer.name)
        peer.outgoing.fail_pending(lambda call: peer.lost_error(call.what), answered_too=False)
        peer.outgoing.close()
        if peer.incoming is not None:
            peer.incoming.close()
            self._dispatch.forget(peer.incoming)
        peer.shared_memory.forget()
        for listener in list(self.on_gone):
            try:
                listener(peer)
            except Exception:  # the other listeners must know, and a thread that waits for `ended` must not wait for ever
                log.exception("some listeners could not be told that %s is gone", peer.info)
        peer.ended.set()
        self._events.publish(Left(peer.info) if state == "left" else Died(peer.info, reason))
