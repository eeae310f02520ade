"""Carries a context along with calls: a program enters one, and the workers that serve its calls go on in it.

The agent knows no more of it than this file says. The contexts are those of distributed autograd: what a message says of
its context lets the two ends of a call join their graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from remora.agent.calls.peer_info import PeerInfo
from remora.wire import ref_header
from remora.wire.device_buffers import Route
from remora.wire.fast_pickle import NeedsScope
from remora.wire.frames import RECORDED
from remora.wire.pack_scope import PackScope
from remora.wire.packed import Packed
from remora.wire.pickler import pack, pack_simply

P = ParamSpec("P")
R = TypeVar("R")
Header = tuple[int, int, bool]  # the context, the message, and whether histories are recorded (or under no_grad)


class CallContext(Protocol):
    """A context, as one worker knows it. It may keep `peer`, which is a `Peer`, to send more to it: this room lies below
    that class and cannot name it."""

    def outgoing(self, peer: Any) -> tuple[Header, list[torch.Tensor] | None]:
        """A message to `peer` is about to be packed: what it says, and where to put the tensors with a history."""

    def sent(self, peer: Any, header: Header, links: list[torch.Tensor]) -> None:
        """It is packed, and these are its tensors with a history."""

    def received(self, peer: Any, header: Header, links: dict[int, torch.Tensor]) -> None:
        """A message came from `peer`, with these tensors that have a history there."""


current_call_context: ContextVar[CallContext | None] = ContextVar("remora_call_context", default=None)


def recorded(callback: Callable[P, R]) -> Callable[P, R]:
    """`callback`, to run later and on another thread: calls it makes belong to the context of now."""
    context = current_call_context.get()
    if context is None:
        return callback

    grad_enabled = torch.is_grad_enabled()

    def carry_on(*args: P.args, **kwargs: P.kwargs) -> R:
        with call_context_for(context, grad_enabled):
            return callback(*args, **kwargs)

    return carry_on


class call_context_for:
    """`with call_context_for(…):` serve a request that belongs to a context; under no_grad if its caller was."""

    __slots__ = ("_before", "_context", "_grad_enabled", "_token")

    def __init__(self, context: CallContext, grad_enabled: bool) -> None:
        self._context = context
        self._grad_enabled = grad_enabled

    def __enter__(self) -> None:
        self._token = current_call_context.set(self._context)
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._grad_enabled)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._before)
        current_call_context.reset(self._token)


def pack_for(
    peer: PeerInfo, way: Route, value: object, context: CallContext | None, ordered: bool = False, detached: bool = False
) -> tuple[Packed, int]:
    """`pack_recorded` for a call or its reply. Most are simple, and belong to no context."""
    simple = True
    if context is None:
        try:
            packed = pack_simply(value, not way.moves_cpu)
            if packed is not None:
                return packed, 0
            simple = False
        except NeedsScope:
            pass
    scope = PackScope(peer, ordered, way, peer.shares_main)
    scope.detached = detached
    return pack_recorded(value, scope, context, simple=simple)


def pack_recorded(
    value: object,
    scope: PackScope,
    context: CallContext | None,
    creates: tuple[Any, ...] | None = None,
    simple: bool = True,
) -> tuple[Packed, int]:
    """Pack a message, with what the context says of it. The flags tell what it has beside the value. `simple`: see
    `pack`."""
    if context is None:
        packed = pack(value, scope, simple=simple)
        flags = packed.flags
    else:
        header, scope.links = context.outgoing(scope.peer)
        scope.detached = scope.links is None
        packed = pack((value, header), scope)
        if scope.links:
            context.sent(scope.peer, header, scope.links)
        packed.context = context
        flags = RECORDED | packed.flags
    if creates is not None or scope.attachments:
        flags |= ref_header.attach(packed, scope, creates)
    return packed, flags
