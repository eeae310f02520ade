"""Who is answered: a browser that showed the token, under a name that is ours, and only for reading."""

from __future__ import annotations

import re
import socket

import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from remora.dashboard.guard import SECURITY_HEADERS, host_name
from remora.dashboard.server import Dashboard
from tests.dashboard.client import get, let_in
from tests.dashboard.serving import Served
from tests.dashboard.simulated import SimulatedGroup

PATHS = ["/", "/calls", "/api/overview", "/api/snapshot", "/stream/overview", "/metrics", "/static/app.js"]


@pytest.fixture
def dashboard() -> Dashboard:
    return Dashboard(SimulatedGroup(3), bearer=b"0123456789abcdef")


@pytest.mark.parametrize("path", PATHS)
def test_without_a_cookie_nothing_is_told(dashboard: Dashboard, path: str) -> None:
    for headers in (
        {},
        {"cookie": f"{dashboard.access.cookie}=wrong"},
        {"cookie": "\x01;;="},
        {"authorization": "Bearer wrong"},
    ):
        answer = get(dashboard, path, **headers)
        assert answer.status == 403
        assert "worker" not in answer.text


def test_a_token_is_good_once(dashboard: Dashboard) -> None:
    token = dashboard.access.make_token()
    first = get(dashboard, f"/?token={token}")
    assert first.status == 200
    cookie = first.headers["set-cookie"]
    assert re.search(r";\s*HttpOnly", cookie, re.I)
    assert re.search(r";\s*SameSite=strict", cookie, re.I)
    assert token not in first.text  # it is not what the browser keeps, nor in the address that follows
    second = get(dashboard, f"/?token={token}")
    assert second.status == 403
    assert "set-cookie" not in second.headers


def test_a_browser_that_was_let_in_may_open_its_address_again(dashboard: Dashboard) -> None:
    token = dashboard.access.make_token()
    cookie = get(dashboard, f"/?token={token}").headers["set-cookie"].partition(";")[0]
    again = get(dashboard, f"/?token={token}", cookie=cookie)
    assert again.status == 200
    assert "url=/" in again.text


def test_cookies_of_others_on_this_host_do_no_harm(dashboard: Dashboard) -> None:
    """Browsers send the cookies of all ports, and some programs write what no standard allows."""
    ours = let_in(dashboard)
    for others in ('a={"b": 1}', "a[b]=c", "x", 'quoted="half', "\xe4=\xf6", "a=b,c=d"):
        for cookie in (f"{others}; {ours}", f"{ours}; {others}"):
            assert get(dashboard, "/api/overview", cookie=cookie).status == 200, cookie


@pytest.mark.parametrize("token", ["", "wrong", "x" * 10_000, "%00", "ümlaut"])
def test_a_wrong_token_gets_no_cookie_and_uses_none_up(dashboard: Dashboard, token: str) -> None:
    right = dashboard.access.make_token()
    answer = get(dashboard, f"/?token={token}")
    assert answer.status == 403
    assert "set-cookie" not in answer.headers
    assert get(dashboard, f"/?token={right}").status == 200


def test_each_token_lets_one_browser_in(dashboard: Dashboard) -> None:
    assert get(dashboard, "/api/overview", cookie=let_in(dashboard)).status == 200
    assert get(dashboard, "/api/overview", cookie=let_in(dashboard)).status == 200


def test_a_token_does_not_work_on_other_paths(dashboard: Dashboard) -> None:
    assert get(dashboard, f"/api/overview?token={dashboard.access.make_token()}").status == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]:1"]
)
def test_a_name_that_is_not_ours_is_refused_even_with_the_cookie(dashboard: Dashboard, host: str) -> None:
    """DNS rebinding: the page of another site reads from its own name, which now leads here."""
    cookie = let_in(dashboard)
    for path in PATHS:
        answer = get(dashboard, path, host=host, cookie=cookie)
        assert answer.status == 421
        assert "worker" not in answer.text
    token = dashboard.access.make_token()
    assert get(dashboard, f"/?token={token}", host=host).status == 421
    assert get(dashboard, f"/?token={token}").status == 200  # not used up


@pytest.mark.parametrize(
    "host",
    ["localhost:/static/style.css?", "localhost:80#", "localhost:80]", "[::1", "[::1]x", "[::1]:80:80", "localhost:80:80"],
)
def test_a_host_that_is_no_name_and_port_is_refused(dashboard: Dashboard, host: str) -> None:
    for path in PATHS:
        assert get(dashboard, path, host=host, cookie=let_in(dashboard)).status == 421


@pytest.mark.parametrize("path", PATHS)
def test_the_path_that_is_asked_for_counts_whatever_the_url_of_the_request_says(
    dashboard: Dashboard, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starlette before 1.0.1 makes `request.url` of the `Host` header, unchecked (CVE-2026-48710): a request could name a
    file that all may read there."""
    claimed = property(lambda request: URL("http://localhost:/static/style.css?/calls"))
    monkeypatch.setattr(Request, "url", claimed)
    assert get(dashboard, path).status == 403


@pytest.mark.parametrize("path", ["/static/style.css%3f", "/static/style.css%23", "/static/style.css/../app.js"])
def test_a_path_that_begins_as_a_public_one_does_is_not_public(dashboard: Dashboard, path: str) -> None:
    assert get(dashboard, path).status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:8080", "[::1]:8080", "localhost."])
def test_names_of_this_host_are_ours_on_any_port(dashboard: Dashboard, host: str) -> None:
    assert get(dashboard, "/api/overview", host=host, cookie=let_in(dashboard)).status == 200


def test_a_name_that_was_allowed_is_ours() -> None:
    dashboard = Dashboard(SimulatedGroup(1), hosts={"Login.Cluster"})
    assert (
        get(dashboard, "/api/overview", host="login.cluster:80", cookie=get_cookie(dashboard, "login.cluster")).status
        == 200
    )
    assert get(dashboard, "/", host="localhost").status == 421


def get_cookie(dashboard: Dashboard, host: str) -> str:
    return get(dashboard, f"/?token={dashboard.access.make_token()}", host=host).headers["set-cookie"].partition(";")[0]


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_there_is_nothing_to_change(dashboard: Dashboard, method: str) -> None:
    cookie = let_in(dashboard)
    for path in PATHS:
        assert get(dashboard, path, method=method, cookie=cookie).status == 405


def test_only_a_get_uses_a_token_up(dashboard: Dashboard) -> None:
    token = dashboard.access.make_token()
    for method in ("HEAD", "POST"):  # a program that looks where an address leads asks for its head
        assert get(dashboard, f"/?token={token}", method=method).status == 405
    assert get(dashboard, f"/?token={token}").status == 200


def test_a_program_shows_the_bearer_token(dashboard: Dashboard) -> None:
    assert get(dashboard, "/metrics", authorization="Bearer 0123456789abcdef").status == 200
    assert get(dashboard, "/metrics", authorization="Basic 0123456789abcdef").status == 403
    without = Dashboard(SimulatedGroup(1))
    for shown in ("Bearer", "Bearer ", "Bearer None"):
        assert get(without, "/metrics", authorization=shown).status == 403


def test_strangers_cannot_fill_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    with Served(SimulatedGroup(1)) as served:
        for asked in (b"GET /stream/overview HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n", b"nonsense\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", served.port), 10.0) as stranger:
                stranger.sendall(asked)
                assert stranger.recv(12) in (b"HTTP/1.1 403", b"HTTP/1.1 400")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static/..%5c..%5cguard.py",
        "/static//etc/passwd",
        "/static/....//server.py",
        "/static/%00",
        "/static/vendor/uPlot.js",
        "/static/README.md",
        "/../../../etc/passwd",
        "/static/.",
    ],
)
def test_no_path_leads_to_another_file(dashboard: Dashboard, path: str) -> None:
    answer = get(dashboard, path, cookie=let_in(dashboard))
    assert answer.status == 404
    assert "import" not in answer.text


@pytest.mark.parametrize("path", [*PATHS[:4], "/metrics", "/static/app.js", "/nothing", "/?token=wrong"])
def test_every_answer_tells_the_browser_what_it_may_not_do(dashboard: Dashboard, path: str) -> None:
    for cookie in ("", let_in(dashboard)):
        answer = get(dashboard, path, cookie=cookie)
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name.lower()] == value
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] in ("no-store", "no-cache")


def test_two_dashboards_of_one_host_have_cookies_of_their_own() -> None:
    assert Dashboard(SimulatedGroup(1)).access.cookie != Dashboard(SimulatedGroup(1)).access.cookie


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("a:1", "a"), ("A.", "a"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("", ""), (":80", ""), ("a.:80", "a"), ("a:b", ""),
        ("[a", ""),
    ],
)  # fmt: skip
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name
