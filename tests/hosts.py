"""Hosts on this one machine for tests: network namespaces on a switch of their own, whose cables can be pulled.

    with Hosts(3) as hosts:
        hosts.enter(1)  # in a process of its own: from now on it lives on host 1, at hosts.address(1)
        hosts.cut(1)  # no packet passes, and nobody is told
        hosts.heal(1)

Needs root and iproute2; `why_not()` says what is missing. Nothing outside the namespaces is touched.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from itertools import count
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_FOLDER = "/var/run/netns"
_BLOCKED, _FORWARDING = "0", "3"
_serial = count()


@cache
def why_not() -> str:
    """Why there can be no hosts here; nothing if there can."""
    missing = [tool for tool in ("ip", "bridge", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} (iproute2) not found"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    try:
        with Hosts(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        words = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"this machine does not allow network namespaces: {words.strip()}"


class Hosts:
    """`n` hosts, 0 to n-1, with the addresses 10.203.0.1 and up, all plugged into one switch."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._name = f"remora-{os.getpid()}-{next(_serial)}"
        self._made: list[str] = []

    def address(self, host: int) -> str:
        return f"10.203.0.{host + 1}"

    def namespace(self, host: int | str) -> str:
        return f"{self._name}-{host}"

    def enter(self, host: int) -> None:
        """Move the calling thread, and those it will start, to a host."""
        enter(self.namespace(host))

    # The cables.

    def cut(self, host: int) -> None:
        """From now on nothing passes to or from this host. It notices nothing: its network card is well."""
        self._port(host, _BLOCKED)

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        self._port(host, _FORWARDING)

    def impair(self, host: int, *how: str) -> None:
        """Have the cable to a host lose, delay or reorder packets, as `tc netem` understands it ("loss", "20%")."""
        _run("tc", "-n", self.namespace("switch"), "qdisc", "replace", "dev", f"port{host}", "root", "netem", *how)

    def repair(self, host: int) -> None:
        """Undo `impair`."""
        _run("tc", "-n", self.namespace("switch"), "qdisc", "del", "dev", f"port{host}", "root")

    def _port(self, host: int, state: str) -> None:
        _run("bridge", "-n", self.namespace("switch"), "link", "set", "dev", f"port{host}", "state", state)

    # Coming and going.

    def __enter__(self) -> Hosts:
        try:
            self._make("switch")
            _run("ip", "-n", self.namespace("switch"), "link", "add", "br0", "type", "bridge", "forward_delay", "0")
            _run("ip", "-n", self.namespace("switch"), "link", "set", "br0", "up")
            for host in range(self.n):
                self._plug_in(host)
        except BaseException:
            self.close()
            raise
        return self

    def _make(self, host: int | str) -> None:
        _run("ip", "netns", "add", self.namespace(host))
        self._made.append(self.namespace(host))
        _run("ip", "-n", self.namespace(host), "link", "set", "lo", "up")

    def _plug_in(self, host: int) -> None:
        self._make(host)
        space, switch, port = self.namespace(host), self.namespace("switch"), f"port{host}"
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")

    def close(self) -> None:
        """Take everything down. Processes that live there keep a namespace without a name until they end."""
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], capture_output=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def enter(namespace: str) -> None:
    """Move the calling thread, and those it will start, into a namespace."""
    descriptor = os.open(f"{_FOLDER}/{namespace}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
