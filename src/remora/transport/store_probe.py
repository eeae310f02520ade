"""A plain connection to a c10d TCPStore, which shows that a store answers there, and that its process still lives.

torch's own client waits for an answer in native code, which no deadline of ours and no Ctrl-C ends, and writes C++ stack
traces to the terminal when the store's process ends. So torch's client is only used where a store has answered here, and
only while this connection is open: the kernel closes it when the store's process ends.

The two messages are torch's own handshake (`TCPStoreBackend.hpp`, since torch 2.3): VALIDATE with a magic number, which is
not answered, and PING, which is answered with its number. `tests/transport/test_store_probe.py` fails if torch changes that.
Programs do not: `rendezvous/store.py` does without the probe if a store of this process does not answer it either.
"""

from __future__ import annotations

import errno
import socket
import struct
import time

_VALIDATE, _PING = 0, 13
_MAGIC = 0x3C85F7CE
_NUMBER = b"\r\n\r\n"  # any four bytes would do; to these, programs that read lines (web servers, mail servers) answer, too
_SHOWN = 40
_LONGEST_TRY = 5.0  # seconds for the connection itself


class NoStore(Exception):
    """Another program than a c10d store listens there. Not an OSError: to try again would not help."""


class StoreProbe:
    """An open connection to a store that has answered. OSError if nothing listens there, NoStore if what does is no
    store, or does not answer within `seconds`."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._sock = socket.create_connection((host, port), min(seconds, _LONGEST_TRY))
        try:
            # A port without a listener answers itself, if the kernel picked the same port for our own end.
            if self._sock.getsockname() == self._sock.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there")
            self._ping(deadline, seconds)
            self._sock.setblocking(False)
        except BaseException:
            self._sock.close()
            raise

    def _ping(self, deadline: float, seconds: float) -> None:
        self._sock.sendall(struct.pack("=BI", _VALIDATE, _MAGIC) + bytes([_PING]) + _NUMBER)
        answer = b""
        while len(answer) < len(_NUMBER):
            self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._sock.recv(4096)
            except TimeoutError:
                raise NoStore(f"it sent nothing for {seconds:.1f} s") from None
            except ConnectionError as error:
                raise NoStore(f"it closed the connection ({error.strerror})") from None
            if not data:
                raise NoStore("it closed the connection")
            answer += data
        if answer != _NUMBER:
            raise NoStore(f"it answers {answer[:_SHOWN]!r}")

    @property
    def ended(self) -> bool:
        """Return True if the store's process has closed the connection, as its kernel does when it ends."""
        try:
            return not self._sock.recv(1)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection. Harmless if done twice."""
        self._sock.close()
