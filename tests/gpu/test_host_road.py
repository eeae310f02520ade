"""Large tensors over the host, in pieces that are sent while others are copied: whole, in order, and as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from remora import rpc
from remora.devices import copies, staging
from remora.rpc.api import _get_current_rpc_agent
from tests.gpu.conftest import identical_maps
from tests.gpu.late import clutter, delay, late, on_another_stream, on_another_thread, seen
from tests.workers import Workers

GPU = torch.device("cuda:0")
MB = 1_000_000
ROADS: dict[str, dict[str, Any]] = {
    "tcp": {"transports": ["tcp"], "shared_memory": 0},
    "unix": {"transports": ["unix"], "shared_memory": 0},
    "shared": {},
}


@pytest.fixture(scope="module", params=ROADS)
def pair(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Two processes that do not lend each other memory of the device."""
    with Workers(
        2,
        options=lambda rank: {
            "device_maps": identical_maps(rank, 2),
            "rpc_timeout": 60.0,
            "device_memory": 0,
            **ROADS[request.param],
        },
        leak_timeout=None,
        timeout=120.0,
    ) as group:
        yield group


def counted(size: int) -> torch.Tensor:
    """So many bytes, none of them where another one should be."""
    numbers = torch.arange(size // 4 + 1, dtype=torch.int32, device=GPU)
    return numbers.view(torch.uint8)[:size].clone()


def total(tensor: torch.Tensor) -> tuple[int, str]:
    return int(tensor.sum(dtype=torch.int64)), str(tensor.device)


def same(value: Any) -> Any:
    return value


def there_and_back(to: str, size: int) -> bool:
    sent = counted(size)
    arrived = rpc.rpc_sync(to, total, (sent,)) == (int(sent.sum(dtype=torch.int64)), "cuda:0")
    return arrived and torch.equal(rpc.rpc_sync(to, same, (sent,)), sent)


@pytest.mark.parametrize("size", [MB, 8 * MB, copies.CHUNK, copies.CHUNK + 1, 64 * MB, 300 * MB])
def test_any_size(pair: Workers, size: int) -> None:
    assert pair.run(0, there_and_back, "worker1", size)


def views(to: str) -> list[str]:
    base = counted(64 * MB).view(torch.int32).reshape(-1, 1000)
    sent = {
        "transposed": base.t(),
        "every other": base[::2, ::2],
        "a slice": base[1000:5000],
        "two of one storage": (base, base[3:9]),
        "many": [base[i * 100 : i * 100 + 100].clone() for i in range(150)],
        "on the host, too": (base, torch.arange(3 * MB), b"x" * MB),
    }
    wrong = []
    for name, value in sent.items():
        back = rpc.rpc_sync(to, same, (value,))
        pairs = zip(value, back, strict=True) if isinstance(value, tuple | list) else [(value, back)]
        if not all(
            torch.equal(a, b) and a.device == b.device if isinstance(a, torch.Tensor) else a == b for a, b in pairs
        ):
            wrong.append(name)
    return wrong


def test_views_and_company(pair: Workers) -> None:
    assert pair.run(0, views, "worker1") == []


# The order of work on the device.


def look(tensor: torch.Tensor) -> float:
    return seen(tensor)


def look_late(tensor: torch.Tensor) -> float:
    delay()
    return seen(tensor)


def make(value: float, size: int) -> torch.Tensor:
    return late(value, size)


def what_late_kernels_wrote(to: str, size: int) -> list[float]:
    """What is sent is what the current stream writes before, and not what it writes after."""
    found = []
    for value in (1.0, 2.0, 3.0):
        tensor = late(value, size)
        future = rpc.rpc_async(to, look_late, (tensor,))
        tensor.fill_(-1.0)
        clutter(size)
        found.append(future.wait())
    for value in (4.0, 5.0):
        found.append(on_another_stream(lambda v=value: rpc.rpc_sync(to, look, (late(v, size),))))
        found.append(on_another_thread(lambda v=value: rpc.rpc_sync(to, look, (late(v, size),))))
    for value in (6.0, 7.0):
        back = rpc.rpc_sync(to, make, (value, size))
        clutter(size)
        found.append(seen(back))
        found.append(on_another_stream(lambda v=value: seen(rpc.rpc_sync(to, make, (v, size)))))
    return found


@pytest.mark.parametrize("size", [MB // 4, 16 * MB, 75 * MB])
def test_late_kernels(pair: Workers, size: int) -> None:
    expected = [1.0, 2.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0, 6.0, 7.0, 7.0]
    assert pair.run(0, what_late_kernels_wrote, "worker1", size) == expected


def let_go_at_once(to: str) -> list[float]:
    """The receiver's memory is used again, by whom and on which stream it may be, while more comes in."""
    found = []
    for value in range(1, 7):
        first = rpc.rpc_async(to, make, (float(value), 8 * MB))
        second = rpc.rpc_async(to, make, (float(-value), 8 * MB))
        tensor = first.wait()
        delay()
        doubled = tensor * 2
        del tensor, first
        clutter(8 * MB)
        found += [seen(doubled) / 2, seen(second.wait())]
    return found


def test_memory_that_was_let_go(pair: Workers) -> None:
    assert pair.run(0, let_go_at_once, "worker1") == [s * v for v in range(1, 7) for s in (1.0, -1.0)]


def many_at_once(to: str) -> list[bool]:
    """From many threads, each on a stream of its own, while the default stream is busy."""
    found: list[bool] = []

    def one(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            sent = torch.full((6 * MB,), float(n), device=GPU)
            delay()
            sent += 1
            back = rpc.rpc_sync(to, same, (sent,))
            found.append(seen(back) == n + 1)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
        delay()
    for thread in threads:
        thread.join(100.0)
    return found


def test_many_at_once(pair: Workers) -> None:
    assert pair.run(0, many_at_once, "worker1") == [True] * 6


# When a link breaks, and what is left.


def with_a_broken_link(to: str) -> list[bool]:
    peer = _get_current_rpc_agent().agent.peers.find(to)
    found = []
    for n in range(4):
        sent = counted(100 * MB + n)
        future = threading.Timer(0.005 * n, lambda: peer.outgoing.cut(OSError("cut by the test")))
        future.start()
        back = rpc.rpc_sync(to, same, (sent,))
        future.join()
        found.append(torch.equal(back, sent))
    return found


def test_a_link_that_breaks_in_the_midst_of_it(pair: Workers) -> None:
    assert pair.run(0, with_a_broken_link, "worker1") == [True] * 4


def nothing_grows(to: str) -> tuple[int, int]:
    sent = counted(40 * MB)
    for _ in range(4):
        rpc.rpc_sync(to, same, (sent,))
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved(), _pinned()
    for _ in range(30):
        rpc.rpc_sync(to, same, (sent,))
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved() - before[0], _pinned() - before[1]


def _pinned() -> int:
    statistics = getattr(torch.cuda, "host_memory_stats", dict)()
    return int(statistics.get("allocated_bytes.current", 0))


def test_nothing_grows(pair: Workers) -> None:
    device, host = pair.run(0, nothing_grows, "worker1")
    assert device <= 100 * MB
    assert host <= staging.PINNED_UP_TO // 2
