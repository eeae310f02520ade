"""What becomes of calls to a peer that cannot be connected to, for reasons of all kinds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from remora import rpc
from remora.agent.peers.connector import AT_ONCE, DialQueue
from remora.agent.peers.handshake_client import PeerSilent
from remora.agent.peers.peer import ENDED
from remora.errors import CallNotSent, CallOutcomeUnknown, WorkerLost
from remora.protocol.member_rules import OwnTime
from remora.testing.world import World
from tests.eventually import eventually


def fail_to_connect(world: World, error: Exception, times: int) -> list[int]:
    """Have worker 0's next attempts to dial end with this error; they are counted."""
    handshake_client = world[0].handshake_client
    real, tries = handshake_client.to, [0]

    def to(*args: Any) -> Any:
        tries[0] += 1
        if tries[0] <= times:
            raise error
        return real(*args)

    handshake_client.to = to  # type: ignore[method-assign]
    return tries


def double(x: int) -> int:
    return 2 * x


def test_an_error_nobody_thought_of_fails_the_call_and_not_the_peer(caplog: pytest.LogCaptureFixture) -> None:
    with World(2, watch=0) as world:
        tries = fail_to_connect(world, ValueError("what is this?"), times=1)
        with pytest.raises(CallOutcomeUnknown, match=r"ValueError while connecting: what is this\?"):
            world.run(0, rpc.rpc_sync, "worker1", double, args=(1,))
        assert tries == [1], "it is not tried for ever"
        assert world.run(0, rpc.rpc_sync, "worker1", double, args=(4,)) == 8
        assert "cannot connect to worker1" in caplog.text


def test_what_may_pass_is_tried_again() -> None:
    with World(2, watch=0) as world:
        tries = fail_to_connect(world, OSError("no route"), times=3)
        assert world.run(0, rpc.rpc_sync, "worker1", double, args=(4,)) == 8
        assert tries == [4]


def test_what_does_not_pass_in_time_is_the_end_of_the_peer() -> None:
    with World(2, watch=0, clock="auto") as world:
        fail_to_connect(world, OSError("no route"), times=10_000)
        with pytest.raises(CallNotSent, match="cannot be reached: no route"):
            world.run(0, rpc.rpc_sync, "worker1", double, args=(4,))
        assert 3.9 < world.clock.now() < 4.6  # reconnect_timeout
        assert [member.state for member in world[0].members()] == ["alive", "dead"]


@pytest.mark.parametrize("error", [PeerSilent("no answer"), OSError("no route")])
def test_time_in_which_we_were_not_running_is_not_held_against_the_peer(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(2, watch=0, silence_limit=0.1, reconnect_timeout=0.1) as world:
        tries = fail_to_connect(world, error, times=10_000)
        with monkeypatch.context() as stopped:
            stopped.setattr(OwnTime, "since", lambda self, then, now: 0.0)
            future = world.run(0, rpc.rpc_async, "worker1", double, args=(4,))
            world.wait_until(lambda: tries[0] >= 6)  # after 0.3 s and more
            assert not future.done()
        with pytest.raises(CallNotSent, match="worker1"):
            future.wait()


def test_few_dial_at_a_time_and_those_that_take_long_hold_up_nobody() -> None:
    threads: list[threading.Thread] = []
    running: list[object] = []
    go_on = threading.Event()

    def serve(work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()

    def dial(make_room: Callable[[], None], takes_long: bool) -> None:
        running.append(make_room)
        if takes_long:
            make_room()
            make_room()
        assert go_on.wait(10.0)

    queue = DialQueue(serve)
    for _ in range(3):
        queue.submit(partial(dial, takes_long=True))
    for _ in range(AT_ONCE + 5):
        queue.submit(partial(dial, takes_long=False))
    eventually(lambda: len(running) == 3 + AT_ONCE)
    assert len(threads) == 3 + AT_ONCE
    go_on.set()
    eventually(lambda: len(running) == 3 + AT_ONCE + 5)
    for thread in threads:
        thread.join(10.0)


def test_stopping_does_not_wait_for_one_that_is_dialling() -> None:
    with World(2, watch=0) as world:
        fail_to_connect(world, OSError("no route"), times=10_000)
        future = world.run(0, rpc.rpc_async, "worker1", double, args=(4,))
        start = time.monotonic()
        world[0].stop()
        assert time.monotonic() - start < 2.0
        with pytest.raises((WorkerLost, CallNotSent, RuntimeError)):
            future.wait()


def test_who_cannot_take_the_news_keeps_it_from_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    with World(2, watch=0) as world:
        peers = world[0].agent.peers

        def stumble(peer: object) -> None:
            raise ValueError("what is this?")

        peers.on_gone[:0] = [stumble]
        peers.on_gone.append(lambda peer: told.append(peer.name))
        peers.declare_gone(peers.find("worker1"), "for the test")
        assert told == ["worker1"]
        assert peers.find("worker1").ended.is_set(), "others wait for this"
        assert "some listeners could not be told" in caplog.text


def test_that_a_process_ended_is_known_by_what_was_found_out_and_not_by_a_text() -> None:
    with World(3, watch=0) as world:
        peers = world[0].agent.peers
        peers.declare_gone(peers.find("worker2"), ENDED)  # another one may say so, of anything
        fail_to_connect(world, ConnectionRefusedError("refused"), times=1)
        with pytest.raises(CallNotSent, match=ENDED):
            world.run(0, rpc.rpc_sync, "worker1", double, args=(4,))
        assert peers.find("worker1").has_ended
        assert not peers.find("worker2").has_ended
