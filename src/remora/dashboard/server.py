"""The web server: the page, what it shows as a stream of moments, the same as JSON, and the metrics of the whole group.

    GET /…                  the page, whatever it shows: the browser draws it from a stream
    GET /stream/PAGE/…      server-sent events: what a page shows, again at each moment
    GET /api/PAGE/…         the same once, as JSON
    GET /api/snapshot       the whole snapshot, as `remora.observer.model` describes it
    GET /metrics            for Prometheus
    GET /static/NAME        scripts and styles, read from the package when the server starts

There is no other route, and none that changes anything. `remora.dashboard.guard` stands before all of them.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from importlib import resources
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from remora.dashboard.guard import LOOPBACK, Access, Guard
from remora.dashboard.moment import Moment
from remora.dashboard.pages import PAGES
from remora.dashboard.sampler import INTERVAL, Group, Sampler
from remora.errors import RemoraError
from remora.observer import openmetrics
from remora.observer.model import PARTS
from remora.observer.snapshot_json import to_json

TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
PUBLIC = frozenset({"/static/style.css", "/static/icon.svg"})  # what the page of a refusal shows


class Dashboard:
    """Serves the pages of one group to those that `access` lets in."""

    def __init__(
        self,
        group: Group,
        *,
        hosts: Iterable[str] = LOOPBACK,
        bearer: bytes | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self.sampler = Sampler(group, interval)
        self.access = Access(bearer)
        self._files = _read_files()
        guard = Middleware(Guard, access=self.access, hosts=frozenset(map(str.lower, hosts)), public=PUBLIC)
        routes = [
            Route("/static/{name}", self._file),
            Route("/api/snapshot", self._snapshot),
            Route("/api/{page}", self._once),
            Route("/api/{page}/{rest:path}", self._once),
            Route("/stream/{page}", self._stream),
            Route("/stream/{page}/{rest:path}", self._stream),
            Route("/metrics", self._metrics),
            Route("/", self._shell),
            Route("/{page}", self._shell),
            Route("/{page}/{rest:path}", self._shell),
        ]
        self.app = Starlette(routes=routes, middleware=[guard])
        self._server: uvicorn.Server | None = None

    async def serve(self, listening: socket.socket, ready: Callable[[], object] = lambda: None) -> None:
        """Answer requests until `stop` or a signal. Closes the socket."""
        config = uvicorn.Config(
            self.app,
            log_level="error",  # a warning is about a request that makes no sense, and any stranger can send many
            access_log=False,
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config, ready, self.sampler.close)
        await self._server.serve([listening])

    def stop(self) -> None:
        """End `serve`. Any thread may call this."""
        if self._server is not None:
            self._server.should_exit = True

    # Routes.

    async def _shell(self, request: Request) -> Response:
        if request.path_params.get("page", "overview") not in PAGES:
            return PlainTextResponse("There is no such page.\n", 404)
        return self._tell_file(request, "index.html")

    async def _file(self, request: Request) -> Response:
        return self._tell_file(request, request.path_params["name"])

    def _tell_file(self, request: Request, name: str) -> Response:
        if name not in self._files:
            return PlainTextResponse("There is no such file.\n", 404)
        content, tag = self._files[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=TYPES[name[name.rindex(".") :]])

    async def _once(self, request: Request) -> Response:
        page, path = _place(request)
        if page not in PAGES:
            return JSONResponse({"error": "There is no such page."}, 404)
        try:
            moment = await self.sampler.ask_once(PAGES[page].PARTS)
        except RemoraError as error:
            return JSONResponse({"error": str(error)}, 503)
        return Response(self._view(moment, page, path, dict(request.query_params)), media_type="application/json")

    async def _stream(self, request: Request) -> Response:
        page, path = _place(request)
        if page not in PAGES:
            return PlainTextResponse("There is no such page.\n", 404)
        told = self._tell(page, path, dict(request.query_params))
        return StreamingResponse(told, media_type="text/event-stream")

    async def _tell(self, page: str, path: tuple[str, ...], arguments: Mapping[str, str]) -> AsyncIterator[bytes]:
        parts = PAGES[page].PARTS
        sampler = self.sampler
        async with sampler.watching(parts):
            if sampler.moment is not None and sampler.fresh(parts):
                yield b"data: " + self._view(sampler.moment, page, path, arguments) + b"\n\n"
            while not sampler.closed:
                await sampler.changed()
                if sampler.problem:
                    yield b"event: problem\ndata: " + json.dumps(sampler.problem).encode() + b"\n\n"
                elif sampler.moment is not None and sampler.moment.parts.issuperset(parts):
                    yield b"data: " + self._view(sampler.moment, page, path, arguments) + b"\n\n"

    def _view(self, moment: Moment, page: str, path: tuple[str, ...], arguments: Mapping[str, str]) -> bytes:
        """The JSON of a page for a moment. Two readers of one page get the same bytes."""
        key = page, path, tuple(sorted(arguments.items()))
        found = moment.views.get(key)
        if found is None:
            shown = {**moment.summary(), "page": page, "view": PAGES[page].view(moment, path, arguments)}
            found = moment.views[key] = json.dumps(shown, separators=(",", ":"), allow_nan=False).encode()
        return found

    async def _snapshot(self, request: Request) -> Response:
        parts = set(request.query_params.get("parts", ",".join(PARTS)).split(","))
        if unknown := sorted(parts - set(PARTS)):
            return JSONResponse(
                {"error": f"There are no parts {', '.join(unknown)}: choose from {', '.join(PARTS)}."}, 400
            )
        try:
            moment = await self.sampler.ask_once(parts)
        except RemoraError as error:
            return JSONResponse({"error": str(error)}, 503)
        return JSONResponse(to_json(moment.snapshot))

    async def _metrics(self, request: Request) -> Response:
        modern = "application/openmetrics-text" in request.headers.get("accept", "")
        try:
            moment = await self.sampler.ask_once(openmetrics.QUERY.parts)
        except RemoraError as error:
            return PlainTextResponse(f"{error}\n", 503)
        content_type = openmetrics.OPENMETRICS if modern else openmetrics.TEXT
        return Response(openmetrics.render(moment.snapshot, modern), headers={"Content-Type": content_type})


class _Server(uvicorn.Server):
    """Says when it listens, and lets streams end before it waits for them."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object], close: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._close = close

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._close()
        await super().shutdown(sockets)


def _place(request: Request) -> tuple[str, tuple[str, ...]]:
    """The page of a request, and what follows. A name may have a slash in it: the path counts as it was sent."""
    raw = request.scope["raw_path"].decode("latin-1").partition("?")[0]
    page, *rest = (unquote(each) for each in raw.split("/")[2:])
    return page, tuple(each for each in rest if each)


def _read_files() -> dict[str, tuple[bytes, str]]:
    """All files that are served, by name: no request reads from the disk, so none can name another file."""
    found: dict[str, tuple[bytes, str]] = {}
    static = resources.files("remora.dashboard") / "static"
    for folder in (static, static / "vendor"):
        for file in folder.iterdir():
            if file.is_file() and file.name[file.name.rfind(".") :] in TYPES:
                content = file.read_bytes()
                found[file.name] = content, f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return found
