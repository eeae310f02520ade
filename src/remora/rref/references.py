"""References of one worker: its agent, its reference table, and what the layers above do with values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remora.agent.agent import Agent
from remora.agent.peers.manager import Peer
from remora.rref.ref_table import Table


@dataclass(frozen=True, slots=True)
class Calls:
    """The functions of `rpc` by which a proxy calls the methods of a value."""

    rpc_sync: Callable[..., Any]
    rpc_async: Callable[..., Any]
    remote: Callable[..., Any]


class References:
    """Every reference of a worker has this object in hand."""

    def __init__(
        self,
        agent: Agent,
        first_id: int,
        dynamic: bool,
        calls: Calls,
        backward: Callable[[Any, int, bool], None],
        sites: bool = False,
    ) -> None:
        self.agent = agent
        self.me: Peer = agent.peers.me
        self.dynamic = dynamic  # workers come and go: a message with a reference says how to reach its owner
        self.sites = sites  # where each reference is made is recorded
        self.table = Table(agent, first_id)
        self.calls = calls
        self.backward = backward  # from the value of a handle, in a context, with or without keeping the graph
