"""The members of the group and the events of their lives: `remora.rpc.on_membership` and what it reports.

    def tell(event):
        match event:
            case Died(worker, reason):
                print(f"{worker.name} died: {reason}")

    with rpc.on_membership(tell):
        ...

PyTorch has nothing like it.
"""

from __future__ import annotations

from collections.abc import Callable

from remora.agent.peers.membership_events import Subscription
from remora.protocol.member_rules import Died, Joined, Left, Member, MembershipEvent, Recovered, Suspected
from remora.rpc.current_worker import _get_current_rpc_agent
from remora.vocabulary.ids import WorkerInfo


def on_membership(callback: Callable[[MembershipEvent], object]) -> Subscription:
    """Have `callback` called when a worker joins, leaves, dies, is suspected, or turns out to be well after all.

    It runs on a thread of the worker, one event after the other, in the order in which they happened as seen from here; it
    may make calls. Ends with `cancel()` on what this returns, at the end of a `with` block, or with the worker. What
    happened before is not told: subscribe first, then look at `members()`.
    """
    return _get_current_rpc_agent().agent.peers.events.subscribe(callback)


def get_worker_infos() -> list[WorkerInfo]:
    """The workers that are there now, by id: this one, and all others that have not left or died as far as is known."""
    return _get_current_rpc_agent().get_worker_infos()


def members() -> list[Member]:
    """The same with the state of each (alive, suspected, left or dead) and the reason; the last of those gone included."""
    return _get_current_rpc_agent().members()


__all__ = [
    "Died",
    "Joined",
    "Left",
    "Member",
    "MembershipEvent",
    "Recovered",
    "Subscription",
    "Suspected",
    "get_worker_infos",
    "members",
    "on_membership",
]
