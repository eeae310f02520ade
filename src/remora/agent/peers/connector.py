"""Gives channels their links: one dial at a time for each peer, few at a time for all of them.

The dial itself, and what its failure says of the peer, is in `remora.agent.peers.reconnect`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from remora.agent.calls.call import NEVER
from remora.agent.peers.handshake_client import HandshakeClient
from remora.agent.peers.lifecycle import PeerLifecycle
from remora.agent.peers.peer import Peer
from remora.agent.peers.peer_table import PeerTable
from remora.agent.peers.reconnect import DialQueue, Reconnector
from remora.agent.runtime.pool import WorkerPool
from remora.agent.runtime.try_lock import may_be_struck
from remora.options import Settings


class Connector:
    """Dials the peers of one worker. Any thread may call it; threads of the pool dial."""

    def __init__(
        self,
        table: PeerTable,
        lifecycle: PeerLifecycle,
        handshake_client: HandshakeClient,
        pool: WorkerPool,
        settings: Settings,
    ) -> None:
        self._table = table
        self._pool = pool
        self._clock = settings.clock
        self._reconnector = Reconnector(lifecycle, handshake_client, settings)
        self._dials = DialQueue(pool.submit_system)

    @property
    def parting(self) -> bool:
        """Return True if we have begun to tell the others that we leave: a peer that has heard it hangs up."""
        return self._reconnector.parting

    def begin_parting(self) -> None:
        """Note that we tell the others from now on that we leave."""
        self._reconnector.parting = True

    @property
    def stopping(self) -> bool:
        """Return True if we are about to leave."""
        return self._reconnector.stopping.is_set()

    def stop(self) -> None:
        """Dial no more: a link that breaks now stays broken, and no peer is suspected or given up for it."""
        self._reconnector.stop()

    def probe(self, names: Iterable[str]) -> None:
        """Connect to those of these peers that we have no link with: if one is gone, that is found out."""
        for name in names:
            peer = self._table.find(name) if self._table.has_name(name) else None
            if peer is not None and not peer.gone and peer.outgoing.link is None:
                self.connect(peer)

    def connect(self, peer: Peer) -> None:
        """Give the channel to a peer a link, soon."""
        if may_be_struck():
            self._pool.submit_final(partial(self._connect, peer))  # else a strike between the steps could leave it undialled
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
        peer.dialling_since = self._clock.now()
        try:
            self._reconnector.dial(peer, make_room)
        finally:
            peer.dialling = False
            if peer.outgoing.link is None and not peer.gone and peer.outgoing.pending and not self.stopping:
                self.connect(peer)  # messages came after the dial had failed
