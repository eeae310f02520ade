"""Settings from the environment, and the fast paths: each can be turned off alone, and everything works without it."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remora import options
from remora.options import FastPaths, Settings

ROOT = Path(__file__).parents[1]
PATHS = list(FastPaths.turned_off())
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("REMORA_")}


class Server:
    """`tests.fast_path_server`: runs the scenario with these variables."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.fast_path_server"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=CLEAN, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, variables: dict[str, str]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), variables]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        with self._process as process:
            process.terminate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("path", PATHS)
def test_everything_works_without(path: str, server: Server, tmp_path: Path) -> None:
    assert server.run(tmp_path, dict([FastPaths.turned_off()[path]])) == {"off": [path]}


def test_everything_works_without_any_of_them(server: Server, tmp_path: Path) -> None:
    assert server.run(tmp_path, dict(FastPaths.turned_off().values())) == {"off": PATHS}


def test_all_are_taken_unless_one_is_turned_off() -> None:
    assert FastPaths.from_environment({}) == FastPaths()
    for path, (variable, off) in FastPaths.turned_off().items():
        expected = dataclasses.replace(FastPaths(), **{path: False})
        assert FastPaths.from_environment({variable: off}) == expected
        assert FastPaths.from_environment({variable: "1"}) == FastPaths()


def test_no_two_have_the_same_switch() -> None:
    variables = [variable for variable, _ in FastPaths.turned_off().values()]
    assert len(set(variables)) == len(variables)


def test_each_is_asked_for_somewhere() -> None:
    source = "".join(path.read_text() for path in Path(options.__file__).parent.rglob("*.py"))
    assert [path for path in PATHS if f"FAST_PATHS.{path}" not in source] == []


def test_make_runs_over_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("tests.switches", run_name="__main__")
    printed = capsys.readouterr().out.split()
    assert printed == ["=".join(switch) for switch in FastPaths.turned_off().values()]
    assert "REMORA_POLLER=select" in printed


class TestSettings:
    @pytest.mark.parametrize(
        ("variable", "value", "name", "expected"),
        [
            ("REMORA_HOST", "10.0.0.2", "host", "10.0.0.2"),
            ("REMORA_INTERFACE", "eth2", "interface", "eth2"),
            ("REMORA_PORT", "5-6", "port", "5-6"),
            ("REMORA_FAULTS", "drop PING * 1", "faults", "drop PING * 1"),
            ("REMORA_SHARED_MEMORY", "4096", "shared_memory", 4096),
            ("REMORA_TRANSPORTS", "unix, tcp", "transports", ["unix", "tcp"]),
            ("REMORA_INSECURE", "1", "insecure", True),
        ],
    )
    def test_the_environment_completes_them(
        self, variable: str, value: str, name: str, expected: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(options, "FAST_PATHS", FastPaths())
        monkeypatch.delenv(variable, raising=False)
        assert getattr(Settings().with_environment(), name) == getattr(Settings(), name)
        monkeypatch.setenv(variable, value)
        assert getattr(Settings().with_environment(), name) == expected

    def test_what_is_given_counts_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REMORA_HOST", "10.0.0.2")
        monkeypatch.setenv("REMORA_PORT", "5-6")
        completed = Settings(host="10.0.0.1", port=0).with_environment()
        assert (completed.host, completed.port) == ("10.0.0.1", 0)

    def test_no_shared_memory_if_that_path_is_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(options, "FAST_PATHS", FastPaths(shared_memory=False))
        assert Settings().with_environment().shared_memory == 0
