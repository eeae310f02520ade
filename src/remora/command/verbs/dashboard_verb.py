"""`remora dashboard`: web pages that show a group."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
import webbrowser
from collections.abc import Iterator
from typing import TYPE_CHECKING

from remora.command.arguments import add_group, find_group
from remora.command.usage_errors import UsageError, extra
from remora.errors import RendezvousError
from remora.rendezvous.secret import find_secret
from remora.transport.addresses import host_and_port, is_loopback
from remora.transport.sockets import listen_tcp

if TYPE_CHECKING:
    from remora.dashboard.server import Dashboard

NAME = "dashboard"
HELP = "web pages: workers, calls, what waits for what, timeline, references, links"
EXAMPLE = "remora dashboard --open"

ANY = ("0.0.0.0", "::")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_group(parser)
    add = parser.add_argument
    add("--port", type=_port, default=0, metavar="N", help="where the pages are (any port that is free)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="the address to listen on (127.0.0.1: only this host)")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers reach this host, too",
    )
    add("--bearer-file", metavar="FILE", help="programs (Prometheus) may show its content as bearer token")
    add("--open", action="store_true", help="open the pages in the browser of this host")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"not a port: {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    with extra("dashboard", NAME):
        from remora.dashboard.guard import LOOPBACK
        from remora.dashboard.server import Dashboard
    bearer = find_secret(None, options.bearer_file, {}) if options.bearer_file else None
    with contextlib.closing(find_group(options)) as group:
        dashboard = Dashboard(
            group,
            hosts={*LOOPBACK, *_names_of(options.host), *options.allow_host},
            bearer=None if bearer is None else bearer.value,
        )
        try:
            listening, address = listen_tcp(options.host, [options.port])
        except RendezvousError as error:
            text = f"cannot listen on {options.host} port {options.port}: {error.__cause__}; choose another with --port"
            raise UsageError(text) from None
        shown = "127.0.0.1" if options.host in ANY else options.host
        pages = _Pages(dashboard, f"http://{host_and_port(shown, address.port)}/", options.open)
        try:
            asyncio.run(pages.serve(listening, not is_loopback(options.host)))
        except KeyboardInterrupt:
            print()
    return 0


def _names_of(host: str) -> set[str]:
    """The names under which a browser may reach that address."""
    return {socket.gethostname(), socket.getfqdn()} if host in ANY else {host}


class _Pages:
    """The dashboard with a terminal: prints its address, and a new one at each Enter."""

    def __init__(self, dashboard: Dashboard, address: str, open_it: bool) -> None:
        self._dashboard = dashboard
        self._address = address
        self._open = open_it

    async def serve(self, listening: socket.socket, exposed: bool) -> None:
        def ready() -> None:
            address = self._tell()
            if exposed:
                print(
                    "Other hosts can reach this address, and nothing is encrypted on the way. A tunnel is safer:\n"
                    "  ssh -L 8080:127.0.0.1:PORT THIS-HOST   with  remora dashboard --port PORT",
                    file=sys.stderr,
                )
            if self._open:
                webbrowser.open(address)

        with self._new_address_at_enter():
            await self._dashboard.serve(listening, ready)

    def _tell(self) -> str:
        address = f"{self._address}?token={self._dashboard.access.make_token()}"
        print(f"{address}\n  good for one browser; Enter prints another, Ctrl-C ends", flush=True)
        return address

    @contextlib.contextmanager
    def _new_address_at_enter(self) -> Iterator[None]:
        if not sys.stdin.isatty():
            yield
            return
        loop = asyncio.get_running_loop()

        def read() -> None:
            if sys.stdin.readline():
                self._tell()
            else:
                loop.remove_reader(sys.stdin)

        # A job in the background may not read from its terminal: it would be stopped.
        before = signal.signal(signal.SIGTTIN, signal.SIG_IGN) if hasattr(signal, "SIGTTIN") else None
        loop.add_reader(sys.stdin, read)
        try:
            yield
        finally:
            loop.remove_reader(sys.stdin)
            if before is not None:
                signal.signal(signal.SIGTTIN, before)
