"""Decides whether a worker that dials us gets a session, and gives it one."""

from __future__ import annotations

from collections.abc import Callable

from remora.agent.peers.manager import PeerManager
from remora.agent.peers.peer import Peer
from remora.errors import ProtocolError
from remora.protocol.handshake import Refused, Why
from remora.rendezvous.record import WorkerRecord
from remora.transport.link import StreamLink
from remora.vocabulary.ids import WorkerKey


class Admission:
    """Lets proven callers in. The listener asks it."""

    def __init__(self, peers: PeerManager, is_listed: Callable[[WorkerRecord], bool]) -> None:
        self._peers = peers
        self._is_listed = is_listed  # whether the list of the group has a worker

    def is_stale(self, record: WorkerRecord) -> bool:
        """Return True if it has the name or the id of another worker that is there, and is not on the group's list: it
        was given up before we came, others have its place by now, and it does not know."""
        holders = (self._peers.by_name.get(record.name), self._peers.of_id(record.id))
        rivals = [each for each in holders if each and not each.gone and each.key.incarnation != record.incarnation]
        return bool(rivals) and not self._is_listed(record)

    def authorize(self, record: WorkerRecord, session_id: str) -> int | Refused:
        """A proven caller asks for a session: how much of it we have, or why not."""
        known = self._peers.known(WorkerKey(record.id, record.incarnation))
        if self._peers.connector.stopping.is_set() and not _resumes(known, session_id):
            return Refused(Why.LEAVING)
        if known is not None and known.state == "dead":
            text = f"{record.name} was given up ({known.reason}); it must join again as a new worker"
            return Refused(Why.ADMISSION, text)
        if known is None and self.is_stale(record):
            text = f"another worker took the place of {record.name}; it must join again as a new worker"
            return Refused(Why.ADMISSION, text)
        incoming = None if known is None else known.incoming
        if incoming is None or incoming.session_id != session_id:
            return 0
        if incoming.closed:
            return Refused(Why.ADMISSION, "this session was given up")
        return incoming.received_for_good()

    def attach_incoming(
        self, record: WorkerRecord, session_id: str, link: StreamLink, arrived: int, leftover: bytes
    ) -> None:
        """A caller's connection is ready to be used."""
        peer = self._peers.add(record)
        with peer.lock:
            channel = peer.incoming
            if peer.state == "dead" or (self._peers.connector.stopping.is_set() and not _resumes(peer, session_id)):
                channel = None  # given up while it was being admitted, or we leave: nothing more is read from it
            elif channel is None or channel.session_id != session_id:
                channel = peer.incoming = self._peers.make_channel(peer, session_id, False)
        if channel is None:
            link.close()
            return
        try:
            channel.attach(link, arrived, leftover)
            peer.note_link(link)
        except ProtocolError as error:
            link.close()
            self._peers.declare_gone(peer, str(error))


def _resumes(peer: Peer | None, session_id: str) -> bool:
    """Return True if a caller goes on with a session: it may fetch its last answers while we leave."""
    channel = None if peer is None else peer.incoming
    return channel is not None and channel.session_id == session_id and not channel.closed
