"""Looking after the peers: asking the quiet for a sign of life, suspecting the silent, spreading the news of a death.

Every worker keeps an eye on those it has a link with. So that the death of one that hardly anybody talks to is noticed
too, each also keeps a link with the next few workers by id, its *wards*; and when a ward dies, it tells everybody, and
those who cannot vouch for it look for themselves. The rule for judging a peer is in `remora.protocol.membership`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from remora.agent.channel import Channel
from remora.agent.crew import Crew
from remora.agent.peer import Peer
from remora.options import Settings
from remora.protocol.membership import Limits, Verdict, judge
from remora.transport import pulse
from remora.transport.stream import StreamLink
from remora.vocabulary.messages import MessageType

if TYPE_CHECKING:
    from remora.agent.peers import Peers

ACK, PING = int(MessageType.ACK), int(MessageType.PING)
OVERSLEPT = 2.0  # a tick that comes this much after the last one: we were stopped ourselves, and heard nobody
CALLEE_WAITS = 1.5  # heartbeats: the end that dialled asks first, and its question is a sign of life as well


class HostSilent(OSError):
    """A peer's host acknowledges nothing on a link."""


class Vigil:
    """See the head of this file."""

    def __init__(self, peers: Peers, crew: Crew, settings: Settings) -> None:
        self._peers = peers
        self._crew = crew
        self._settings = settings
        self._limits = Limits(
            settings.heartbeat, settings.suspect_after, settings.silence_limit, settings.reconnect_timeout
        )
        self._ticked = float("-inf")
        self._awake = float("-inf")  # since when we have been listening without a break
        self._began = float("inf")
        self.spread: Callable[[Peer], None] | None = None  # tells everybody that a ward died
        peers.obituaries.append(self._mourn)

    def tick(self, now: float) -> None:
        """Called about twice a second, by the timer thread: nothing here blocks."""
        if self._peers.stopping:
            return
        if now - self._ticked > OVERSLEPT:
            self._awake = now
            self._began = min(self._began, now)
        self._ticked = now
        alive = [peer for peer in self._peers.all() if not peer.gone]
        for peer in alive:
            self._look_at(peer, now)
        if now - self._began > self._settings.heartbeat:  # a group that ends at once is spared the trouble
            self._keep_wards(alive)

    def _look_at(self, peer: Peer, now: float) -> None:
        heard: list[float] = []
        for channel in peer.channels():
            link = channel.link
            if link is None:
                continue
            channel.watch(again=True)
            link.heed()
            if channel.paused:  # it is not silent, we do not listen; and it must hear that we live
                self._crew.serve_quickly(partial(channel.say, ACK))
                heard.append(now)
            elif peer is self._peers.me:
                self._ask_ourselves(channel, link, now)
            else:
                heard.append(link.last_heard)
                if link.midway:  # what its sender says meanwhile to hear of us comes behind the rest, and that may take long
                    self._crew.serve_quickly(partial(channel.say, ACK))
                self._care_for(peer, channel, link, now)
        if heard:
            self._conclude(peer, max(heard), now)

    def _ask_ourselves(self, channel: Channel, link: StreamLink, now: float) -> None:
        """That we live is beyond doubt; but what was lost on the way to ourselves (by a fault plan) is to be missed, too."""
        quiet = now - max(link.last_heard, self._awake)
        if channel.session.kept and quiet > self._limits.heartbeat:
            self._crew.serve_quickly(partial(channel.say, PING))

    def _care_for(self, peer: Peer, channel: Channel, link: StreamLink, now: float) -> None:
        """See to one link."""
        quiet = now - max(link.last_heard, self._awake)
        if quiet <= self._limits.heartbeat:
            return
        unanswered = pulse.unanswered(link.sock)
        match judge(self._limits, quiet, unanswered):
            case Verdict.REDIAL:
                self._host_is_silent(peer, channel, unanswered, now)
            case Verdict.DEAD:  # if the peer lives, it has a better one
                self._cut(channel, f"nothing was heard on this link for {quiet:.0f} s")
            case _:
                if channel.dialled or quiet > self._limits.heartbeat * CALLEE_WAITS:
                    self._crew.serve_quickly(partial(channel.say, PING))

    def _host_is_silent(self, peer: Peer, channel: Channel, unanswered: float, now: float) -> None:
        if peer.unreachable_since is None:
            peer.unreachable_since = now - unanswered
        reason = f"its host has not answered for {unanswered:.0f} s"
        self._peers.suspect(peer, reason)
        self._cut(channel, reason)

    def _cut(self, channel: Channel, reason: str) -> None:
        self._crew.serve(lambda: channel.cut(HostSilent(reason)))

    def _conclude(self, peer: Peer, heard: float, now: float) -> None:
        """See to the peer, of whom any link may bring a sign of life."""
        quiet = now - max(heard, self._awake)
        verdict = judge(self._limits, quiet, 0.0)
        if verdict is Verdict.DEAD:
            reason = f"it has been silent for {quiet:.0f} s"
            self._crew.serve(lambda: self._peers.give_up(peer, reason))
        elif verdict is Verdict.SUSPECT:
            self._peers.suspect(peer, f"it has been silent for {quiet:.0f} s")
        elif heard > peer.doubted_at:
            self._peers.trust(peer)

    # Wards.

    def _wards(self, among: list[Peer]) -> list[Peer]:
        """The next few workers by id, behind ours."""
        me = self._peers.me
        others = sorted((peer for peer in among if peer is not me), key=lambda peer: (peer.id < me.id, peer.id))
        return others[: self._settings.watch]

    def _keep_wards(self, alive: list[Peer]) -> None:
        for peer in self._wards(alive):
            if all(channel.link is None for channel in peer.channels()) and not peer.dialling:
                self._peers.connect(peer)

    def _mourn(self, peer: Peer) -> None:
        if peer.state == "dead" and self.spread is not None:
            alive = [each for each in self._peers.all() if not each.gone]
            if peer in self._wards([*alive, peer]) and not peer.gave_us_up:
                self.spread(peer)

    def look_for(self, peer: Peer) -> None:
        """Somebody says that this peer is dead. Unless a link of ours shows that it lives, see for ourselves."""
        links = [channel.link for channel in peer.channels()]
        if peer.gone or any(link is not None for link in links):
            return  # a link says more than hearsay: if it is dead, so is the link soon
        self._peers.connect(peer)
