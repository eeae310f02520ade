"""Requests to the dashboard without a network: straight into its ASGI application."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from remora.dashboard.server import Dashboard


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def get(
    dashboard: Dashboard, target: str, *, method: str = "GET", host: str = "127.0.0.1:8080", **headers: str
) -> Answer:
    """Ask once. A header's name may have underscores."""
    path, _, query = target.partition("?")
    sent = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8080),
    }  # fmt: skip
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(dashboard.app(scope, receive, send))
    begun, *rest = messages
    answered = {name.decode().lower(): value.decode() for name, value in begun["headers"]}
    return Answer(begun["status"], answered, b"".join(message.get("body", b"") for message in rest))


def let_in(dashboard: Dashboard) -> str:
    """The cookie that a browser gets for a fresh token."""
    answer = get(dashboard, f"/?token={dashboard.access.make_token()}")
    assert answer.status == 200
    return answer.headers["set-cookie"].partition(";")[0]
