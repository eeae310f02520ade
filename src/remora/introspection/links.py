"""The connections of a worker, and the memory it keeps. Every figure is derived from counts that are kept anyway."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from remora.agent.peers.peer import Peer
from remora.introspection.subject import Subject
from remora.observer.model import LinkStatus, Memory
from remora.recorder import MADE, Recorder
from remora.transport import tcp_info
from remora.transport.link import StreamLink

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def links(subject: Subject) -> Iterator[LinkStatus]:
    """Yield what is known of the connection to each other worker."""
    shortest = shortest_calls(subject.agent.recorder)
    for peer in subject.agent.peers.all():
        if peer is not subject.agent.peers.me:
            yield _status(peer, subject.agent.clock.now(), shortest.get(peer.name))


def _status(peer: Peer, now: float, shortest: float | None) -> LinkStatus:
    channels = peer.channels()
    sessions = [channel.session for channel in channels]
    present = [link for channel in channels if (link := channel.link) is not None]
    trips = [trip for link in present if (trip := tcp_info.round_trip(link.sock)) is not None]
    shared_memory = peer.shared_memory
    return LinkStatus(
        peer=peer.name,
        state=peer.condition,
        transport=transport_of(present[0]) if present else None,
        reason=peer.reason or peer.suspicion,
        bytes_sent=sum(session.kept_total for session in sessions),
        bytes_received=sum(channel.bytes_received() for channel in channels),
        messages_sent=sum(session.sent for session in sessions),
        messages_received=sum(session.received for session in sessions),
        queued_messages=sum(len(each.session.kept) + len(each.outbox.batched) for each in channels),
        queued_bytes=sum(link.outbox_bytes for link in present),
        paused=any(channel.paused for channel in channels),
        round_trip=min(trips) if trips else shortest,
        reconnects=sum(max(channel.links - 1, 0) for channel in channels),
        silent_for=max(now - max(link.last_heard for link in present), 0.0) if present else None,
        shared_lent=0 if shared_memory is None else shared_memory.lent_bytes(),
        shared_borrowed=0 if shared_memory is None else shared_memory.borrowed_bytes(),
        device_lent=0 if shared_memory is None else shared_memory.device_exchange.lent_bytes(),
    )


def transport_of(link: StreamLink) -> str | None:
    """Return the name of the transport that carries a link."""
    sock = link.sock
    if sock.family != getattr(socket, "AF_UNIX", None):
        return "tcp"
    try:
        return "unix" if sock.getsockname() or sock.getpeername() else "inproc"  # (a pair of sockets has no names)
    except OSError:
        return None  # it was closed meanwhile


def shortest_calls(recorder: Recorder) -> dict[str, float]:
    """Return the shortest call of late to each worker: no message took longer, there and back."""
    found: dict[str, float] = {}
    for end, peer, _, _, _, _, began, ended, _, _, _, _ in recorder.ends():
        if end == MADE and ended - began < found.get(peer, float("inf")):
            found[peer] = ended - began
    return found


def memory(subject: Subject) -> Memory:
    """Return the bytes that a worker keeps."""
    counters = subject.agent.counters()
    shared_memory = [peer.shared_memory for peer in subject.agent.peers.all() if peer.shared_memory is not None]
    return Memory(
        resident=resident(),
        shared_own=int(counters["agent.shared_memory_bytes"]),
        shared_lent=int(counters["agent.shared_memory_lent_bytes"]),
        shared_borrowed=int(counters["agent.shared_memory_borrowed_bytes"]),
        buffers=int(counters["agent.warm_memory_bytes"]),
        device_lent=sum(each.device_exchange.lent_bytes() for each in shared_memory),
    )


def resident() -> int:
    """Return the bytes of this process that are in memory; 0 if that is not known here."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError, ValueError):
        return 0


