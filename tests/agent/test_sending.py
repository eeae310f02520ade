"""What a channel says by itself: words that belong to the connection, whoever is writing."""

from __future__ import annotations

from remora import rpc
from remora.agent.channel import ACK, PING
from tests.agent.alone import wait_until


def test_a_word_is_said_by_whoever_is_writing(me: str) -> None:
    rpc.rpc_sync(me, abs, args=(1,))
    channel = rpc._get_current_rpc_agent().agent.peers.me.outgoing
    link = channel.link
    assert link is not None
    with channel._writing:
        for word in (PING, ACK, PING):
            channel.say(word)  # does not wait
        assert list(channel._words) == [PING, ACK], "said once is enough"
        heard = link.last_heard
    channel.flush()  # as every writer does at the end
    assert not channel._words
    wait_until(lambda: link.last_heard > heard)  # the answer
