"""What this machine can do at best: no RPC, only what any RPC in Python must do at least."""

from __future__ import annotations

import socket
import subprocess
import sys

from benchmarks.measure import Reading, Setting, Unit, latencies, time_each

SIZE = 64
COPIED = 128 * 10**6


def ping_pong(setting: Setting) -> list[Reading]:
    """64 bytes to another Python process and back, over a pair of Unix sockets, without pickling."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", f"from benchmarks.suite.floor import pong; pong({theirs.fileno()})"]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as peer:
        theirs.close()

        def exchange() -> None:
            ours.sendall(bytes(SIZE))
            ours.recv(SIZE)

        time_each(exchange, 1000)
        readings = latencies(time_each(exchange, setting.effort(10000, 3000)))
        ours.shutdown(socket.SHUT_WR)
        peer.wait(timeout=10)
    return readings


def pong(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as link:
        while message := link.recv(SIZE):
            link.sendall(message)


def memcpy(setting: Setting) -> list[Reading]:
    """128 MB from and to memory that has been touched before, by one thread."""
    source, target = bytearray(COPIED), memoryview(bytearray(COPIED))

    def copy() -> None:
        target[:] = source

    time_each(copy, 2)
    return [Reading("128 MB", COPIED / min(time_each(copy, setting.effort(8, 3))), Unit.BYTES_PER_SECOND)]
