"""Whoever else finds a worker's port: nothing they send is believed, and nobody's calls suffer."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from remora.errors import AuthenticationError
from remora.protocol.conversation import Kind, header
from remora.protocol.handshake import Identity, Initiator
from tests.eventually import eventually
from tests.processes import targets
from tests.workers import Workers

SECRET = "the secret of this group of workers"
OPTIONS = {"transports": ["tcp"], "secret": SECRET, "host": "127.0.0.1"}


@contextmanager
def knock(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
        yield connection


def everything_said(connection: socket.socket) -> bytes:
    """What the worker answers until it hangs up."""
    answer = b""
    try:
        while data := connection.recv(4096):
            answer += data
    except ConnectionResetError:
        pass  # it hung up before it had read all of it
    return answer


def hello(secret: str, version: int | None = None) -> bytes:
    start = Initiator(Identity("worker0", 0, "incarnation", "group"), "session", 0, secret.encode()).start()
    return start if version is None else start[:4] + bytes([version]) + start[5:]


GARBAGE = {
    "zeros": b"\0" * 1000,
    "text": b"hello?\r\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200,
    "pickle": b"\x80\x05cos\nsystem\n",
    "a megabyte": b"RMRA" + b"\xff" * (1 << 20),
    "a frame": struct.pack("<QHHIQQQd", 2**60, 0x102, 0, 0, 1, 1, 0, 0.0),
    "an endless handshake": header(Kind.HELLO, True, 0xFFFF),
}


@pytest.fixture(scope="module")
def group() -> Iterator[Workers]:
    """Two workers, for all of these tests: surviving one stranger after the other is the point."""
    with Workers(2, options=OPTIONS) as workers:
        yield workers


@pytest.fixture
def port(group: Workers) -> int:
    (found,) = group.run(1, targets.listening_ports)
    return found


def answers(group: Workers) -> None:
    """Calls go on, both ways."""
    assert group.run(0, targets.timed_call, "worker1", targets.double, 2)[1:] == ("", "4")
    assert group.run(1, targets.timed_call, "worker0", targets.double, 2)[1:] == ("", "4")


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_at_once(group: Workers, port: int, garbage: bytes) -> None:
    start = time.monotonic()
    with knock(port) as connection:
        try:
            connection.sendall(garbage)
        except ConnectionError:
            pass  # it did not want to hear all of it
        everything_said(connection)
    assert time.monotonic() - start < 3.0
    answers(group)


def test_a_wrong_secret_is_refused_and_reported(group: Workers, port: int) -> None:
    with knock(port) as connection:
        connection.sendall(hello("another secret, as long as the right one"))
        answer = everything_said(connection)
    assert b"SECRET" in answer, "the stranger is told why"
    eventually(lambda: "do not have the same secret" in group.output(1))
    assert SECRET not in group.output(1)
    answers(group)


def test_another_version_of_the_protocol_is_refused_by_its_number(group: Workers, port: int) -> None:
    with knock(port) as connection:
        connection.sendall(hello(SECRET, version=77))
        answer = everything_said(connection)
    assert b"VERSION" in answer
    eventually(lambda: "the peer 77" in group.output(1))
    answers(group)


def test_a_member_of_another_group_is_refused(group: Workers, port: int) -> None:
    with knock(port) as connection:
        connection.sendall(hello(SECRET))
        answer = everything_said(connection)
    assert b"GROUP" in answer
    answers(group)


@pytest.mark.parametrize("say", [b"", b"RM", hello(SECRET)[:40]], ids=["nothing", "two bytes", "half a handshake"])
def test_whoever_falls_silent_costs_nobody_anything(group: Workers, port: int, say: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(knock(port)).sendall(say)
        answers(group)


def test_a_flood_of_connections_does_not_stop_calls(group: Workers, port: int) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            try:
                stack.enter_context(knock(port))
            except OSError:
                pass  # refused: its right
        answers(group)
    answers(group)


def test_what_strangers_did_is_forgotten(group: Workers, port: int) -> None:
    """After all of the above, and once the last have been thrown out, there is nothing left of them."""
    before = group.run(1, descriptors)
    for _ in range(50):
        with knock(port) as connection:
            connection.sendall(b"x")
    eventually(lambda: group.run(1, descriptors) <= before)
    assert group.run(1, threads) < 20


def descriptors() -> int:
    import os

    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    import threading

    return threading.active_count()


def test_a_silent_stranger_is_thrown_out_in_time() -> None:
    with Workers(1, options={**OPTIONS, "connect_timeout": 0.5}) as workers:
        (port,) = workers.run(0, targets.listening_ports)
        with knock(port) as connection:
            start = time.monotonic()
            assert connection.recv(1) == b""
            assert 0.3 < time.monotonic() - start < 3.0


def test_a_worker_that_comes_late_gets_through_a_flood() -> None:
    """Three hundred silent connections are open when the first call to the worker is made."""
    with Workers(2, options=OPTIONS) as workers, ExitStack() as stack:
        (port,) = workers.run(1, targets.listening_ports)
        for _ in range(300):
            stack.enter_context(knock(port))
        seconds, kind, words = workers.run(0, targets.timed_call, "worker1", targets.double, 2, timeout=8.0)
        assert (kind, words) == ("", "4")
        assert seconds < 3.0


def test_a_worker_with_another_secret_gets_an_error_and_the_others_live_on() -> None:
    def secret(rank: int) -> str:
        return f"the secret of worker {rank // 2}, long enough"

    with Workers(3, join=False) as workers:
        for rank in (0, 1):
            workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, workers.init_method, secret=secret(rank))
        with pytest.raises(AuthenticationError, match=r"worker2. .rank 2. cannot join .*same secret"):
            workers.run(2, targets.join_dynamic, "worker2", 2, workers.init_method, secret=secret(2))
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4
        workers.run(1, targets.leave)
        workers.run(0, targets.leave)


def test_a_worker_with_a_secret_does_not_talk_to_one_without() -> None:
    def options(rank: int) -> dict[str, object]:
        return OPTIONS if rank else {"transports": ["tcp"], "host": "127.0.0.1", "insecure": True}

    with Workers(2, join=False, options=options) as workers:
        for pending in [workers.join(rank) for rank in range(2)]:
            with pytest.raises(AuthenticationError, match=r"no secret, and insecure: 'worker0' \(rank 0\)"):
                pending.result(20)


def test_insecure_workers_talk_if_all_of_them_say_so() -> None:
    with Workers(2, options={"transports": ["tcp"], "host": "127.0.0.1", "insecure": True}) as workers:
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4


def test_a_worker_without_a_secret_does_not_listen_where_others_can_reach_it() -> None:
    with Workers(1, join=False) as workers:
        with pytest.raises(RuntimeError, match="secret") as caught:
            workers.run(0, try_to_listen_everywhere, workers.init_method)
        assert type(caught.value).__name__ == "AuthenticationError"


def try_to_listen_everywhere(init_method: str) -> None:
    from remora import rpc

    options = rpc.RemoraRpcBackendOptions(init_method=init_method, host="0.0.0.0")
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
