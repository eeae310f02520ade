"""`remora dashboard` as a user starts it: the address it prints, who gets in, how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest

from remora.testing.processes import Processes
from remora.transport.sockets import listen_tcp
from tests.dashboard.workers import group_of
from tests.eventually import eventually

COMMAND = [sys.executable, "-m", "remora", "dashboard"]


@pytest.fixture(scope="module")
def group() -> Iterator[str]:
    with Processes(2) as workers:
        eventually(lambda: group_of(workers.pid(0)))
        found = group_of(workers.pid(0))
        assert found is not None
        yield found


def ask(address: str, **headers: str) -> HTTPResponse:
    answer: HTTPResponse = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20)
    return answer


def test_the_printed_address_lets_one_browser_in_and_a_file_a_program(group: str, tmp_path: Path) -> None:
    bearer = tmp_path / "bearer"
    bearer.write_text("a-secret-of-24-characters\n")
    bearer.chmod(0o600)
    command = [*COMMAND, "--group", group, "--bearer-file", str(bearer)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}", printed)
            base = printed.partition("?")[0]
            with ask(printed) as welcome:
                cookie = welcome.headers["Set-Cookie"].partition(";")[0]
            with ask(base + "api/overview", Cookie=cookie) as answer:
                assert answer.read().count(b"worker1") > 1
            with ask(base + "metrics", Authorization="Bearer a-secret-of-24-characters") as answer:
                assert b"remora_worker_up{" in answer.read()
            for headers in ({}, {"Authorization": "Bearer another"}, {"Host": "evil.example", "Cookie": cookie}):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    ask(base + "api/overview", **headers)
                refused.value.close()
                assert refused.value.code == (421 if "Host" in headers else 403)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def complaint(*words: str) -> str:
    done = subprocess.run([*COMMAND, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_cannot_be_is_said_in_one_line(group: str, tmp_path: Path) -> None:
    assert "no group 'f00'" in complaint("--group", "f00")
    listening, address = listen_tcp("127.0.0.1", [0])
    with listening:
        assert "--port" in complaint("--group", group, "--port", str(address.port))
    short = tmp_path / "short"
    short.write_text("12345")
    short.chmod(0o600)
    assert "too short" in complaint("--group", group, "--bearer-file", str(short))
    assert "not a port" in complaint("--port", "70000")
