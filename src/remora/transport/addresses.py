"""Chooses the address on which a worker listens and the address that others dial. It looks at this host, but opens no
connection.

Without a secret a worker listens on loopback only: any process that reaches the port could run code (`check_exposure`).
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from remora.errors import AuthenticationError, RendezvousError

if sys.platform == "linux":
    import fcntl

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "")
_SIOCGIFADDR = 0x8915
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_PLACE = re.compile(r"(?:\[([^][/@]+)\]|([^][:/@]+)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """An address to dial: `tcp://host:port`, `unix:///path`, `unix://@name` (no file, Linux), or `inproc://name`."""

    kind: Literal["tcp", "unix", "inproc"]
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return f"{self.kind}://{host_and_port(self.host, self.port) if self.kind == 'tcp' else self.path}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read what `str` writes. ValueError says what is wrong with the text."""
        scheme, found, rest = text.partition("://")
        if found and scheme == "unix" and len(rest) > 1 and rest[0] in "/@":
            return cls("unix", path=rest)
        if found and scheme == "inproc" and rest:
            return cls("inproc", path=rest)
        if found and scheme == "tcp":
            return cls("tcp", *split_host_and_port(rest))
        raise ValueError(
            f"Not an address: {text!r}. Give tcp://host:port, unix:///path, unix://@name or inproc://name."
        )


def host_and_port(host: str, port: int) -> str:
    """Return `host:port`, with the brackets an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_and_port(text: str) -> tuple[str, int]:
    """Do the reverse of `host_and_port`."""
    match = _PLACE.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"Not a host and a port: {text!r}. An IPv6 address goes in brackets: [::1]:29500.")
    return match[1] or match[2], int(match[3])


def parse_ports(ports: str | int | None) -> range:
    """The ports to try, in order: `29600-29650`, `29600`, or 0 (and None) for any free one."""
    chosen = "0" if ports is None else str(ports)
    match = _PORTS.fullmatch(chosen.replace(" ", ""))
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last or last > 65535 or (first == 0 and last > 0):
        raise ValueError(f"Not a port or a range of ports: {chosen!r}. Give 29600, 29600-29650, or 0 for any free one.")
    return range(first, last + 1)


def host_identity() -> str:
    """Return a text that is equal for two workers exactly if they can share Unix sockets: the same running kernel and
    network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        # A machine without a network card gets a random number here: then its workers talk TCP, which works too.
        return f"{socket.gethostname()}/{uuid.getnode():012x}"


def choose_bind_host(
    host: str | None,
    interface: str | None,
    env: Mapping[str, str] = os.environ,
    *,
    secured: bool,
    master_host: str | None = None,
) -> str:
    """The host to listen on: as told, else one that other hosts reach if `secured`.

    `secured` means that the workers on other hosts know the secret as well, or that the user said insecure.
    """
    if host:
        return _resolve(host)
    if interface:
        return interface_address(interface)
    if not secured:
        return LOOPBACK
    # Set for other libraries, so a hint and no order: it must not expose a worker that has no secret.
    if interface := env.get("TP_SOCKET_IFNAME") or env.get("GLOO_SOCKET_IFNAME"):
        return interface_address(interface.split(",")[0].strip())
    return reachable_host(master_host)


def reachable_host(master_host: str | None = None) -> str:
    """Return the address under which other hosts find this one, as far as it is known; else loopback."""
    own = next((each for each in _addresses(socket.gethostname()) if is_own_address(each)), LOOPBACK)
    if is_loopback(own) and master_host and not is_loopback(master_host):
        return _address_toward(master_host) or own  # Debian maps the host's own name to 127.0.1.1
    return own


def advertised_host(bind_host: str) -> str:
    """Return the host for others to dial when listening on `bind_host`: 'all interfaces' cannot be dialled."""
    return reachable_host() if bind_host in WILDCARDS else bind_host


def interface_address(name: str) -> str:
    """Return the address of a network interface, IPv4 if it has one."""
    existing = [each for _, each in socket.if_nameindex()]
    if name not in existing:
        raise RendezvousError(f"There is no network interface {name!r} here. There are: {', '.join(existing)}.")
    address = _ipv4_of(name) or _ipv6_of(name)
    if address is None:
        raise RendezvousError(
            f"The network interface {name!r} has no address that can be found. Name another one "
            f"({', '.join(existing)}), or the host itself with REMORA_HOST."
        )
    return address


def is_loopback(host: str) -> bool:
    """Return True if only this host can reach what listens there. A name counts if all its addresses do."""
    addresses = _addresses(host)
    return bool(addresses) and all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)


def is_own_address(host: str) -> bool:
    """Return True if `host` is this host: a process can listen only on addresses of its own host."""
    return host not in WILDCARDS and any(_can_bind(each) for each in _addresses(host))


def check_exposure(master_host: str | None, bind_host: str, secret: bytes | None, insecure: bool) -> None:
    """Raise if a group that others can reach, or that spans hosts, has no secret and was not started as insecure."""
    if secret or insecure:
        return
    if not is_loopback(bind_host):
        reason = f"it would listen on {bind_host or 'all interfaces'!r}, where other hosts can reach it"
    elif master_host and not is_loopback(master_host) and not is_own_address(master_host):
        reason = f"its group meets on another host, {master_host!r}"
    else:
        return
    raise AuthenticationError(
        f"This worker refuses to start without a secret, because {reason}, and any process that reaches a worker can run "
        "code on it. Set REMORA_SECRET (or REMORA_SECRET_FILE, or the options secret or secret_file) to the same value on "
        'every worker; python -c "import secrets; print(secrets.token_hex(32))" makes one. If every user of the network may '
        "run code here, set insecure=True in the options (or REMORA_INSECURE=1)."
    )


def _addresses(host: str) -> list[str]:
    if host in WILDCARDS:
        return [host or "0.0.0.0"]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for names that cannot be names
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _resolve(host: str) -> str:
    """Return the address of a host by its name; IPv4 where it has both, as most clusters mean it."""
    addresses = _addresses(host.strip("[]"))
    if not addresses:
        raise RendezvousError(f"Cannot listen on {host!r}: no such host is known here.")
    return next((each for each in addresses if "." in each), addresses[0])


def _can_bind(address: str) -> bool:
    try:
        with _probe_socket(address) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _address_toward(host: str) -> str | None:
    """Return this host's address on the way to another. Connecting a datagram socket sends nothing; it picks the route."""
    for address in _addresses(host):
        try:
            with _probe_socket(address) as probe:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _probe_socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)


def _ipv4_of(interface: str) -> str | None:
    if sys.platform != "linux":
        return None
    with _probe_socket(LOOPBACK) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(interface: str) -> str | None:
    """Return the widest-reaching IPv6 address: the third field is the scope, 00 for an address that is valid everywhere."""
    try:
        with open("/proc/net/if_inet6") as file:
            rows = [line.split() for line in file]
    except OSError:
        return None
    mine = sorted((row[3], row[0]) for row in rows if row[5] == interface)
    if not mine:
        return None
    scope, digits = mine[0]
    address = str(ipaddress.IPv6Address(int(digits, 16)))
    return f"{address}%{interface}" if scope == "20" else address  # a link-local address says nothing without its link
