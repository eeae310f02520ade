"""A dashboard that answers on this host while a test runs, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from remora.dashboard.sampler import Group
from remora.dashboard.server import Dashboard
from remora.transport.sockets import listen_tcp


class Served:
    """`with Served(group) as served: browser.goto(served.address())`."""

    def __init__(self, group: Group, interval: float = 0.25) -> None:
        self.dashboard = Dashboard(group, interval=interval)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dashboard")

    def __enter__(self) -> Served:
        listening, address = listen_tcp("127.0.0.1", [0])
        self._listening = listening
        self.port = address.port
        self._thread.start()
        assert self._ready.wait(20.0)
        return self

    def _run(self) -> None:
        asyncio.run(self.dashboard.serve(self._listening, self._ready.set))

    def address(self) -> str:
        """Good for one browser."""
        return f"{self.base}/?token={self.dashboard.access.make_token()}"

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.dashboard.stop()
        self._thread.join(20.0)
        assert not self._thread.is_alive()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
