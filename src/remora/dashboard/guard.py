"""Decides which requests the dashboard answers: of browsers that showed a token, under a name of ours, and that only read.

The address that the command prints has a token. It is good for one browser, once: the browser gets a cookie for it, which
scripts cannot read and other sites cannot send. A program (Prometheus, curl) shows a secret of a file as a bearer token
instead; there is none unless the command was given a file.

A page of another site may make a browser send requests here, and by a name of its own that leads to this address (DNS
rebinding) it may even read the answers. So the `Host` of every request has to be a name that we know, whatever else it has.
"""

from __future__ import annotations

import hmac
import re
import secrets
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

# No script, style or connection but our own; no frame around us. `data:` is for the icon of the page.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

# A name or an address, and perhaps a port.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+?)\.?)(?::[0-9]*)?", re.ASCII | re.IGNORECASE)

# A redirect would lose the cookie where the address was clicked on a page of another site (a terminal in a browser): the
# browser keeps a Strict cookie from the whole chain. A page that leads on starts a chain of its own.
_WELCOME = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Remora</title>
<link rel="icon" href="/static/icon.svg"><meta http-equiv="refresh" content="0;url=/"></html>"""
_REFUSED = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Remora: not let in</title><link rel="icon" href="/static/icon.svg">
<link rel="stylesheet" href="/static/style.css"><main class="alone">
<h1>This browser is not let in</h1>
<p>{reason}</p>
<p>Press Enter in the terminal where <code>remora dashboard</code> runs: it prints a new address, good for one browser.</p>
</main></html>"""


class Access:
    """The tokens and cookies of one dashboard."""

    def __init__(self, bearer: bytes | None = None) -> None:
        # Browsers keep cookies by host, whatever the port: the name tells those of several dashboards apart.
        self.cookie = f"remora_dashboard_{secrets.token_hex(4)}"
        self._session = secrets.token_urlsafe(32)
        self._tokens: set[str] = set()
        self._bearer = bearer

    def make_token(self) -> str:
        """A token that is good once."""
        token = secrets.token_urlsafe(24)
        self._tokens.add(token)
        return token

    def exchange(self, token: str) -> str | None:
        """The cookie for a token, which is used up; None for a wrong one."""
        found = [each for each in self._tokens if _equal(each, token)]
        self._tokens.difference_update(found)
        return self._session if found else None

    def admits(self, headers: Headers) -> bool:
        """Return True if a request has the cookie or the bearer token."""
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if self._bearer is not None and scheme.lower() == "bearer":
            return hmac.compare_digest(shown.strip().encode(), self._bearer)
        # Cookies of other programs on this host come, too, whatever is in them: these are read as browsers do.
        shown = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        return _equal(shown, self._session)


class Guard:
    """Stands before the pages. Adds the headers that keep a browser from doing what a page of ours never does."""

    def __init__(self, app: ASGIApp, access: Access, hosts: frozenset[str], public: frozenset[str]) -> None:
        self._app = app
        self._access = access
        self._hosts = hosts
        self._public = public  # paths that the page of a refusal needs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = self._refusal(scope, Headers(scope=scope))
            await (self._app if refusal is None else refusal)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the error to send instead of an answer; None if the request gets one."""
        # What is asked for is in `scope`. `Request.url` is not: it is made of the `Host` header, which may name any path.
        path: str = scope["path"]
        if host_name(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse(
                "This is not the host that the request names. If you reach the dashboard by another name, tell it so: "
                "remora dashboard --allow-host NAME\n",
                status_code=421,
            )
        if scope["method"] != "GET":
            return PlainTextResponse("The dashboard only shows: use GET.\n", 405, {"Allow": "GET"})
        if path == "/" and (token := parse_qs(scope["query_string"].decode("latin-1")).get("token")):
            return self._let_in(token[0], headers)
        if path in self._public or self._access.admits(headers):
            return None
        return _refused("Its address has no token, or the dashboard was started anew.")

    def _let_in(self, token: str, headers: Headers) -> Response:
        session = self._access.exchange(token)
        if session is not None:
            answer = HTMLResponse(_WELCOME)
            answer.set_cookie(self._access.cookie, session, httponly=True, samesite="strict", path="/")
            return answer
        if self._access.admits(headers):  # it opens its address again
            return HTMLResponse(_WELCOME)
        return _refused("The token of this address is wrong, or was used before.")


def host_name(host: str) -> str:
    """The name in a `Host` header, without the port: lower case, no dot at its end, no brackets. Empty if it is none."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def _refused(reason: str) -> Response:
    return HTMLResponse(_REFUSED.format(reason=reason), status_code=403)


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return send_with_headers
