"""How this worker proves who it is to a peer that it dials: connect, shake hands, hand over a link."""

from __future__ import annotations

import socket
import time

from remora.agent.channel import Channel
from remora.errors import AuthenticationError, ProtocolError
from remora.options import Settings
from remora.protocol.handshake import Caller, Identity, Why
from remora.rendezvous.record import WorkerRecord
from remora.transport import dial
from remora.transport.addresses import Address, host_identity
from remora.transport.stream import StreamLink
from remora.vocabulary.ids import WorkerInfo

CHUNK = 4096


class PeerRefused(ConnectionRefusedError):
    """Somebody listens there, but is not our peer any more, or has given us up."""


class Introduction:
    """This worker's identity and the group's secret."""

    def __init__(self, me: WorkerInfo, incarnation: str, settings: Settings) -> None:
        self.me = me
        self.incarnation = incarnation
        self.group = ""  # known when the group is
        self.secret = b""
        self._settings = settings

    @property
    def insecure(self) -> bool:
        return self._settings.insecure

    @property
    def identity(self) -> Identity:
        return Identity(self.me.name, self.me.id, self.incarnation, self.group)

    def to(self, record: WorkerRecord, channel: Channel) -> tuple[StreamLink, int, bytes]:
        """Dial a peer: (link, how many of our messages it has, bytes that came behind the handshake).

        ConnectionRefusedError means that nobody listens at any of its addresses; other OSErrors may pass.
        """
        problems: list[str] = []
        gone = True
        for address in self._reachable(record):
            try:
                return self._through(address, record, channel)
            except PeerRefused:
                raise
            except (ConnectionRefusedError, FileNotFoundError) as error:
                problems.append(f"{address}: {error}")
            except OSError as error:
                gone = False
                problems.append(f"{address}: {error or type(error).__name__}")
        text = f"cannot connect to {record.name} at " + "; ".join(problems or ["any address: it has none we can use"])
        raise ConnectionRefusedError(text) if gone else OSError(text)

    def is_gone(self, record: WorkerRecord) -> bool:
        """Whether nobody listens at any address of that worker. A worker that cannot be reached may still be there."""
        for address in self._reachable(record):
            try:
                dial.connect(address, self._settings.connect_timeout).close()
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError:
                pass
            return False
        return True

    def _reachable(self, record: WorkerRecord) -> list[Address]:
        """The peer's addresses that may work from here, best first."""
        same_host = record.host == host_identity()
        found = [Address.parse(text) for text in record.addresses]
        usable = [address for address in found if address.kind == "tcp" or same_host]
        wanted = self._settings.transports
        if wanted:
            usable = sorted((a for a in usable if a.kind in wanted), key=lambda a: wanted.index(a.kind))
        return [address for address in usable if address.kind != "inproc" or dial.has_room(address.path)]

    def _through(self, address: Address, record: WorkerRecord, channel: Channel) -> tuple[StreamLink, int, bytes]:
        deadline = time.monotonic() + self._settings.connect_timeout
        sock = dial.connect(address, self._settings.connect_timeout)
        try:
            wanted = Identity(record.name, record.id, record.incarnation, self.group)
            received = channel.session.received
            machine = Caller(
                self.identity, channel.session_id, received, self.secret, expected=wanted, insecure=self.insecure
            )
            self._shake(sock, machine, deadline)
            accepted = machine.result
            assert accepted is not None
            return StreamLink(sock, f"{record.name} ({address})"), accepted.received, machine.leftover
        except BaseException:
            sock.close()
            raise

    def _shake(self, sock: socket.socket, machine: Caller, deadline: float) -> None:
        sock.sendall(machine.start())
        while machine.result is None:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            data = sock.recv(CHUNK)
            if not data:
                raise ConnectionResetError("the peer closed the connection during the handshake")
            try:
                answer = machine.receive(data)
            except (AuthenticationError, ProtocolError) as error:
                if machine.refusal:
                    sock.sendall(machine.refusal)
                if machine.why in (Why.RESTARTED, Why.WORKER, Why.ADMISSION):  # not our peer any more, or not willing
                    raise PeerRefused(str(error)) from error
                raise
            if answer:
                sock.sendall(answer)
