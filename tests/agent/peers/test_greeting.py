"""The greeting of neighbours, with a neighbour that ends at the worst moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remora.agent.peers import greeting
from remora.clock import SYSTEM
from remora.errors import RendezvousError


@pytest.mark.parametrize("greeted", [True, False])
def test_a_neighbour_that_greets_late_and_ends_has_greeted(monkeypatch: pytest.MonkeyPatch, greeted: bool) -> None:
    peer: Any = SimpleNamespace(name="worker1", greeted=False, gone=False, reason="its process ended")
    agent: Any = SimpleNamespace(clock=SYSTEM)
    me: Any = SimpleNamespace(name="worker0")

    def call(*args: object) -> None:
        peer.greeted, peer.gone = greeted, True
        raise RendezvousError("it ended")

    monkeypatch.setattr(greeting, "LOOK_AGAIN", 0.0)
    monkeypatch.setattr(greeting, "_call", call)
    if greeted:
        greeting._await_call_of(agent, peer, me, 5.0)
    else:
        with pytest.raises(RendezvousError, match="it ended"):
            greeting._await_call_of(agent, peer, me, 5.0)
