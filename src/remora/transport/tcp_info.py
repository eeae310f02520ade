"""Asks the kernel if the host at the other end of a TCP connection answers. Changes nothing.

A frozen process is silent, but its kernel goes on acknowledging what arrives; a host that is cut off or switched off does
not. TCP_USER_TIMEOUT would not tell them apart: it also ends a connection whose other end acknowledges faithfully that
its buffers are full, as those of a frozen process are.
"""

from __future__ import annotations

import socket
import struct

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_FIELDS = struct.Struct("=BBBBBBBB16I")  # up to tcpi_rtt (linux/tcp.h)
_RETRANSMITS, _PROBES, _LAST_ACK_RECEIVED, _ROUND_TRIP = 2, 3, 20, 23
_AT_LEAST = 2  # one retransmission happens to the best of hosts


def unanswered(sock: socket.socket) -> float:
    """Return for how many seconds the other host has acknowledged nothing, though the kernel sent something again and again.

    0.0 if it answers, if nothing is due, or if it cannot be told here (no TCP, or not Linux).
    """
    fields = _ask(sock)
    if fields is None or max(fields[_RETRANSMITS], fields[_PROBES]) < _AT_LEAST:
        return 0.0
    return float(fields[_LAST_ACK_RECEIVED]) / 1000


def round_trip(sock: socket.socket) -> float | None:
    """Return the seconds that a packet takes to the other host and back, smoothed, as the kernel sees it; None where it
    does not."""
    fields = _ask(sock)
    return float(fields[_ROUND_TRIP]) / 1e6 if fields is not None and fields[_ROUND_TRIP] else None


def _ask(sock: socket.socket) -> tuple[int, ...] | None:
    if _TCP_INFO is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _FIELDS.size)
    except OSError:  # closed meanwhile
        return None
    return _FIELDS.unpack(data) if len(data) == _FIELDS.size else None
