"""Opens sockets: listens where a worker says, connects where an address leads. Plain bytes; proof comes later."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable

from remora.errors import RendezvousError
from remora.transport.addresses import Address

BACKLOG = 1024  # a kernel that has no place for a caller does not answer it, which looks as if the host were cut off

Take = Callable[[socket.socket], None]

_inproc: dict[str, Take] = {}  # inproc: name -> function that takes the other end


def connect(address: Address, timeout: float, opened: Take = lambda sock: None) -> socket.socket:
    """Return a connected socket. Raises OSError: ConnectionRefusedError or FileNotFoundError mean that no process listens.

    `opened` gets the socket before it connects: shutting it down ends the wait.
    """
    if address.kind == "inproc":
        return _connect_inproc(address.path, opened)
    if address.kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = _unix_name(address.path)
    else:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        target = (address.host, address.port)
    try:
        opened(sock)
        sock.settimeout(timeout)
        sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_inproc(name: str, opened: Take) -> socket.socket:
    take = _inproc.get(name)
    if take is None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"no worker listens on inproc://{name} in this process")
    ours, theirs = socket.socketpair()
    try:
        opened(ours)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    take(theirs)
    return ours


def listen_inproc(name: str, take: Take) -> Address:
    """Call `take` with one end of a socket pair for every connection made to this name in this process."""
    _inproc[name] = take
    return Address("inproc", path=name)


def listens_inproc(name: str) -> bool:
    """Return True if a worker of this process listens on that name."""
    return name in _inproc


def close_inproc(name: str) -> None:
    _inproc.pop(name, None)


def forget_inproc() -> None:
    """Remove the inproc listeners of the parent, in a forked child."""
    _inproc.clear()


def listen_unix(token: str) -> tuple[socket.socket, Address]:
    """Listen on a Unix socket: in the abstract namespace where there is one, so that no file is left behind."""
    path = f"@remora-{token}" if os.path.exists("/proc/self") else f"/tmp/remora-{token}.sock"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_unix_name(path))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock, Address("unix", path=path)


def peer_process(sock: socket.socket) -> tuple[int, int] | None:
    """Return (user, process) at the other end of a Unix socket, as the kernel tells it; None where it does not."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None or sock.family != socket.AF_UNIX:
        return None
    pid, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, option, 12))
    return user, pid


def _unix_name(path: str) -> str:
    return "\0" + path[1:] if path.startswith("@") else path


def listen_tcp(host: str, ports: Iterable[int]) -> tuple[socket.socket, Address]:
    """Listen on the first free port. RendezvousError names the address if none is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tried: list[int] = []
    last: OSError | None = None
    for port in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            tried.append(port)
            last = error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
            continue
        return sock, Address("tcp", host=host, port=sock.getsockname()[1])
    shown = ", ".join(map(str, tried[:3])) + (f" … {tried[-1]}" if len(tried) > 3 else "")
    raise RendezvousError(
        f"cannot listen on {host} port {shown}: {last}. Choose another with the options host, interface and port "
        f"(or REMORA_HOST, REMORA_INTERFACE, REMORA_PORT); port 0 takes any free one."
    ) from last
