"""Opening the store: every way to name it, and everything that can be wrong with the place."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from remora.errors import MeetingUnknown, RendezvousError
from remora.rendezvous import store as stores
from remora.rendezvous.group import DynamicGroup, StaticGroup
from remora.rendezvous.store import open_store, rank_and_size
from tests.rendezvous.meeting_places import at_once, record


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    stores._hosted.clear()


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which something listens that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, port: int) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return monkeypatch


def refusal(url: str, rank: int = 0, world_size: int | None = 2, timeout: float = 0.3) -> str:
    with pytest.raises(RendezvousError) as caught:
        open_store(url, rank, world_size, timeout)
    assert url in str(caught.value)
    assert f"rank {rank} of" in str(caught.value)
    return str(caught.value)


def waiting_threads() -> list[str]:
    """Threads left behind in native code. One that comes back while the interpreter ends aborts the process."""
    return [thread.name for thread in threading.enumerate() if thread.name == "remora-waits"]


def check_shared(first: Store, second: Store) -> None:
    first.set("key", "value")
    assert second.get("key") == b"value"


# --- the ways to name it ---


@pytest.mark.parametrize("world_size", [2, None, 0])
def test_a_file(tmp_path: Path, world_size: int | None) -> None:
    url = f"file://{tmp_path}/store"
    check_shared(open_store(url, 0, world_size, 20), open_store(url, 1, world_size, 20))


def test_the_file_of_a_static_group_goes_with_the_last_worker(tmp_path: Path) -> None:
    opened = [open_store(f"file://{tmp_path}/store", rank, 2, 20) for rank in range(2)]
    assert os.listdir(tmp_path) == ["store"]
    opened.clear()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("world_size", [2, None])
def test_a_host_and_port(port: int, world_size: int | None) -> None:
    url = f"tcp://127.0.0.1:{port}"
    other, first = at_once(lambda: open_store(url, 1, world_size, 20), lambda: open_store(url, 0, world_size, 20))
    check_shared(first.result(), other.result())


@pytest.mark.parametrize("world_size", [2, None])
def test_the_environment(environment: pytest.MonkeyPatch, world_size: int | None) -> None:
    first = open_store("env://", 0, world_size, 20)
    environment.setenv("RANK", "1")
    environment.setenv("WORLD_SIZE", "7")  # of a process group; ours may be another
    check_shared(first, open_store("env://", -1, world_size, 20))


def test_what_a_worker_is_told_counts_more_than_the_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RANK", "1")
    assert open_store("env://", 0, 2, 20) is not None  # a host: a client would have found nobody


def test_a_launcher_may_host_the_store(environment: pytest.MonkeyPatch, port: int) -> None:
    launcher = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20))
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    check_shared(launcher, open_store("env://", 0, 2, 20))


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6(port: int) -> None:
    url = f"tcp://[::1]:{port}"
    check_shared(open_store(url, 0, 2, 20), open_store(url, 1, 2, 20))


@pytest.mark.parametrize(("timeout", "days"), [(20.0, 20 / 86400), (0.0, 365), (math.inf, 365), (1e18, 365)])
def test_the_timeout_is_that_of_the_store(tmp_path: Path, timeout: float, days: float) -> None:
    opened = open_store(f"file://{tmp_path}/store", 0, 1, timeout)
    assert opened.timeout == timedelta(days=days)


# --- something is missing ---


@pytest.mark.parametrize("world_size", [2, None])
def test_a_missing_rank(tmp_path: Path, environment: pytest.MonkeyPatch, world_size: int | None) -> None:
    for url in (f"file://{tmp_path}/store", "tcp://127.0.0.1:23456"):
        with pytest.raises(ValueError, match="rank parameter missing"):
            open_store(url, -1, world_size, 20)
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        open_store("env://", -1, world_size, 20)


def test_a_missing_address(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="MASTER_PORT"):
        open_store("env://", 0, 2, 20)
    with pytest.raises(ValueError, match="port number missing"):
        open_store("tcp://127.0.0.1", 0, 2, 20)
    with pytest.raises(ValueError, match="path missing"):
        open_store("file://", 0, 2, 20)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_cannot_be_is_not_waited_for(environment: pytest.MonkeyPatch, rank: int) -> None:
    environment.setenv("MASTER_PORT", "99999")
    with pytest.raises(ValueError, match="99999"):
        open_store("env://", rank, 2, 5.0)


def test_an_unknown_way() -> None:
    assert "No rendezvous handler for carrier-pigeon" in refusal("carrier-pigeon://coop")


# --- the place is no good ---


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    start = time.monotonic()
    text = refusal(f"file://{tmp_path}/missing/store", world_size=None)
    assert f"{tmp_path}/missing/store: No such file or directory" in text
    assert "a dynamic group" in text
    assert time.monotonic() - start < 5


def test_a_place_that_is_no_plain_file(tmp_path: Path) -> None:
    assert "Is a directory" in refusal(f"file://{tmp_path}")
    os.mkfifo(tmp_path / "pipe")
    assert "not a plain file" in refusal(f"file://{tmp_path}/pipe")


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", fail)
    assert "Read-only file system" in refusal(f"file://{tmp_path}/store")


def test_a_full_disk(full_disk: Path) -> None:
    start = time.monotonic()
    assert "no space left" in refusal(f"file://{full_disk}/store", timeout=20)
    assert time.monotonic() - start < 5


def test_a_disk_that_is_full_in_spite_of_what_it_says(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_FREE_BYTES_NEEDED", 0)
    assert "No space left on device" in refusal(f"file://{full_disk}/store", timeout=20)


def test_a_disk_that_fills_up_while_the_group_forms(full_disk: Path) -> None:
    """The file is damaged then, and PyTorch would read it for ever: whoever meets the error touches it no more."""
    (full_disk / "ballast").unlink()
    store = FileStore(str(full_disk / "store"), -1)
    store.set("ballast", "x" * 7900)
    start = time.monotonic()
    with pytest.raises(RendezvousError, match="No space left on device"):
        StaticGroup(store, 2, 20).join(record("a" * 100, 0))
    assert time.monotonic() - start < 5
    os.unlink(full_disk / "store")  # or the end of the store would read it, too


def test_nobody_listens(port: int) -> None:
    start = time.monotonic()
    text = refusal(f"tcp://127.0.0.1:{port}", rank=1)
    assert f"nothing listened at 127.0.0.1:{port} within 0.3 s" in text
    assert "Rank 0 hosts the store" in text
    assert time.monotonic() - start < 5


def test_a_stranger_listens_where_the_store_should_be(taken: int) -> None:
    start = time.monotonic()
    text = refusal(f"tcp://127.0.0.1:{taken}", rank=1)
    assert "is not a c10d store: it sent nothing for 0.3 s. Choose another port" in text
    assert not waiting_threads()
    assert time.monotonic() - start < 5


def test_a_stranger_is_found_out_long_before_a_long_timeout(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.rendezvous.store._ANSWER_TIMEOUT", 0.5)
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"not a c10d store: it sent nothing for 0\.5 s"):
        open_store(f"tcp://127.0.0.1:{taken}", 1, 2, timeout=300.0)
    assert time.monotonic() - start < 10


def test_a_port_in_use(taken: int) -> None:
    start = time.monotonic()
    text = refusal(f"tcp://127.0.0.1:{taken}")
    assert f"port {taken} is in use" in text
    assert "address already in use" in text
    assert time.monotonic() - start < 5
    assert not waiting_threads()


def test_a_port_in_use_by_the_store_of_somebody_else(port: int) -> None:
    other = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20))
    other.set("their", "key")
    assert f"port {port} is in use" in refusal(f"tcp://127.0.0.1:{port}", timeout=20)


def test_a_port_in_use_by_the_process_group_of_this_process(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank 0 may be another process than ours."""
    theirs = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    check_shared(theirs, open_store(f"tcp://127.0.0.1:{port}", 0, 2, 20))


@pytest.fixture
def web_server() -> Iterator[int]:
    """A program that answers, and is no store."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield server.server_address[1]
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_that_answers_is_found_out_at_once(
    web_server: int, rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    text = refusal(f"tcp://127.0.0.1:{web_server}", rank, timeout=60)
    assert time.monotonic() - start < 5
    assert "another program" in text.lower()
    assert "it answers b" in text
    assert not waiting_threads()
    assert "c10d" not in capfd.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve(
    rank: int, environment: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("MASTER_ADDR", "nowhere.invalid")
    environment.setattr("remora.rendezvous.store.NAME_TIMEOUT", 0.2)

    def unknown(*_: object, **__: object) -> None:  # (a name server may take its time, and is none of ours)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    environment.setattr(socket, "getaddrinfo", unknown)
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"no host named 'nowhere\.invalid' is known here.*MASTER_ADDR"):
        open_store("env://", rank, 2, 60, name_timeout=0.2)
    assert time.monotonic() - start < 5
    assert "c10d" not in capfd.readouterr().err


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-3, 2), (-3, None)])
def test_a_rank_outside_the_world_is_told_before_anything_is_waited_for(
    rank: int, size: int | None, port: int
) -> None:
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=f"rank {rank} is outside the world"):
        open_store(f"tcp://127.0.0.1:{port}", rank, size, 20)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("size", [2, None])
def test_a_rank_0_that_is_not_at_the_address_of_the_store_is_told_so(
    size: int | None, environment: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own client would wait there for as long as a group may take to form, in silence, and write a C++ trace."""
    environment.setenv("MASTER_ADDR", "192.0.2.1")  # of no host (RFC 5737)
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1 is no address of this host.*MASTER_ADDR.*start rank 0 there"):
        open_store("env://", 0, size, 60, name_timeout=0.5)
    assert time.monotonic() - start < 10
    assert "c10d" not in capfd.readouterr().err
    assert not waiting_threads()


def test_an_address_that_leads_here_on_a_way_round_will_do(environment: pytest.MonkeyPatch) -> None:
    environment.setattr("remora.rendezvous.store.is_own_address", lambda host: False)
    first = open_store("env://", 0, 2, 20)
    check_shared(first, open_store("env://", 1, 2, 20))
    assert stores.hosts(first)


def test_an_address_without_a_scheme_is_shown() -> None:
    text = refusal("127.0.0.1:29500")
    assert "init_method='127.0.0.1:29500', which begins with no scheme. Give env://, tcp://host:port" in text


def test_the_variables_are_named_that_gave_a_rank_outside_the_world(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(RendezvousError, match=r"rank 5 \(RANK\) is outside the world: world_size is 2 \(WORLD_SIZE\)"):
        rank_and_size(-1, None, {"RANK": "5", "WORLD_SIZE": "2"})
    with pytest.raises(RendezvousError, match=r"rank 5 \(RANK\) is outside the world: world_size is 2, so"):
        rank_and_size(-1, 2, {"RANK": "5", "WORLD_SIZE": "9"})


def test_numbers_of_numpy_are_ranks_as_in_pytorch() -> None:
    numbers: Any = (np.int64(1), np.int32(2))
    found = rank_and_size(*numbers, {})
    assert found == (1, 2)
    assert [type(number) for number in found] == [int, int]


def test_a_missing_setting_is_our_error_under_few_frames(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("MASTER_ADDR")
    environment.delenv("MASTER_PORT")
    with pytest.raises(RendezvousError, match=r"MASTER_ADDR and MASTER_PORT are not set.*remora\.launch") as caught:
        open_store("env://", 1, 2, 20)
    assert isinstance(caught.value, ValueError)  # as torch's own is
    assert caught.value.__cause__ is None
    assert len(caught.traceback) < 6


@pytest.mark.parametrize(
    ("given", "environment_says", "meant"),
    [
        ((-1, None), {"RANK": "1", "WORLD_SIZE": "3"}, (1, 3)),
        ((-1, 2), {"RANK": "1", "WORLD_SIZE": "3"}, (1, 2)),
        ((0, 2), {"RANK": "1", "WORLD_SIZE": "3"}, (0, 2)),
        ((0, None), {"RANK": "1", "WORLD_SIZE": "3"}, (0, None)),  # this is how a program asks for a dynamic group
        ((-1, 0), {"RANK": "1", "WORLD_SIZE": "3"}, (1, 0)),
        ((-1, None), {"RANK": "1"}, (1, None)),
    ],
)
def test_the_environment_says_what_the_program_does_not(
    given: tuple[int, int | None], environment_says: dict[str, str], meant: tuple[int, int | None]
) -> None:
    assert rank_and_size(*given, environment_says) == meant


@pytest.mark.parametrize(
    ("rank", "size", "kind", "text"),
    [
        ("0", 2, TypeError, "rank must be an int, got str '0'"),
        (True, 2, TypeError, "rank must be an int, got bool True"),
        (0, "2", TypeError, "world_size must be an int, got str '2'"),
        (0, 2.0, TypeError, "world_size must be an int, got float 2.0"),
        (0, -3, MeetingUnknown, "world_size must not be negative, got -3"),
    ],
)
def test_rank_and_size_of_the_wrong_kind_are_named(rank: Any, size: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        rank_and_size(rank, size, {})


def test_a_place_of_another_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(RendezvousError, match=re.escape("Give env://, tcp://host:port or file:///path")):
        open_store("http://somewhere:1", 0, 2, 5.0)


def test_rank_and_size_from_the_environment_serve_any_meeting_place(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("RANK", "1")
    assert open_store(f"file://{tmp_path}/store", -1, 2, 20) is not None
    environment.setenv("RANK", "one")
    with pytest.raises(ValueError, match="RANK is not a number: 'one'"):
        open_store(f"file://{tmp_path}/store", -1, 2, 20)


WAIT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test run was told to ignore
from remora.rendezvous.store import open_store
print("ready", flush=True)
open_store(sys.argv[1], 1, 2, 60)
"""


@pytest.mark.parametrize("listening", [False, True])
def test_ctrl_c_ends_the_wait_without_noise(port: int, taken: int, listening: bool) -> None:
    url = f"tcp://127.0.0.1:{taken if listening else port}"
    with subprocess.Popen([sys.executable, "-c", WAIT, url], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert errors.strip().endswith("KeyboardInterrupt")
    assert "c10d" not in errors


# --- one group after the other ---


def test_a_host_that_comes_again_finds_its_store(port: int) -> None:
    """ReleaseQueue the first store does not end it: others may already wait there for the next group."""
    url = f"tcp://127.0.0.1:{port}"
    first = open_store(url, 0, 2, 20)
    other = open_store(url, 1, 2, 20)
    other.set("next", "group")
    del first
    assert open_store(url, 0, 2, 20).get("next") == b"group"


@pytest.mark.parametrize("change", [{"_MAGIC": 0x01020304}, {"_PING": 250}, {"_VALIDATE": 250}])
def test_a_store_whose_handshake_the_probe_does_not_know_is_used_without_it(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: dict[str, int]
) -> None:
    """As with a later torch: its own client and its store understand each other, and the probe does not."""
    monkeypatch.setattr(stores, "_OWN_ANSWER_TIMEOUT", 1.0)
    monkeypatch.setattr(stores, "_ANSWER_TIMEOUT", 1.0)
    for name, value in change.items():
        monkeypatch.setattr(f"remora.transport.store_probe.{name}", value)
    url = f"tcp://127.0.0.1:{port}"

    def join(rank: int, turn: int) -> Any:
        return StaticGroup(open_store(url, rank, 2, 20), 2, 20).join(record(f"w{turn}-{rank}", rank))

    for turn in range(2):  # in the second, rank 0 finds the store of the first
        joined = at_once(*(lambda rank=rank, turn=turn: join(rank, turn) for rank in range(2)))
        assert all([each.name for each in done.result()] == [f"w{turn}-{rank}" for rank in range(2)] for done in joined)
    assert not caplog.records


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_groups_meet_again_and_again_at_one_place(kind: str, port: int, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{tmp_path}/store"

    def join(rank: int, turn: int) -> Any:
        group = StaticGroup(open_store(url, rank, 3, 20), 3, 20)
        return group.join(record(f"w{turn}-{rank}", rank))

    for turn in range(3):
        joined = at_once(*(lambda rank=rank, turn=turn: join(rank, turn) for rank in range(3)))
        assert all([each.name for each in done.result()] == [f"w{turn}-{rank}" for rank in range(3)] for done in joined)


def test_a_dynamic_group_meets_there_too(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    first, second = record("a", 0), record("b", 1)
    ours = DynamicGroup(open_store(url, 0, None, 20))
    ours.join(first)
    assert DynamicGroup(open_store(url, 1, None, 20)).join(second) == [first, second]
