"""`remora doctor` on hosts that lack something, and the path between two ends of which one may lie."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import pytest

from remora.command import checks, host_path
from remora.command.checks import Finding, State
from remora.command.host_path import PathError, listen, measure
from remora.command.main import main
from remora.transport.addresses import Address, split_host_and_port
from tests.command.running import remora

KEY = b"k" * 32


def found(check: Callable[[], Iterator[Finding]]) -> dict[str, Finding]:
    return {each.name: each for each in check()}


def test_this_host_is_looked_at_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from remora.command.main import main; main(['doctor']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names = [line.split()[1] for line in done.stdout.splitlines() if line.split()[0] in ("ok", "warn", "fail")]
    assert {"python", "remora", "torch", "secret", "descriptors"} <= set(names)
    assert main(["doctor", "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert {"name", "state", "text", "advice"} == told[0].keys()


def test_a_host_name_that_nothing_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    finding = found(checks.addresses)["host name"]
    assert finding.state is State.WARN
    assert "/etc/hosts" in finding.advice


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMORA_INTERFACE", "nosuch0")
    finding = found(checks.addresses)["address"]
    assert finding.state is State.FAIL
    assert "nosuch0" in finding.text


def test_loopback_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMORA_HOST", "127.0.0.1")
    finding = found(checks.addresses)["address"]
    assert finding.state is State.WARN
    assert "leads other hosts to themselves" in finding.text


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("REMORA_HOST", "127.0.0.1")
        monkeypatch.setenv("REMORA_PORT", str(taken.getsockname()[1]))
        finding = found(checks.addresses)["port"]
    assert finding.state is State.FAIL
    assert "REMORA_PORT" in finding.advice


def test_a_secret_that_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMORA_SECRET", "short")
    finding = found(checks.secret)["secret"]
    assert finding.state is State.FAIL
    assert "short" not in finding.text.replace("too short", "")


def test_a_secret_that_others_can_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    path = tmp_path / "secret"
    path.write_text("s" * 32)
    path.chmod(0o666)
    monkeypatch.setenv("REMORA_SECRET_FILE", str(path))
    finding = found(checks.secret)["secret"]
    assert finding.state is State.FAIL
    assert "chmod 600" in finding.text


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert found(checks.memory)["shared memory"].state is State.WARN


def test_a_container_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_shared_memory_limit", lambda: (60 << 20, 64 << 20))
    finding = found(checks.memory)["shared memory"]
    assert finding.state is State.WARN
    assert "--shm-size" in finding.advice


@pytest.mark.parametrize(("limit", "state"), [(256, State.FAIL), (1024, State.WARN), (65536, State.OK)])
def test_few_descriptors(limit: int, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, 1 << 20))
    assert found(checks.descriptors)["descriptors"].state is state


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.3.1", State.FAIL), ("2.4.0+cpu", State.OK), ("2.13.0a0+git1", State.OK), (None, State.FAIL)],
)
def test_versions_of_torch(version: str | None, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", of)
    assert found(checks.versions)["torch"].state is state


# The path between two hosts.


class Listening:
    """`doctor --listen`, on a thread."""

    def __init__(self, key: bytes = KEY) -> None:
        self.told: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(key,))

    def _run(self, key: bytes) -> None:
        listen("127.0.0.1", range(1), key, self._tell, once=True)

    def _tell(self, text: str) -> None:
        self.told.append(text)
        self._ready.set()

    def __enter__(self) -> Listening:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def place(self) -> Address:
        host, port = split_host_and_port(self.told[0].rpartition(" ")[2])
        return Address("tcp", host=host, port=port)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_path, "MEASURE", 0.01)


@pytest.mark.usefixtures("brief")
def test_a_path_is_measured() -> None:
    with Listening() as listening:
        measured = measure(listening.place, KEY, 10)
    assert 0 < measured.round_trip <= measured.slowest < 5
    assert measured.there > 1 << 20
    assert measured.back > 1 << 20
    assert abs(measured.clock) < 5
    assert listening.told[-1].endswith("has gone")


def test_another_secret_is_told_at_both_ends() -> None:
    with Listening() as listening, pytest.raises(PathError, match="there the secret is another one"):
        measure(listening.place, b"x" * 32, 10)
    assert "do not have the same secret" in listening.told[-1]


def test_a_member_of_a_group_is_no_visitor() -> None:
    """The key is derived from the secret for this purpose: the secret itself opens nothing here."""
    secret = b"s" * 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMORA_SECRET", secret.decode())
        key = host_path.doctor_key(None)
    assert key != secret
    with Listening(key) as listening, pytest.raises(PathError):
        measure(listening.place, secret, 10)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"", b"\x00" * 100])
def test_a_stranger_ends_nothing(said: bytes) -> None:
    with Listening() as listening, socket.create_connection((listening.place.host, listening.place.port)) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert len(stranger.recv(4096)) < 4096
    assert len(listening.told) == 2


def test_what_is_in_the_way_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PathError, match="is `remora doctor --listen` running there"):
        measure(Address("tcp", host="127.0.0.1", port=port), KEY, 5)
    with pytest.raises(PathError, match="That name is not known here"):
        measure(Address("tcp", host="no-such-host.invalid", port=1), KEY, 5)
    assert "firewall" in host_path._advice(TimeoutError())


def test_from_the_command_line() -> None:
    """Two processes, by the secret of the environment."""
    secret = {"REMORA_SECRET": "of both ends, and long enough"}
    command = [sys.executable, "-m", "remora", "doctor", "--listen", "--host", "127.0.0.1", "--once"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | secret) as process:
        assert process.stdout is not None
        place = process.stdout.readline().split()[-1]
        done = remora("doctor", "--with", place, **secret)
        assert process.wait(30) == 0
    assert done.code == 0, done
    assert done.out.startswith("ok ")
    assert "throughput" in done.out
    refused = remora("doctor", "--with", place, **secret)
    assert refused.code == 1
    assert "fail" in refused.out
