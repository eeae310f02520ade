"""Memory held: what 1,000 echoes of 16 MB leave behind in both processes, beyond what the first 50 left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Reading, Setting, Skipped, Unit
from benchmarks.suite.echo import MB

SIZE = 16 * MB
WARM = 50


def measure(setting: Setting) -> Iterator[Reading]:
    import torch

    rpc, (peer, *_) = setting.rpc, setting.peers
    tensor = torch.arange(SIZE, dtype=torch.uint8)

    def held_after(echoes: int) -> int:
        for _ in range(echoes):
            setting.calls.echo(tensor)
        there: int = rpc.rpc_sync(peer, resident)
        return resident() + there

    before = held_after(0)
    warm = held_after(WARM)
    yield Reading("by the first 50", warm - before, Unit.BYTES)
    yield Reading("by the rest", held_after(setting.effort(1000, 250) - WARM) - warm, Unit.BYTES)


def resident() -> int:
    """Bytes of memory this process occupies, shared memory that it has mapped included."""
    return _status("VmRSS")


def peak() -> int:
    """The most that it has ever occupied."""
    return _status("VmHWM")


def _status(name: str) -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        raise Skipped("memory is read from /proc, which is not there") from None
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024
