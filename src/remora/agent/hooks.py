"""Everything that the layers above plug into an agent: one object, complete when the agent is made and never changed.

Handlers of messages are not here: `Dispatch.on` is a table of them. Nor are listeners that come and go
(`PeerLifecycle.on_gone`, `MembershipEvents`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from remora.agent.calls.call_context import CallContext, Header
from remora.agent.peers.peer import Peer
from remora.rendezvous.record import WorkerRecord
from remora.wire.enclosed import Arrival
from remora.wire.frames import Body


@dataclass(frozen=True, slots=True)
class Hooks:
    """The functions of the layers above that an agent calls. None of it is called before the agent has started."""

    worker: object  # the current worker on every thread of the agent
    # Takes note of the references in the body of a message; returns the rest of the body, and the references.
    arrived: Callable[[Peer, Body], tuple[Body, Arrival]]
    find_context: Callable[[Header], CallContext]  # the context that an arrived request belongs to
    spread_loss: Callable[[Peer, float], None]  # tells all others that a peer is dead, or silent for so many seconds
    is_listed: Callable[[WorkerRecord], bool]  # whether the list of the group has a worker
