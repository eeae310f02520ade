"""What fault plans brought to light, each on its own: so that it stays mended."""

from __future__ import annotations

import gc
import weakref

import pytest

from remora import rpc
from remora.errors import CallTimeout, ProtocolError, RemoraError
from remora.protocol.holder import Holder
from remora.protocol.session import Session
from remora.testing.world import World
from remora.transport.fault_link import GARBAGE
from remora.vocabulary.effects import TellParent
from remora.vocabulary.ids import GloballyUniqueId, WorkerKey
from remora.wire.frames import Damaged, FrameReader, encode

OWNER, PARENT, ME = (WorkerKey(i, "x") for i in range(3))
VALUE, FORK = GloballyUniqueId(1, 1), GloballyUniqueId(1, 2)


def test_a_parent_hears_of_a_child_whose_owner_is_lost_to_the_child_alone() -> None:
    """Else it would wait for the child to be counted, and keep the value, as long as it talks to the owner itself."""
    holder = Holder()
    holder.adopt(VALUE, FORK, OWNER, PARENT)
    assert holder.lost(OWNER) == ([(FORK, True)], [TellParent(PARENT, FORK)])


def test_but_not_if_the_child_was_counted_or_the_parent_is_lost_too() -> None:
    counted = Holder()
    counted.adopt(VALUE, FORK, OWNER, PARENT)
    counted.confirm(FORK)
    assert counted.lost(OWNER)[1] == []
    orphan = Holder()
    orphan.adopt(VALUE, FORK, OWNER, PARENT)
    orphan.lost(PARENT)
    assert orphan.lost(OWNER)[1] == []


def test_the_last_message_is_missed_though_nothing_follows_it() -> None:
    session: Session[bytes] = Session()
    session.accept(1, 10)
    session.expect(1)
    session.expect(0)
    with pytest.raises(ProtocolError, match="message 3 was sent, but only 1 arrived"):
        session.expect(3)


def test_what_came_before_the_damage_counts() -> None:
    whole = [encode(0x102, 0, 0, 7, number, 0, 0.0, 0, b"") for number in (1, 2)]
    data = b"".join(whole) + GARBAGE
    reader = FrameReader()
    reader.room[: len(data)] = data
    with pytest.raises(Damaged) as caught:
        reader.received(len(data))
    assert [frame.number for frame in caught.value.frames] == [1, 2]


class Thing:
    """Something that a program holds."""


def test_an_error_that_is_kept_keeps_nothing_of_the_program() -> None:
    with World(2, faults="fail PYTHON_REMOTE_CALL *") as world:

        def program() -> tuple[rpc.RRef[int], weakref.ref[Thing]]:
            thing = Thing()
            return rpc.remote("worker1", int), weakref.ref(thing)

        reference, known = world.run(0, program)
        with pytest.raises(RemoraError, match="RRef creation"):
            reference.to_here()
        gc.collect()
        assert known() is None


def one() -> int:
    return 1


def test_a_value_of_our_own_that_comes_too_late_is_not_kept() -> None:
    with World(1, faults="delay PYTHON_REMOTE_CALL * 200ms") as world:
        reference = world.run(0, rpc.remote, "worker0", one, timeout=0.02)
        with pytest.raises(CallTimeout):
            reference._get_future().wait()
        with pytest.raises(RemoraError, match="RRef creation"):
            reference.to_here()
        del reference
        world.wait_until(lambda: not world.unrest())


def test_a_world_that_ended_is_garbage() -> None:
    world = World(2, faults="")
    world.close()
    known = [weakref.ref(worker) for worker in world.workers]
    del world
    for _ in range(3):
        gc.collect()
    assert [worker() for worker in known] == [None, None]
