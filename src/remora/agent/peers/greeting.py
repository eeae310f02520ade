"""Before `init_rpc` returns, a worker of a static group has talked with its two neighbours in the ring of ids.

Each worker calls the next one, and waits until it has answered the call of the previous one. So a wrong secret, an address
that others cannot reach or a firewall is an error of `init_rpc`, and not of some later call. Nothing dead-locks: a worker
serves before it greets, so every greeting is answered however the others wait. No worker ends before the previous one has
its answer, so one that cannot be reached has not simply been quick.

A worker that joins a dynamic group tells all members that it is there, which does the same: see
`remora.agent.peers.group_membership`.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable

from remora.agent.agent import Agent
from remora.agent.calls.blocking import wait_until
from remora.agent.peers.peer import ENDED, Peer
from remora.errors import AuthenticationError, CallTimeout, ProtocolError, RemoraError, RendezvousError
from remora.long_wait import LongWait
from remora.rendezvous.record import WorkerRecord
from remora.vocabulary.messages import Greeting
from remora.wire.message_codec import encode

LOOK_AGAIN = 1.0  # seconds that the previous worker may take before we see whether it lives
PAUSE = 0.002
MAX_SHOWN = 8  # names in a message


def greet_neighbours(agent: Agent, me: WorkerRecord, timeout: float) -> None:
    """Return when both neighbours have been heard of. RendezvousError or AuthenticationError says why not."""
    others = [peer for peer in agent.peers.all() if peer is not agent.peers.me]
    ring = sorted(others, key=lambda peer: (peer.id < me.id, peer.id))
    if not ring:
        return
    try:
        _call(agent, ring[0], me, timeout)
        _await_call_of(agent, ring[-1], me, timeout)
    except RendezvousError as error:
        refused = agent.listener.handshake_client.refused
        raise type(error)(f"{error} {me.name} refused a connection before that: {refused}") if refused else error from None


def _call(agent: Agent, peer: Peer, me: WorkerRecord, timeout: float) -> None:
    try:
        agent.caller.call_async(peer, int(Greeting.type), encode(Greeting()), 0, timeout, "greeting").wait()
    except RemoraError as error:
        raise cannot_talk(me, peer, error, agent.peers.all()) from None


def _await_call_of(agent: Agent, peer: Peer, me: WorkerRecord, timeout: float) -> None:
    report = LongWait(lambda: f"init_rpc: {me.name} still waits for {peer.name} to greet it", agent.clock)
    deadline = agent.clock.now() + (timeout or math.inf)

    def came() -> bool:
        return peer.greeted or peer.gone

    if not wait_until(came, min(agent.clock.now() + LOOK_AGAIN, deadline), agent.clock, PAUSE):
        try:
            _call(agent, peer, me, timeout)  # it may have ended
        except RendezvousError:
            if not peer.greeted:  # else it greeted us meanwhile, was done, and ended: nothing is wrong
                raise
        if not wait_until(came, deadline, agent.clock, PAUSE, report):
            raise RendezvousError(
                f"init_rpc: {peer.name} answers {me.name}, but did not call it within {timeout:g} s. "
                f"{_what_to_set(me, peer.name)}"
            )
    if not peer.greeted:
        raise cannot_talk(me, peer, RemoraError(peer.reason), agent.peers.all())


def cannot_talk(me: WorkerRecord, peer: Peer, error: RemoraError, members: Iterable[Peer] = ()) -> RemoraError:
    """The error of `init_rpc` for a worker that does not answer: which address was tried, from where, and what to set.
    Among `members`, the dead are named: the worker may have given up because of one of them."""
    what = f"init_rpc: {me.name} cannot talk to {peer.name} of its group"
    place = f"Tried {', '.join(peer.record.addresses) or 'no address'} from {socket.gethostname()}"
    if isinstance(error, AuthenticationError | ProtocolError):
        reason = str(error).partition(": ")[2].rstrip(".") or str(error)  # without which call it was: the program made none
        return type(error)(f"{what}: {reason}. {place}.")
    if isinstance(error, CallTimeout):
        return RendezvousError(f"{what}: it did not answer in time. {place}. {_what_to_set(peer.record, me.name)}")
    if peer.state == "left" or peer.has_ended:
        dead = [each for each in members if each.state == "dead" and each is not peer][:MAX_SHOWN]
        others = "".join(f" {each.name} is lost, too: {_end_of(each)}." for each in dead)
        return RendezvousError(
            f"{what}: {_end_of(peer)}, while the group was being formed. See what it printed.{others} {place}."
        )
    return RendezvousError(f"{what}: {peer.reason or error}. {place}. {_what_to_set(peer.record, me.name)}")


def _end_of(peer: Peer) -> str:
    """Return the end of a worker in words. Nothing listens at its addresses after its process ended, and after its
    init_rpc failed; while it gives up, it says that it leaves."""
    if peer.has_ended:
        return f"{ENDED}, or gave up init_rpc"
    return "it left again, or gave up init_rpc" if peer.state == "left" else peer.reason


def _what_to_set(unreachable: WorkerRecord, by: str) -> str:
    name = unreachable.name
    return (
        f"If the process of {name} lives, {by} cannot reach the address at which it listens. On {name}, set REMORA_HOST or "
        f"REMORA_INTERFACE (or the options host, interface) to an address that other hosts reach; a firewall must let its "
        f"port pass (REMORA_PORT=29600-29650, or the option port, narrows the choice)."
    )
