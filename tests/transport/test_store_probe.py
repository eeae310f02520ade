"""The probe speaks two messages of torch's store: this fails if torch changes them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from remora.transport.store_probe import NoStore, StoreProbe
from tests import leaks


@pytest.fixture(scope="module", autouse=True)
def native_code_is_warm() -> None:
    """The first TCPStore of a process opens descriptors that stay: they are libuv's, and no leak of a test."""
    with leaks.kept():
        TCPStore("127.0.0.1", 0, None, True)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize("libuv", [True, False])
def test_a_store_answers_and_its_end_is_seen(libuv: bool) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, use_libuv=libuv)
    probe = StoreProbe("127.0.0.1", store.port, 10.0)
    store.set("key", "value")
    assert store.get("key") == b"value"  # what the probe said did no harm
    assert not probe.ended
    del store
    deadline = time.monotonic() + 10
    while not probe.ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    probe.close()


def test_nothing_listens(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        StoreProbe("127.0.0.1", port, 1.0)


def test_a_silent_program(listener: socket.socket) -> None:
    with pytest.raises(NoStore, match="it sent nothing"):
        StoreProbe("127.0.0.1", listener.getsockname()[1], 0.1)


def test_a_connection_to_oneself_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding to the port before connecting to it brings about what otherwise happens once in a while."""
    with socket.socket() as itself:
        itself.bind(("127.0.0.1", 0))
        itself.connect(itself.getsockname())
        monkeypatch.setattr(socket, "create_connection", lambda place, timeout: itself)
        with pytest.raises(ConnectionRefusedError):
            StoreProbe("127.0.0.1", 1, 1.0)
