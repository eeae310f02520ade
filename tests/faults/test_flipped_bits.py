"""Each bit of a header flipped on the way: the link is repaired, nothing is lost, and nothing runs twice."""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from remora import rpc
from remora.errors import RemoraError, WorkerLost
from remora.testing.world import World
from remora.transport import fault_link
from remora.vocabulary.messages import MessageType
from remora.wire.frames import HEADER, HEADER_SIZE
from tests.thorough import THOROUGH

BITS = range(0, HEADER_SIZE * 8, 1 if THOROUGH else 13)
ran: Counter[int] = Counter()


class Flips:
    """Flips one bit of the next frame of a type, in the place of what a plan calls damage."""

    def __init__(self) -> None:
        self.kind: int | None = None
        self.bit = 0
        self.forever = False
        self.done = threading.Event()

    def __call__(self, frame: bytes) -> bytes:
        if HEADER.unpack_from(frame)[2] != self.kind:
            return frame
        if not self.forever:
            self.kind = None
        damaged = bytearray(frame)
        damaged[self.bit // 8] ^= 1 << self.bit % 8
        self.done.set()
        return bytes(damaged)

    def next(self, kind: MessageType, bit: int) -> None:
        self.done.clear()
        self.bit, self.kind = bit, int(kind)


@pytest.fixture
def flips(monkeypatch: pytest.MonkeyPatch) -> Flips:
    made = Flips()
    monkeypatch.setattr(fault_link, "damaged", made)
    return made


@pytest.fixture
def world(flips: Flips) -> Iterator[World]:
    with World(2, faults="corrupt * *; corrupt PING *; corrupt ACK *", transports=["tcp"], shared_memory=0) as made:
        made.run(0, rpc.rpc_sync, "worker1", abs, (-1,))
        yield made


def run_once(number: int) -> int:
    ran[number] += 1
    return number


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def one() -> int:
    return 1


def check_call(world: World, number: int) -> None:
    assert world.run(0, rpc.rpc_sync, "worker1", run_once, (number,), timeout=5) == number
    assert ran.pop(number) == 1


def check_large(world: World, number: int) -> None:
    assert world.run(0, rpc.rpc_sync, "worker1", total, (torch.ones(100_000),), timeout=5) == 100_000.0


def check_reference(world: World, number: int) -> None:
    assert world.run(0, lambda: rpc.remote("worker1", one, timeout=5).to_here(5)) == 1


CASES = {
    "call": (MessageType.PYTHON_CALL, check_call),
    "reply": (MessageType.PYTHON_RET, check_call),
    "large": (MessageType.PYTHON_CALL, check_large),
    "remote": (MessageType.PYTHON_REMOTE_CALL, check_reference),
    "fetch": (MessageType.PYTHON_RREF_FETCH_RET, check_reference),
}


@pytest.mark.parametrize("case", CASES)
def test_a_flipped_bit_of_a_header_costs_a_link_and_nothing_else(world: World, flips: Flips, case: str) -> None:
    kind, check = CASES[case]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bit in BITS:
        flips.next(kind, bit)
        started = time.monotonic()
        check(world, bit)
        assert time.monotonic() - started < 5.0
        assert flips.done.is_set(), f"bit {bit} was flipped"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "no growth"


@pytest.mark.parametrize("word", [MessageType.PING, MessageType.ACK])
def test_and_so_does_one_of_a_word(world: World, flips: Flips, word: MessageType) -> None:
    channel = world[0].agent.peers.find("worker1").outgoing
    for bit in BITS[::3]:
        flips.next(word, bit)
        channel.send_unsequenced(int(word))
        assert flips.done.wait(5)
        check_call(world, bit)


def test_damage_on_every_link_ends_in_an_error_that_says_so(world: World, flips: Flips) -> None:
    flips.forever = True
    flips.next(MessageType.PYTHON_CALL, 100)
    started = time.monotonic()
    with pytest.raises(RemoraError) as caught:
        world.run(0, rpc.rpc_sync, "worker1", run_once, (1000,), timeout=30)
    assert time.monotonic() - started < 10.0
    assert isinstance(caught.value, WorkerLost)
    assert not ran[1000]
