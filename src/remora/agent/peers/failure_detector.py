"""The failure detector: asks the quiet for a sign of life, suspects the silent, spreads the news of a death.

A link costs nothing while nothing is expected of the peer. Something is expected of a *neighbour*, one of the next or the
previous few workers by id; of a peer that we wait for; and of one that is suspected (`_expects`). So the cost of
heartbeats grows with the number of workers, not with that of links. The end of a process is noticed on every link, since
its kernel closes them; that of a host on links at rest by TCP keep-alive (`remora.transport.link.tune`).

Every worker *watches* the next few workers by id: it keeps a link with them. When one dies, or its host does not answer, it
tells all the others, and they look for themselves. The rule for judging a peer is in `remora.protocol.member_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from remora.agent.channel.channel import Channel
from remora.agent.peers.connector import Connector
from remora.agent.peers.peer import Peer
from remora.protocol.member_rules import Limits, Verdict, judge
from remora.transport import tcp_info
from remora.transport.link import StreamLink
from remora.vocabulary.messages import MessageType

ACK, PING = int(MessageType.ACK), int(MessageType.PING)
LATELY = 1.0  # seconds: two looks at a link
CALLEE_WAITS = 1.5  # heartbeats: the end that dialled asks first, and its question is a sign of life as well


def _from(channel: Channel, now: float) -> float:
    """Return when a sign of life began to be expected on a channel, of which that is news: now, or when it was heard
    lately."""
    link = channel.link
    return link.last_heard if link is not None and now - link.last_heard <= LATELY else now


class HostSilent(OSError):
    """A peer's host acknowledges nothing on a link."""


class FailureDetector:
    """Watches the peers of one worker. Everything but `verify` and `_on_peer_dead` runs on the timer thread."""

    def __init__(self, connector: Connector, spread: Callable[[Peer, float], None]) -> None:
        self._connector = connector
        self._table, self._lifecycle, self._pool = connector.table, connector.lifecycle, connector.pool
        self._settings = settings = connector.settings
        self._own_time = connector.own_time
        self._limits = Limits(
            settings.heartbeat, settings.suspect_after, settings.silence_limit, settings.reconnect_timeout
        )
        self._began = float("inf")
        self._spread = spread  # tells all others that a watched worker is dead, or silent for so many seconds
        self._lifecycle.on_gone.append(self._on_peer_dead)

    def tick(self, now: float) -> None:
        """Look at all peers. Called about twice a second: nothing here blocks."""
        if self._connector.stopping.is_set():
            return
        self._began = min(self._began, now)
        alive = [peer for peer in self._table.all() if not peer.gone]
        watched, neighbours = self._around(alive)
        for peer in alive:
            self._look_at(peer, now, peer in neighbours)
        if now - self._began > self._settings.heartbeat:  # a group that ends at once is spared the trouble
            for peer in watched:
                if all(channel.link is None for channel in peer.channels()) and not peer.dialling:
                    self._connector.connect(peer)

    def _look_at(self, peer: Peer, now: float, neighbour: bool) -> None:
        channels = peer.channels()
        if peer.dialling and peer.outgoing.link is None:
            self._wonder(peer, now)
        if peer is self._table.me:
            self._ask_ourselves(channels, now)
            return
        if not self._expects(peer, channels):
            for channel in channels:
                channel.watch()  # the end of a link at rest is noticed, too
            if not neighbour:
                peer.expected = {}
                return
            channels = self._one_of(peer, channels)
        before = peer.expected
        peer.expected = {
            channel: before[channel] if channel in before else _from(channel, now) for channel in channels
        }
        linked = [(channel, link) for channel in channels if (link := channel.link) is not None]
        if not linked:
            return
        # Of a channel that is paused nothing is heard because we do not listen.
        heard = max(now if channel.paused else link.last_heard for channel, link in linked)
        if not self._is_well(peer, heard, now):
            return  # given up: its links go with it
        for channel, link in linked:
            channel.watch(again=True)
            link.notify()
            if channel.paused or link.midway:  # what it says to hear of us is not read, or comes behind the rest
                self._pool.call_soon(partial(channel.send_unsequenced, ACK))
            if not channel.paused:
                self._care_for(peer, channel, link, now)

    def _expects(self, peer: Peer, channels: list[Channel]) -> bool:
        """Return True if we wait for a sign of life of a peer: for answers, for the confirmation that it has what was
        sent, for the rest of a message; or because it is suspected."""
        if peer.suspicion or peer.outgoing.pending:
            return True
        for channel in channels:
            link = channel.link
            if channel.session.kept or channel.paused:
                return True
            if link is not None and (link.midway or link.last_heard < peer.questioned_at):
                return True
        return False

    def _one_of(self, peer: Peer, channels: list[Channel]) -> list[Channel]:
        """One link is enough to hear whether a neighbour lives: the same for both ends, if there are two."""
        linked = [channel for channel in channels if channel.link is not None]
        mine = self._table.me.id < peer.id
        return [channel for channel in linked if channel.dialled is mine] or linked[:1]

    def _wonder(self, peer: Peer, now: float) -> None:
        """There is no link with a peer that we dial."""
        since = self._own_time.since(peer.dialling_since, now)
        if since > self._limits.suspect_after:
            self._lifecycle.suspect(peer, f"no connection with it could be made for {since:.0f} s")

    def _ask_ourselves(self, channels: list[Channel], now: float) -> None:
        """Ask ourselves for a sign of life: what a fault plan loses on the way to ourselves is to be missed, too."""
        for channel in channels:
            link = channel.link
            if link is None:
                continue
            channel.watch(again=True)
            link.notify()
            if channel.session.kept and self._own_time.since(link.last_heard, now) > self._limits.heartbeat:
                self._pool.call_soon(partial(channel.send_unsequenced, PING))

    def _care_for(self, peer: Peer, channel: Channel, link: StreamLink, now: float) -> None:
        """Look after one link."""
        quiet = self._own_time.since(max(link.last_heard, peer.expected.get(channel, now)), now)
        if quiet <= self._limits.heartbeat:
            return
        unanswered = min(tcp_info.unanswered(link.sock), quiet)
        match judge(self._limits, quiet, unanswered):
            case Verdict.REDIAL:
                self.host_is_silent(peer, unanswered)
                self._cut(channel, f"its host has not answered for {unanswered:.0f} s")
            case Verdict.DEAD:  # if the peer lives, it has a better one
                self._cut(channel, f"nothing was heard on this link for {quiet:.0f} s")
            case _:
                if channel.dialled or quiet > self._limits.heartbeat * CALLEE_WAITS:
                    self._pool.call_soon(partial(channel.send_unsequenced, PING))

    def host_is_silent(self, peer: Peer, seconds: float) -> None:
        """A peer's host has acknowledged nothing for so long. Those that have no link with it find out in time, too."""
        if peer.unreachable_since is None:
            peer.unreachable_since = self._settings.clock.now() - seconds
        news = not peer.suspicion
        self._lifecycle.suspect(peer, f"its host has not answered for {seconds:.0f} s")
        if news and self._is_neighbour(peer):
            self._pool.submit_system(partial(self._spread, peer, seconds))

    def _cut(self, channel: Channel, reason: str) -> None:
        self._pool.submit_system(lambda: channel.cut(HostSilent(reason)))

    def _is_well(self, peer: Peer, heard: float, now: float) -> bool:
        """Judge a peer, of which any link may bring a sign of life. Return False if it is given up."""
        quiet = self._own_time.since(max(heard, min(peer.expected.values(), default=now)), now)
        verdict = judge(self._limits, quiet, 0.0)
        if verdict is Verdict.DEAD:
            reason = f"it has been silent for {quiet:.0f} s"
            self._pool.submit_system(lambda: self._lifecycle.declare_gone(peer, reason))
            return False
        if verdict is Verdict.SUSPECT:
            self._lifecycle.suspect(peer, f"it has been silent for {quiet:.0f} s")
        elif heard > peer.suspected_at:
            self._lifecycle.trust(peer)
        return True

    # Neighbours.

    def _around(self, among: list[Peer]) -> tuple[list[Peer], set[Peer]]:
        """Return those we watch, and all neighbours: those, and the workers that watch us."""
        me, watch = self._table.me, self._settings.watch
        others = sorted((peer for peer in among if peer is not me), key=lambda peer: (peer.id < me.id, peer.id))
        watched = others[:watch]
        return watched, {*watched, *others[max(len(others) - watch, 0) :]} if watch else set()

    def _is_neighbour(self, peer: Peer) -> bool:
        alive = [each for each in self._table.all() if not each.gone or each is peer]
        return peer in self._around(alive)[0]

    def _on_peer_dead(self, peer: Peer) -> None:
        if peer.state == "dead" and not peer.gave_us_up and self._is_neighbour(peer):
            since = peer.unreachable_since
            self._spread(peer, 0.0 if since is None else self._own_time.since(since, self._settings.clock.now()))

    def verify(self, peer: Peer, silent_for: float) -> None:
        """A worker says that this peer is dead, or that its host has been silent for so long. We see for ourselves: by a
        question on the links that we have, or by a new one."""
        if peer.gone:
            return
        now = self._settings.clock.now()
        linked = [channel for channel in peer.channels() if channel.link is not None]
        if linked:
            # Half the time that a host has on a link may have passed on another worker's. Ours must be silent as well.
            since, before = now - min(silent_for, self._limits.unreachable / 2), peer.expected
            peer.expected = {channel: min(before.get(channel, since), since) for channel in linked}
            peer.questioned_at = now  # (last: the timer thread sees both, or the question at its next tick)
            for channel in linked:
                channel.send_unsequenced(PING)
            return
        if silent_for and peer.unreachable_since is None:
            peer.unreachable_since = now - silent_for
        self._connector.connect(peer)
