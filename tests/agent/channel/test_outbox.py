"""An outbox over a link that takes as much as the test says: which thread writes what, and when."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.channel import outbox
from remora.agent.channel.bulk import LARGE
from remora.agent.channel.delayed_flush import PATIENCE, DelayedFlush
from remora.agent.channel.inbox import ACK, PING
from remora.agent.channel.outbox import GIVE_BACK
from remora.agent.memory.late_fill import LateMessages
from remora.agent.memory.shared import PeerSharedMemory
from remora.agent.runtime.timers import Timers
from remora.options import FAST_PATHS
from remora.testing.world import World
from remora.transport.link import StreamLink
from remora.transport.shm.lender import Lender
from remora.vocabulary.ids import WorkerKey
from tests.agent.alone import wait_until
from tests.agent.channel.parts import CALL, REPLY, OutboxAlone


@pytest.fixture
def alone() -> OutboxAlone:
    return OutboxAlone()


# Words.


def test_a_word_is_said_by_whoever_is_writing(alone: OutboxAlone) -> None:
    with alone.writing:
        for word in (PING, ACK, PING):
            alone.send_unsequenced(word)  # does not wait
    assert not alone.wire.writes
    alone.flush()  # as every writer does at the end
    assert alone.wire.kinds() == [[PING, ACK]], "said once is enough"


def test_a_word_said_while_a_message_is_written_is_answered(me: str) -> None:
    rpc.rpc_sync(me, abs, args=(1,))
    channel = rpc._get_current_rpc_agent().agent.peers.me.outgoing
    link = channel.link
    assert link is not None
    with channel.writing:
        channel.send_unsequenced(PING)
        heard = link.last_heard
    channel.send(CALL, 0, b"")
    wait_until(lambda: link.last_heard > heard)


def memory_to_give_back(*numbers: int) -> PeerSharedMemory:
    memory = PeerSharedMemory(Lender(0), WorkerKey(1, "there"), "there", 0, lambda: 0.0, LateMessages(lambda work: None))
    memory.unused.extend(numbers)
    return memory


def test_memory_that_has_gone_back_with_another_message_is_not_mentioned(alone: OutboxAlone) -> None:
    """A word that gives nothing back would say that we cannot use any."""
    alone.shared_memory = memory = memory_to_give_back(7)
    alone.send(CALL, 1, b"")
    assert alone.wire.kinds() == [[GIVE_BACK, CALL]]
    memory.give_back(lambda body: pytest.fail("said again"))
    alone.give_back()
    assert alone.wire.kinds() == [[GIVE_BACK, CALL]]


def test_a_thread_that_gives_memory_back_does_not_get_before_what_another_one_writes(alone: OutboxAlone) -> None:
    """The writer looks at the first message, and takes the first one away when it is kept."""
    alone.shared_memory = memory_to_give_back(7)
    with alone.writing:
        alone.enqueue(CALL, 1, b"")
        alone.give_back()
        assert [message[0] for message in alone.batched] == [CALL, GIVE_BACK]
    alone.flush()
    assert alone.wire.kinds() == [[CALL, GIVE_BACK]]


# What nobody is in a hurry for.


def test_what_nobody_waits_for_is_sent_at_once(alone: OutboxAlone) -> None:
    for _ in range(3):
        assert not alone.send_low_priority(CALL, 1, b"")
        alone._low_priority_at -= outbox.NO_TIME  # what comes next comes later
    assert alone.wire.kinds() == [[CALL], [CALL], [CALL]]


def test_unless_the_last_one_was_followed_by_another_in_no_time(alone: OutboxAlone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "NO_TIME", 10.0)
    assert not alone.send_low_priority(CALL, 1, b"")
    alone.send(PING, 2, b"")
    for _ in range(2):
        assert alone.send_low_priority(CALL, 3, b""), "held back"
        alone.send(PING, 4, b"")
    assert alone.wire.kinds() == [[CALL], [PING], [CALL, PING], [CALL, PING]]


def test_what_was_held_back_in_vain_leaves_alone_and_the_next_at_once(alone: OutboxAlone) -> None:
    alone._followed = True
    assert alone.send_low_priority(CALL, 1, b"")
    assert not alone.wire.writes
    alone._low_priority_at -= outbox.NO_TIME
    alone.flush()
    assert not alone.send_low_priority(CALL, 2, b"")
    assert alone.wire.kinds() == [[CALL], [CALL]]


def test_nothing_is_held_back_without_a_link(alone: OutboxAlone) -> None:
    alone._followed, alone.link = True, None
    assert not alone.send_low_priority(CALL, 1, b"")


@pytest.fixture
def timers() -> Iterator[Timers]:
    timers = Timers("test")
    timers.start()
    yield timers
    timers.stop()


@pytest.mark.skipif(not FAST_PATHS.delayed_flush, reason="turned off")
def test_what_waits_for_company_does_not_wait_for_long(alone: OutboxAlone, timers: Timers) -> None:
    company = DelayedFlush(timers)
    other = OutboxAlone()
    for round_ in range(1, 3):
        begun = time.monotonic()
        for channel in (alone, other):
            channel.enqueue(REPLY, 1, b"")
            company.expect(channel)
        wait_until(lambda n=round_: len(alone.wire.writes) == len(other.wire.writes) == n)  # type: ignore[misc]
        assert time.monotonic() - begun >= PATIENCE


def test_a_remote_call_and_its_fetch_share_a_write_once_it_is_known_that_they_follow(me: str) -> None:
    """Whatever comes first, comes first: the order is the same."""
    for _ in range(50):
        assert rpc.rpc_async(me, abs, args=(-1,)).wait() == 1
        assert rpc.remote(me, abs, args=(-2,)).to_here() == 2


# Half a frame.


def test_ctrl_c_in_the_midst_of_a_message_costs_the_link_while_another_thread_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That thread waits for its own reply, and sees nothing wrong with the link: it has to be told."""
    go_on = threading.Event()
    monkeypatch.setattr(waited_for, "event", go_on, raising=False)
    with World(2, shared_memory=0) as world, ThreadPoolExecutor(1) as pool:
        world.run(0, rpc.rpc_sync, "worker1", abs, (-1,))
        waiting = pool.submit(world.run, 0, rpc.rpc_sync, "worker1", waited_for)
        try:
            wait_until(world[0].agent.peers.find("worker1").outgoing.reading.locked)
            with monkeypatch.context() as patch:
                patch.setattr(StreamLink, "write", written_in_part)
                with pytest.raises(KeyboardInterrupt):
                    world.run(0, rpc.rpc_sync, "worker1", torch.numel, (torch.zeros(LARGE),))
            assert world.run(0, partial(rpc.rpc_sync, timeout=10.0), "worker1", abs, (-1,)) == 1
        finally:
            go_on.set()
        assert waiting.result(10.0) == "there"


def waited_for() -> str:
    waited_for.event.wait(60.0)  # type: ignore[attr-defined]
    return "there"


_write = StreamLink.write


def written_in_part(link: StreamLink, parts: Any, *patience: float) -> bool:
    """Of a large message only the head."""
    if len(parts) == 1:
        return _write(link, parts, *patience)
    link.sock.sendall(parts[0])
    raise KeyboardInterrupt


def test_small_messages_of_many_threads_arrive_once_each(alone: OutboxAlone) -> None:
    threads = [
        threading.Thread(target=lambda i=i: [alone.send(CALL, 100 * i + j, b"x" * j) for j in range(100)])  # type: ignore[misc]
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    headers = alone.wire.headers()
    assert sorted(header[5] for header in headers) == list(range(400))
    assert [header[6] for header in headers] == list(range(1, 401))


def contents(channel: Any) -> dict[str, int]:
    """How much is in each collection of a channel and its session."""
    parts = (channel, channel.outbox, channel.inbox, channel.pool_reads, channel.deferred, channel.waiter_reads)
    things = {name: getattr(part, name, None) for part in parts for name in type(part).__slots__}
    things["kept"] = channel.session.kept
    return {name: len(thing) for name, thing in things.items() if isinstance(thing, list | dict | set | deque)}


def test_calls_with_shared_memory_leave_nothing_behind() -> None:
    tensor = torch.ones(1 << 15)
    with World(2) as world:
        for _ in range(300):
            world.run(0, rpc.rpc_sync, "worker1", torch.neg, args=(tensor,))
        for agent in world.agents():
            for channel in (channel for peer in agent.peers.all() for channel in peer.channels()):
                assert max(contents(channel).values()) < 20, contents(channel)
