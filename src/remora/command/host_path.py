"""The path between two hosts: `remora doctor --listen` on one, `remora doctor --with HOST:PORT` on the other.

Both prove the group's secret as workers do, with a key of its own that is derived from it: so what is said here opens no
worker's door. Then the one that came asks, and the one that listens answers: one byte says what, eight how much.

    E n     n bytes follow, and come back       (round trip; n is small)
    T       comes back with the wall clock
    U n     n bytes follow, and n comes back    (throughput there)
    D n     n bytes come back                   (throughput back)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from remora.errors import AuthenticationError, ProtocolError, RemoraError
from remora.protocol.handshake import Hello, Identity, Initiator, Responder
from remora.rendezvous.secret import find_secret, loopback_secret
from remora.transport import sockets
from remora.transport.addresses import Address, host_and_port

TIMEOUT = 10.0  # seconds without a byte
ROUND_TRIPS = 200
CHUNK = 1 << 20
MOST = 1 << 30  # bytes that are sent at a time
MEASURE = 0.5  # seconds that a measurement of throughput takes at least
_ASK = struct.Struct(">cQ")
_TIME = struct.Struct(">d")
_KEY = b"remora doctor's key"
_GROUP = "doctor"


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a path. Times are seconds, rates bytes a second."""

    connect: float
    round_trip: float  # the one in the middle
    slowest: float  # of a hundred
    there: float
    back: float
    clock: float  # by how much the other host's clock is ahead


class PathError(RemoraError):
    """The other host could not be reached, or did not prove the secret. The text says what to do."""


def doctor_key(secret_file: str | None) -> bytes:
    """Return the key that both ends prove."""
    found = find_secret(None, secret_file)
    return hmac.new(loopback_secret() if found is None else found.value, _KEY, hashlib.sha256).digest()


def _identity(name: str) -> Identity:
    return Identity(name, 0, secrets.token_hex(8), _GROUP)


# The end that listens.


def listen(host: str, ports: range, key: bytes, tell: Callable[[str], None], once: bool = False) -> None:
    """Answer one host after the other, until Ctrl-C."""
    listening, address = sockets.listen_tcp(host, ports)
    with listening:
        tell(f"listening on {host_and_port(address.host, address.port)}")
        while True:
            sock, where = listening.accept()
            peer = host_and_port(*where[:2])
            with sock:
                try:
                    _prepare(sock)
                    _admit(sock, key)
                    tell(f"{peer} has come")
                    _answer(sock)
                    tell(f"{peer} has gone")
                except (RemoraError, OSError) as error:
                    tell(f"{peer}: {error}")
            if once:
                return


def _admit(sock: socket.socket, key: bytes) -> None:
    def take(hello: Hello) -> int:
        return 0

    machine = Responder(_identity("doctor"), take, key)
    _converse(sock, machine)


def _answer(sock: socket.socket) -> None:
    while head := sock.recv(1):
        what, count = _ASK.unpack(head + _exactly(sock, _ASK.size - 1))
        if count > MOST:
            raise ProtocolError("it wants more at a time than there may be")
        if what == b"E":
            sock.sendall(_exactly(sock, min(count, CHUNK)))
        elif what == b"T":
            sock.sendall(_TIME.pack(time.time()))
        elif what == b"U":
            _swallow(sock, count)
            sock.sendall(_ASK.pack(b"U", count))
        elif what == b"D":
            _pour(sock, count)
        else:
            raise ProtocolError(f"it asks for {what!r}, which is nothing")


# The end that measures.


def measure(place: Address, key: bytes, timeout: float) -> Measured:
    """Connect, prove, and measure. PathError says what is in the way."""
    began = time.perf_counter()
    try:
        sock = sockets.connect(place, timeout)
    except OSError as error:
        raise PathError(f"cannot reach {place}: {error}. {_advice(error)}") from error
    with sock:
        connected = time.perf_counter() - began
        try:
            _prepare(sock)
            _converse(sock, Initiator(_identity("visitor"), secrets.token_hex(8), 0, key))
            return _measure(sock, connected)
        except AuthenticationError as error:
            raise PathError(f"{place} is reached, and there the secret is another one: {error}") from error
        except (ProtocolError, OSError) as error:
            raise PathError(
                f"{place} is reached, but `remora doctor --listen` does not answer there: {error}"
            ) from error


def _advice(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "The host answers, and nothing listens on that port: is `remora doctor --listen` running there?"
    if isinstance(error, TimeoutError):
        return "Nothing comes back: a firewall may drop it, or the address leads elsewhere."
    if isinstance(error, socket.gaierror):
        return "That name is not known here: check the name service, or give an address."
    return "Check routes and firewalls between the two hosts."


def _measure(sock: socket.socket, connected: float) -> Measured:
    trips = sorted(_round_trip(sock) for _ in range(ROUND_TRIPS))
    began = time.time()
    sock.sendall(_ASK.pack(b"T", 0))
    (theirs,) = _TIME.unpack(_exactly(sock, _TIME.size))
    ended = time.time()
    return Measured(
        connect=connected,
        round_trip=median(trips),
        slowest=trips[len(trips) * 99 // 100],
        there=_throughput(lambda count: _upload(sock, count)),
        back=_throughput(lambda count: _download(sock, count)),
        clock=theirs - (began + ended) / 2,
    )


def _round_trip(sock: socket.socket) -> float:
    began = time.perf_counter()
    sock.sendall(_ASK.pack(b"E", 8) + b"remora..")
    _exactly(sock, 8)
    return time.perf_counter() - began


def _throughput(move: Callable[[int], None]) -> float:
    """Bytes a second: move more and more, until it takes long enough to be measured."""
    count = CHUNK
    while True:
        began = time.perf_counter()
        move(count)
        took = time.perf_counter() - began
        if took >= MEASURE or count >= MOST:
            return count / took
        count = min(count * 4, MOST)


def _upload(sock: socket.socket, count: int) -> None:
    sock.sendall(_ASK.pack(b"U", count))
    _pour(sock, count)
    _exactly(sock, _ASK.size)


def _download(sock: socket.socket, count: int) -> None:
    sock.sendall(_ASK.pack(b"D", count))
    _swallow(sock, count)


# Bytes.


def _prepare(sock: socket.socket) -> None:
    sock.settimeout(TIMEOUT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as a link between workers is


def _converse(sock: socket.socket, machine: Initiator | Responder) -> None:
    """Shake hands. What follows the handshake is asked only when its answer has come, so nothing is left over."""
    try:
        if isinstance(machine, Initiator):
            sock.sendall(machine.start())
        while machine.result is None:
            sock.sendall(machine.receive(sock.recv(4096)))
    except RemoraError:
        if machine.refusal:
            sock.sendall(machine.refusal)
        raise


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        data += more
    return bytes(data)


def _swallow(sock: socket.socket, count: int) -> None:
    room = memoryview(bytearray(CHUNK))
    while count:
        taken = sock.recv_into(room[: min(count, CHUNK)])
        if not taken:
            raise ConnectionError("the other end has closed the connection")
        count -= taken


def _pour(sock: socket.socket, count: int) -> None:
    data = memoryview(bytes(CHUNK))
    while count:
        part = min(count, CHUNK)
        sock.sendall(data[:part])
        count -= part
