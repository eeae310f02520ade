"""Floods the address it is told, from a process of its own: connections that say nothing, or half a greeting."""

from __future__ import annotations

import socket
import sys
import time
from collections import deque


def connect(address: str) -> socket.socket:
    """A connection that is under way, or made."""
    if address.startswith("@"):
        sock = socket.socket(socket.AF_UNIX)
        target: str | tuple[str, int] = "\0" + address[1:]
    else:
        sock = socket.socket(socket.AF_INET)
        target = ("127.0.0.1", int(address))
    sock.setblocking(False)
    try:
        sock.connect(target)
    except BlockingIOError:
        pass
    return sock


def flood(address: str, greeting: bytes, rate: float, seconds: float, kept: int) -> int:
    """Open connections at this rate, say this on each, and keep the last ones open. How many were made."""
    open_ones: deque[socket.socket] = deque()
    start, made = time.monotonic(), 0
    while (now := time.monotonic() - start) < seconds:
        if made >= now * rate:
            time.sleep(0.001)
            continue
        made += 1
        sock = connect(address)
        if greeting:
            try:
                sock.send(greeting)
            except OSError:
                pass
        open_ones.append(sock)
        if len(open_ones) > kept:
            open_ones.popleft().close()
    for sock in open_ones:
        sock.close()
    return made


if __name__ == "__main__":
    address, greeting, rate, seconds, kept = sys.argv[1:]
    print("ready", flush=True)
    print(flood(address, bytes.fromhex(greeting), float(rate), float(seconds), int(kept)), flush=True)
