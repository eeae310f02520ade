"""One worker's part in the membership of its group: what it tells the others, and what it does with what they tell.

In a dynamic group a worker greets all others when it comes and says when it goes. A dead worker is struck off the group's
list by those who noticed, so that its place is free and newcomers do not look for it. In every group the death of a worker
is passed on to those who have no link with it; they see for themselves.

No member is in charge. A member needs the store where the group met only to find workers that it has never heard of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from remora.agent.agent import Agent
from remora.agent.calls.call import Call
from remora.agent.calls.future import Future
from remora.agent.peers.connector import LEFT
from remora.agent.peers.greeting import cannot_talk
from remora.agent.peers.peer import Peer, State
from remora.agent.runtime.current import blocking_region
from remora.agent.serving.dispatch import Request
from remora.clock import NEVER
from remora.errors import AuthenticationError, ProtocolError, RemoraError, RendezvousError
from remora.rendezvous.group import Group
from remora.rendezvous.record import WorkerRecord
from remora.vocabulary.ids import WorkerKey
from remora.vocabulary.messages import (
    ConfirmDeath,
    ConfirmLeave,
    Greeting,
    Joined,
    Leaving,
    LossConfirmed,
    Lost,
    MembershipAck,
    Message,
)
from remora.wire.message_codec import encode

log = logging.getLogger("remora")

M = TypeVar("M", bound=Message)

MEMBERSHIP_ACK = int(MembershipAck.type)
PATIENCE = 5.0  # for others to hear that we come or go
LAST_WORDS = 5.0  # seconds of silence after which a goodbye that others have heard is not waited for
LEAVE_PATIENCE = 100.0  # for calls under way to end before we go

Hearing = Callable[[WorkerKey, WorkerKey], None]


def _for_peer(then: Callable[[Peer], None], peer: Peer, _: object) -> None:
    then(peer)


class Membership:
    """Tells the group of this worker, and does what the group tells."""

    def __init__(
        self,
        agent: Agent,
        group: Group,
        record: WorkerRecord,
        dynamic: bool,
        heard: Hearing,
        tell_heard: Hearing,
    ) -> None:
        self._agent = agent
        self._peers = agent.peers
        self._group = group
        self._record = record
        self._dynamic = dynamic
        self._talks = False  # a member has answered, or there is none: before that, that one is gone may be our own trouble
        self.heard = heard  # (who, lost): a survivor confirms a loss that we asked about
        self.tell_heard = tell_heard  # (to, lost): confirm a loss, behind all that concerns it
        self._serve(Greeting, self._greeted)
        self._serve(Joined, self._joined)
        self._serve(Leaving, self._leaving)
        self._serve(Lost, self._lost)
        self._serve(ConfirmDeath, self._confirm_death)
        self._serve(ConfirmLeave, self._confirm_leave)
        agent.dispatch.on(LossConfirmed.type, self._loss_confirmed, inline=True)
        if dynamic:
            agent.peers.on_gone.append(self._strike_off)

    # Telling.

    def greet(self, records: Sequence[WorkerRecord]) -> None:
        """Tell the others that we are here. Returns when the others know, or it was not to be. If none of them can be
        talked to, though they are there as far as we can tell, we leave again, and the error says why."""
        failed = self._announce(Joined(self._record.to_json()), [self._peers.find(record.name) for record in records])
        if failed and len(failed) == len(records):
            self._check_reachable(failed)
        self._talks = True
        for peer in failed:
            self._strike_off(peer)

    def _check_reachable(self, failed: dict[Peer, RemoraError]) -> None:
        """A member may have ended, or be frozen: then it will be struck off, or come back. But none of them can be reached
        from here, or they have another secret: that is our own trouble."""
        for peer, error in failed.items():
            unreachable = peer.state == "dead" and peer.unreachable_since is not None
            if unreachable or isinstance(error, (AuthenticationError, ProtocolError)):
                self._say_at_the_store(self._group.leave)
                raise cannot_talk(self._record, peer, error)

    def leave(self, timeout: float) -> None:
        """Let calls under way end, then tell the others that we go."""
        self._agent.idle(self._agent.clock.now() + (timeout or LEAVE_PATIENCE), "shutdown")
        self._peers.connector.begin_parting()
        told = self._others()
        self._announce(Leaving(), told, self._peers.farewells.part_from)
        self._say_at_the_store(self._leave_and_look)
        self._announce(Leaving(), [peer for peer in self._others() if peer not in told], self._peers.farewells.part_from)
        self._peers.connector.stop()  # they hang up now, which is no reason to wonder whether they live

    def _leave_and_look(self, record: WorkerRecord) -> None:
        self._group.leave(record)
        self.refresh()  # who joined before that has us on its list, whether we have heard of it or not

    def _say_at_the_store(self, leave: Callable[[WorkerRecord], None]) -> None:
        try:
            leave(self._record)
        except RendezvousError as error:  # the others know; newcomers will find that it does not answer
            log.warning("%s left, but could not say so at the store: %s", self._agent.me, error)

    def _others(self) -> list[Peer]:
        return [peer for peer in self._peers.all() if not peer.gone and peer is not self._peers.me]

    def _announce(
        self, news: Joined | Leaving, to: Sequence[Peer], then: Callable[[Peer], None] = lambda peer: None
    ) -> dict[Peer, RemoraError]:
        """Tell others of ourselves, and call `then` for each that has answered; those that cannot be reached will find out
        by themselves. Those that could not be told, as far as we have waited, and why."""
        packed = encode(news)
        futures: dict[Peer, Future[Any]] = {}
        failed: dict[Peer, RemoraError] = {}
        for peer in to:
            try:
                future = self._agent.caller.call_async(peer, int(news.type), packed, 0, PATIENCE, "membership")
            except RemoraError as error:
                failed[peer] = error
                continue
            future.add_done_callback(partial(_for_peer, then, peer))
            if not peer.suspicion:
                futures[peer] = future
        for peer, future in futures.items():
            try:
                future.wait()
            except RemoraError as error:
                failed[peer] = error
        return failed

    def spread(self, lost: Peer, silent_for: float) -> None:
        """A worker that we were to keep an eye on died, or its host has been silent for so long: the others should see for
        themselves."""
        kind, packed = int(Lost.type), encode(Lost(lost.key, silent_for))
        for peer in self._others():
            if peer is not lost:
                call = Call(peer, "membership", lambda call: None)  # one that cannot be told finds out in another way
                try:
                    self._agent.caller.start_call(peer, call, kind, packed, 0, PATIENCE, control=True, urgent=False)
                except RemoraError:
                    pass

    def _strike_off(self, peer: Peer) -> None:
        if peer.state == "dead" and not peer.gave_us_up and self._talks:
            self._agent.pool.submit_system(lambda: self._remove(peer))

    def _remove(self, peer: Peer) -> None:
        try:
            self._group.leave(peer.record)
        except RendezvousError as error:
            log.info("%s is gone, but could not be struck off the list of the group: %s", peer.info, error)

    # Hearing.

    def _serve(self, kind: type[M], act: Callable[[M, Request], None]) -> None:
        """Have messages of a type read by the thread that reads the link, and acted on by one of the pool: it may wait."""

        def receive(request: Request) -> None:
            message = request.message(kind)

            def answer() -> None:
                try:
                    act(message, request)
                except Exception as error:  # the sender waits for the answer for as long as it takes
                    request.fail(error)
                    raise

            self._agent.pool.submit_system(answer)

        self._agent.dispatch.on(kind.type, receive, inline=True)

    def _loss_confirmed(self, request: Request) -> None:
        """Note that a peer confirms a loss. Runs in the order of arrival: what its sender had to say of references came
        before."""
        self.heard(request.caller.key, request.message(LossConfirmed).worker)
        request.reply(MEMBERSHIP_ACK, None)

    def _greeted(self, message: Greeting, request: Request) -> None:
        request.reply(MEMBERSHIP_ACK, None)
        request.caller.greeted = True  # last: when this is seen we may leave, and the answer is on its way

    def _joined(self, message: Joined, request: Request) -> None:
        try:
            record = WorkerRecord.from_json(message.record)
        except RendezvousError:
            raise ProtocolError(f"a JOINED from {request.caller.name} makes no sense: it has no record") from None
        self._peers.add(record)
        request.reply(MEMBERSHIP_ACK, None)

    def _leaving(self, message: Leaving, request: Request) -> None:
        request.reply(MEMBERSHIP_ACK, None)  # while there is a way to tell it
        self._peers.farewells.hear(request.caller, behind_answers=False)

    def _lost(self, message: Lost, request: Request) -> None:
        peer = self._peers.known(message.worker)
        if peer is not None and peer is not self._peers.me:
            self._peers.failure_detector.verify(peer, message.silent_for)
        request.reply(MEMBERSHIP_ACK, None)

    def _confirm_death(self, message: ConfirmDeath, request: Request) -> None:
        self._confirm(message.worker, request, f"{request.caller.name} lost it", "dead")

    def _confirm_leave(self, message: ConfirmLeave, request: Request) -> None:
        self._await_goodbye(message.worker)
        self._confirm(message.worker, request, LEFT, "left")

    def _await_goodbye(self, key: WorkerKey) -> None:
        """A member has left, as others know by now. If we have a link with it, it says so itself, behind its last answers:
        those should not be lost."""
        peer = self._peers.known(key)
        if peer is None or peer is self._peers.me:
            return
        clock = self._agent.clock
        with blocking_region():
            while self._may_speak(peer) and not clock.block(peer.ended.wait, clock.now() + LAST_WORDS):
                pass

    def _may_speak(self, peer: Peer) -> bool:
        """Return True if something came from a peer lately, on a link that is still there."""
        since = self._agent.clock.now() - LAST_WORDS
        return any(link is not None and link.last_heard >= since for link in [each.link for each in peer.channels()])

    def _confirm(self, key: WorkerKey, request: Request, reason: str, state: State) -> None:
        """An owner of values has lost a worker and must know that we are through with it, too."""
        peer = self._peers.known(key)
        if peer is not None and peer is not self._peers.me:
            self._peers.declare_gone(peer, reason, state)
            # Another thread may be at it: we answer behind all that came from the lost one.
            self._agent.clock.block(peer.ended.wait, NEVER)
        self.tell_heard(request.caller.key, key)
        request.reply(MEMBERSHIP_ACK, None)

    def is_listed(self, record: WorkerRecord) -> bool:
        """Return True if it is a member now, as far as can be found out: no worker joins without the store."""
        try:
            return any(each.incarnation == record.incarnation for each in self._group.members())
        except RendezvousError:
            return False

    def refresh(self) -> None:
        """Look at the store of a dynamic group for workers that we have not heard of."""
        if not self._dynamic:
            return
        for record in self._group.members():
            if not self._agent.admission.is_stale(record):  # the list may be older than what we know by now
                self._peers.add(record)
