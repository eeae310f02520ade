"""Errors of arguments and results that cannot be packed say which part of which call it is. For the failing path only."""

from __future__ import annotations

from functools import partial

from remora.agent.calls.call_errors import name_of
from remora.agent.calls.peer_info import PeerInfo
from remora.wire import pickle_errors
from remora.wire.pack_scope import PackScope


def explain_arguments(error: BaseException, peer: PeerInfo, function: object, args: object, kwargs: object) -> None:
    """To pack a call of `function` on `peer` has failed."""
    if isinstance(error, MemoryError):
        error.args = (f"{peer.me} has no memory to pack the arguments of {name_of(function)} on {peer.name}",)
        return
    scope = partial(PackScope, peer, True, peer.routes.requests, peer.shares_main)
    roots = [("args", args), ("kwargs", kwargs), ("the function", function)]
    pickle_errors.explain(error, roots, f"{name_of(function)} on {peer.name}", scope)


def explain_result(error: BaseException, caller: PeerInfo, function: object, result: object, me: str) -> None:
    """To pack what `function` returned on this worker, `me`, has failed. None: it is the value of a reference."""
    if isinstance(error, MemoryError):
        error.args = (f"{me} has no memory to pack the result of {name_of(function)} for {caller.name}",)
        return
    scope = partial(PackScope, caller, False, caller.routes.replies, caller.shares_main)
    of = f"{name_of(function)} on {me}" if function is not None else f"a reference to a value of {me}"
    pickle_errors.explain(error, [("the result" if function is not None else "the value", result)], of, scope)
