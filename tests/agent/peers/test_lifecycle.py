"""What becomes of a peer: its state changes once, and its listeners hear of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from remora.agent.peers.peer import Peer
from remora.protocol.member_rules import Died, MembershipEvent, Recovered, Suspected
from remora.testing.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with World(2, watch=0) as made:
        yield made


def test_each_change_is_told_once(world: World) -> None:
    peers, heard = world[0].agent.peers, list[MembershipEvent]()
    gone: list[Peer] = []
    peer = peers.find("worker1")
    peers.on_gone.append(gone.append)
    with peers.events.subscribe(heard.append):
        for _ in range(2):
            peers.lifecycle.suspect(peer, "for the test")
        assert peer.condition == "suspected"
        for _ in range(2):
            peers.lifecycle.trust(peer)
        assert peer.condition == "alive"
        for _ in range(2):
            peers.declare_gone(peer, "for the test")
        world.wait_until(lambda: len(heard) == 3)
    assert [type(each) for each in heard] == [Suspected, Recovered, Died]
    assert gone == [peer]
    assert peer.ended.is_set()


def test_a_peer_that_is_gone_is_neither_suspected_nor_trusted(world: World) -> None:
    peers, heard = world[0].agent.peers, list[MembershipEvent]()
    peer = peers.find("worker1")
    peers.declare_gone(peer, "for the test")
    with peers.events.subscribe(heard.append):
        peers.lifecycle.suspect(peer, "again")
        peers.lifecycle.trust(peer)
        peers.events.publish(Recovered(peers.me.info))  # behind what else was said, in order
        world.wait_until(lambda: bool(heard))
    assert heard == [Recovered(peers.me.info)]
    assert (peer.condition, peer.reason) == ("dead", "for the test")


def test_a_worker_that_parts_dials_only_for_answers(world: World) -> None:
    peers = world[0].agent.peers
    peer = peers.find("worker1")
    peers.connect(peer)
    world.wait_until(lambda: peer.outgoing.link is not None and not peer.dialling)
    peers.connector.begin_parting()
    peer.outgoing.cut(ConnectionError("for the test"))
    thread = threading.Thread(target=peers.connect, args=(peer,))  # (on the main thread, the pool would do it, later)
    thread.start()
    thread.join()
    assert not peer.dialling
    assert peer.outgoing.link is None
