"""No layer changes a message that arrived: `Frame` promises it to the type checker, and here to the program."""

from __future__ import annotations

import pytest
import torch

from remora import rpc
from remora.options import FAST_PATHS
from remora.testing.world import World
from remora.transport.shm.sealed_memory import identity
from remora.wire.frames import FAILED, REFERENCES, SHARED, Frame


def same(value: object) -> object:
    return value


def fail() -> None:
    raise ValueError("on purpose")


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The flags of all frames that are made. Meanwhile a second assignment to a field is an error."""
    made: list[int] = []

    def assign(frame: Frame, name: str, value: object) -> None:
        if hasattr(frame, name):
            raise AttributeError(f"a frame does not change, but {name} did")
        object.__setattr__(frame, name, value)
        if name == "flags":
            made.append(frame.flags)

    monkeypatch.setattr(Frame, "__setattr__", assign)
    return made


def test_no_layer_changes_a_message(flags: list[int]) -> None:
    with World(2) as world, world.acting(0):
        assert rpc.rpc_sync("worker1", same, ("text",)) == "text"
        assert rpc.rpc_async("worker1", same, ("text",)).wait() == "text"
        for size in (10, 50_000, 3_000_000):
            sent = torch.arange(size)
            assert torch.equal(rpc.rpc_sync("worker1", same, (sent,)), sent)
        assert rpc.remote("worker1", same, (rpc.RRef("value"),)).to_here().to_here() == "value"
        assert rpc.rpc_sync("worker1", same, (b"x" * 10_000_000,)) == b"x" * 10_000_000
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync("worker1", fail)
    seen = [FAILED, REFERENCES] + ([SHARED] if identity() and FAST_PATHS.shared_memory else [])
    assert all(any(each & flag for each in flags) for flag in seen)
