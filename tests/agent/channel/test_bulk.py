"""Messages with tensors through an outbox that belongs to no channel: copied, or from the memory of the program."""

from __future__ import annotations

import time

import pytest
import torch

from remora.agent.channel.bulk import LARGE, send_packed
from remora.wire.frames import HEADER
from remora.wire.pickler import pack
from tests.agent.channel.parts import CALL, REPLY, OutboxAlone


@pytest.fixture
def alone() -> OutboxAlone:
    return OutboxAlone()


def test_a_large_reply_that_has_to_wait_is_copied_once(alone: OutboxAlone) -> None:
    """What waits to be written and what is kept until it is acknowledged is the same memory."""
    alone.wire.full = True
    alone.wire.outbox.append(b"something")
    tensor = torch.zeros(LARGE)
    send_packed(alone, REPLY, 1, pack(tensor), 0, 0.0, 0.0)
    (_, _, kept) = alone.session.kept[-1]
    assert isinstance(kept, bytes)
    assert alone.wire.outbox[-1] is kept
    assert len(kept) > tensor.nbytes


def test_a_large_call_leaves_from_its_own_memory(alone: OutboxAlone) -> None:
    tensor = torch.zeros(LARGE)
    packed = pack(tensor)
    send_packed(alone, CALL, 1, packed, 0, 0.0, time.monotonic() + 1)
    ((head, *buffers),) = alone.wire.writes
    assert isinstance(head, bytes)
    assert all(left is right for left, right in zip(buffers, packed.buffers, strict=True))


def test_a_small_one_goes_the_way_of_all_others(alone: OutboxAlone) -> None:
    send_packed(alone, CALL, 1, pack(torch.zeros(4)), 0, 0.0, 0.0)
    assert alone.wire.kinds() == [[CALL]]


def test_a_large_one_comes_behind_what_was_there_before(alone: OutboxAlone) -> None:
    alone.enqueue(REPLY, 1, b"")
    send_packed(alone, CALL, 2, pack(torch.zeros(LARGE)), 0, 0.0, time.monotonic() + 1)
    assert [HEADER.unpack_from(parts[0])[2] for parts in alone.wire.writes] == [REPLY, CALL]
    assert [number for number, _, _ in alone.session.kept] == [1, 2]
