"""References of one worker: its agent, its reference table, and the hook of distributed autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remora.agent.agent import Agent
from remora.agent.peers.manager import Peer
from remora.rref.ref_table import Table


class References:
    """Every reference of a worker has this object in hand."""

    def __init__(self, agent: Agent, first_id: int = 0, dynamic: bool = False, sites: bool = False) -> None:
        self.agent = agent
        self.me: Peer = agent.peers.me
        self.dynamic = dynamic  # workers come and go: a message with a reference says how to reach its owner
        self.sites = sites  # where each reference is made is recorded
        self.table = Table(agent, first_id)
        # Backpropagates from the value of a handle, in a context, with or without keeping the graph. Set by autograd.
        self.differentiate: Callable[[Any, int, bool], None] | None = None
