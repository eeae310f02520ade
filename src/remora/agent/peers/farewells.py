"""Goodbyes, said and heard: the last answers of a worker that leaves arrive before it is gone.

The rules are in `remora.protocol.member_rules` (F1, and `Farewell` for how long to wait).
"""

from __future__ import annotations

import time

from remora.agent.channel.channel import Channel
from remora.agent.peers.connector import LEFT, Connector
from remora.agent.peers.peer import Peer
from remora.protocol.member_rules import Farewell, Parting, on_farewell
from remora.vocabulary.messages import MessageType

ACK, GOODBYE = int(MessageType.ACK), int(MessageType.GOODBYE)
GOODBYE_PATIENCE = 0.5  # seconds in which a peer takes nothing of our last words before we hang up
REDIAL_PATIENCE = 0.25  # … if it has no link with us
ANSWER_PATIENCE = 5.0  # … if we leave gracefully, and answers are among them
RETURN_PATIENCE = 1.0  # … if it has lost the link over which they come, and has to dial
GOODBYE_LIMIT = 2.0  # seconds for all of it, if we do not leave gracefully
FIRST_LOOK, LONGEST_LOOK = 0.001, 0.02  # seconds between two looks whether those we leave have hung up


class Farewells:
    """Says goodbye to the peers of one worker, and hears theirs."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._table, self._lifecycle = connector.table, connector.lifecycle

    def hear(self, peer: Peer, behind_answers: bool) -> None:
        """A peer leaves: what it answered before comes first (`remora.protocol.member_rules`, F1)."""
        peer.leaving = True
        outgoing = peer.outgoing
        match on_farewell(behind_answers, bool(outgoing.pending), outgoing.link is not None):
            case Parting.HANG_UP:
                outgoing.send_unsequenced(ACK)  # it waits until we have its answers, or come back for them
                self._lifecycle.declare_gone(peer, LEFT, "left")
            case Parting.REDIAL:
                self._connector.connect(peer)
            case Parting.AWAIT_ANSWERS:
                outgoing.watch()  # no thread may be reading

    def part_from(self, peer: Peer) -> None:
        """Say farewell behind our answers to a peer, once: a session without a link keeps it for the next one."""
        channel = peer.incoming
        if channel is not None and not peer.parted and (channel.link is not None or channel.unheard()):
            peer.parted = True
            channel.send(GOODBYE, 0, b"")

    def say(self, graceful: bool) -> None:
        """Tell every peer that we leave of our own will, and wait until it hangs up; in real seconds, whatever the clock of
        the worker says. If it is graceful, a peer that takes our last answers gets the time that it needs."""
        self._connector.stop()
        now = time.monotonic()
        waiting: list[tuple[Peer, Channel, Farewell]] = []
        for peer in self._table.all():
            if peer.gone:
                continue
            for channel in peer.channels():
                answers = not channel.dialled and channel.unheard() > 0
                if graceful and answers and not peer.suspicion and peer is not self._table.me:
                    farewell = Farewell(now, ANSWER_PATIENCE, RETURN_PATIENCE)
                else:
                    farewell = Farewell(now, GOODBYE_PATIENCE, REDIAL_PATIENCE)
                waiting.append((peer, channel, farewell))
            self.part_from(peer)
            if peer.outgoing.link is not None:
                peer.outgoing.send(GOODBYE, 0, b"")
        pause, end = FIRST_LOOK, float("inf") if graceful else now + GOODBYE_LIMIT
        while waiting and now < end:
            waiting = [each for each in waiting if _hears(*each, now)]
            if waiting:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK)
                now = time.monotonic()


def _hears(peer: Peer, channel: Channel, farewell: Farewell, now: float) -> bool:
    """Return True if a peer may still hear what we have said on a channel."""
    unheard = 0 if channel.dialled else max(channel.unheard() - peer.parted, 0)  # the farewell itself does not count
    return not peer.gone and farewell.waits(channel.link is not None, unheard, now)
