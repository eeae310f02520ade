"""What workers really send has the form that `remora.vocabulary.messages` says, though not all of it is made from those."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.agent.peers.greeting import greet_neighbours
from remora.errors import CallTimeout
from remora.options import FAST_PATHS
from remora.testing.world import World
from remora.vocabulary import messages
from remora.vocabulary.messages import MESSAGES, Message, MessageType
from remora.wire import ref_header
from remora.wire.enclosed import NOTHING_ENCLOSED
from remora.wire.frames import ASYNC, FAILED, RECORDED, REFERENCES, Frame, FrameReader
from remora.wire.message_codec import decode, from_value
from remora.wire.pickler import unpack

TIMEOUT = 20.0
EXPECTED = {
    MessageType.PYTHON_CALL, MessageType.PYTHON_RET, MessageType.SCRIPT_CALL, MessageType.SCRIPT_RET,
    MessageType.PYTHON_REMOTE_CALL, MessageType.SCRIPT_REMOTE_CALL, MessageType.REMOTE_RET,
    MessageType.PYTHON_RREF_FETCH_CALL, MessageType.PYTHON_RREF_FETCH_RET, MessageType.SCRIPT_RREF_FETCH_CALL,
    MessageType.SCRIPT_RREF_FETCH_RET, MessageType.RREF_FORK_REQUEST, MessageType.RREF_CHILD_ACCEPT,
    MessageType.RREF_USER_DELETE, MessageType.RREF_ACK, MessageType.EXCEPTION, MessageType.BACKWARD_PART_REQ,
    MessageType.BACKWARD_PART_RESP, MessageType.BACKWARD_AUTOGRAD_REQ, MessageType.BACKWARD_AUTOGRAD_RESP,
    MessageType.BACKWARD_END_REQ, MessageType.BACKWARD_END_RESP, MessageType.RREF_BACKWARD_REQ,
    MessageType.RREF_BACKWARD_RESP, MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ, MessageType.GREETING, MessageType.CANCEL,
    MessageType.MEMBERSHIP_ACK, MessageType.GOODBYE,
}  # fmt: skip
if FAST_PATHS.function_numbers:
    EXPECTED.add(MessageType.FUNCTION)

released = threading.Event()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, bytes]]]:
    """The types, flags and bodies of all frames that arrive in this process, as they come from the link."""
    found: list[tuple[int, int, bytes]] = []
    received = FrameReader.received

    def take_down(self: FrameReader, n: int) -> list[Frame]:
        frames = received(self, n)
        found.extend((frame.kind, frame.flags, bytes(frame.body)) for frame in frames if frame.enclosed is NOTHING_ENCLOSED)
        return frames

    monkeypatch.setattr(FrameReader, "received", take_down)
    yield found
    released.clear()


def payload(kind: type[Message], flags: int, body: bytes) -> Message | None:
    """The payload of a frame. None if it has references: those are rebuilt by workers alone."""
    if flags & REFERENCES:
        _, references, rest = ref_header.detach(body)
        if references:
            return None
        body = bytes(rest)
    if flags & RECORDED:
        value, header = unpack(body)
        assert [type(each) for each in header] == [int, int, bool]
        return from_value(kind, value, "a worker")
    if kind.type in (MessageType.PYTHON_CALL, MessageType.PYTHON_REMOTE_CALL) and type(unpack(body)) is int:
        return kind(unpack(body), (), {})  # type: ignore[call-arg]
    return decode(kind, body, "a worker")


def wait_until_released() -> bool:
    return released.wait(TIMEOUT)


def fail() -> None:
    raise ValueError("for the test")


def square_there(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", torch.mul, (x, x))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("for the test")


def fails_later(x: torch.Tensor) -> torch.Tensor:
    return Fails.apply(rpc.rpc_sync("worker2", torch.mul, (x, x)))


def fetch(reference: rpc.RRef[Any]) -> Any:
    return reference.to_here()


def live() -> None:
    """Worker0 does something of everything."""
    assert rpc.rpc_sync("worker1", int) == 0
    assert rpc.rpc_sync("worker1", divmod, (7, 2)) == (3, 1)
    with pytest.raises(ValueError, match="for the test"):
        rpc.rpc_sync("worker1", fail)
    with pytest.raises(CallTimeout):
        rpc.rpc_sync("worker1", wait_until_released, timeout=0.1)
    assert rpc.rpc_async("worker1", wait_until_released).cancel()
    released.set()
    reference = rpc.remote("worker1", list, ((1, 2),))
    assert rpc.rpc_sync("worker2", fetch, (reference,)) == [1, 2]
    tensors = rpc.remote("worker1", torch.add, (torch.ones(2), 1))
    assert torch.equal(tensors.to_here(), torch.full((2,), 2.0))
    del reference, tensors
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", square_there, (x,)).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 2.0))
    with autograd.context() as context_id:
        rpc.remote("worker1", torch.sum, (rpc.rpc_sync("worker1", square_there, (x,)),)).backward(context_id)
    with autograd.context() as context_id, pytest.raises(ValueError, match="for the test"):
        autograd.backward(context_id, [rpc.rpc_sync("worker1", fails_later, (x,)).sum()])


def test_every_frame_decodes_by_the_class_of_its_type(seen: list[tuple[int, int, bytes]]) -> None:
    with World(3) as world:
        with world.acting(0):
            live()
        threads = [
            threading.Thread(target=greet_neighbours, args=(world[i].agent, world[i].record, TIMEOUT)) for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        world.wait_until(lambda: {kind for kind, *_ in list(seen)} >= EXPECTED - {MessageType.GOODBYE})
    for number, flags, body in seen:
        kind = MESSAGES[MessageType(number)]
        found = payload(kind, flags & ~ASYNC, body)
        assert found is None or type(found) is kind
        assert bool(flags & FAILED) == (kind is messages.Failure)
    assert {kind for kind, *_ in seen} >= EXPECTED
