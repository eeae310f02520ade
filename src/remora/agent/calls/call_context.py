"""Carries a recording along with calls: a program begins to record its calls, and the workers that serve them go on.

The agent knows no more of it than this file says. Distributed autograd is the one that records: its contexts are the
recordings, and what a message says of them lets the two ends of a call join their graphs.
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
Header = tuple[int, int, bool]  # the recording, the message, and whether histories are recorded (or under no_grad)


class CallContext(Protocol):
    """One recording of one worker. It may keep `peer`, which is a `Peer`, to send more to it: this room lies below that
    class and cannot name it."""

    def outgoing(self, peer: Any) -> tuple[Header, list[torch.Tensor] | None]:
        """A message to `peer` is about to be packed: what it says, and where to put the tensors with a history."""

    def sent(self, peer: Any, header: Header, links: list[torch.Tensor]) -> None:
        """It is packed, and these are its tensors with a history."""

    def received(self, peer: Any, header: Header, links: dict[int, torch.Tensor]) -> None:
        """A message came from `peer`, with these tensors that have a history there."""


current_recording: ContextVar[CallContext | None] = ContextVar("remora_recording", default=None)


def recorded(callback: Callable[P, R]) -> Callable[P, R]:
    """`callback`, to run later and on another thread: calls it makes belong to what is recorded now."""
    recording = current_recording.get()
    if recording is None:
        return callback

    grad_enabled = torch.is_grad_enabled()

    def carry_on(*args: P.args, **kwargs: P.kwargs) -> R:
        with call_context_for(recording, grad_enabled):
            return callback(*args, **kwargs)

    return carry_on


class call_context_for:
    """`with call_context_for(…):` serve a request that belongs to a recording; under no_grad if its caller was."""

    __slots__ = ("_before", "_grad_enabled", "_recording", "_token")

    def __init__(self, recording: CallContext, grad_enabled: bool) -> None:
        self._recording = recording
        self._grad_enabled = grad_enabled

    def __enter__(self) -> None:
        self._token = current_recording.set(self._recording)
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._grad_enabled)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._before)
        current_recording.reset(self._token)


def pack_for(
    peer: PeerInfo, way: Route, value: object, recording: CallContext | None, ordered: bool = False, detached: bool = False
) -> tuple[Packed, int]:
    """`pack_recorded` for a call or its reply. Most are simple, and belong to no recording."""
    simple = True
    if recording is None:
        try:
            packed = pack_simply(value, not way.moves_cpu)
            if packed is not None:
                return packed, 0
            simple = False
        except NeedsScope:
            pass
    scope = PackScope(peer, ordered, way, peer.shares_main)
    scope.detached = detached
    return pack_recorded(value, scope, recording, simple=simple)


def pack_recorded(
    value: object,
    scope: PackScope,
    recording: CallContext | None,
    creates: tuple[Any, ...] | None = None,
    simple: bool = True,
) -> tuple[Packed, int]:
    """Pack a message, with what the recording says of it. The flags tell what it has beside the value. `simple`: see
    `pack`."""
    if recording is None:
        packed = pack(value, scope, simple=simple)
        flags = packed.flags
    else:
        header, scope.links = recording.outgoing(scope.peer)
        scope.detached = scope.links is None
        packed = pack((value, header), scope)
        if scope.links:
            recording.sent(scope.peer, header, scope.links)
        packed.recording = recording
        flags = RECORDED | packed.flags
    if creates is not None or scope.attachments:
        flags |= ref_header.attach(packed, scope, creates)
    return packed, flags
