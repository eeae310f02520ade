"""Passes that begin at the value of a reference, wherever it is: `rref.backward(context_id)`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from remora.agent.calls.call import UNSET_TIMEOUT
from remora.agent.serving.dispatch import Request
from remora.errors import RemoraError
from remora.rref.handle import Handle
from remora.rref.references import References
from remora.vocabulary.messages import RRefBackwardReq, RRefBackwardResp
from remora.wire.message_codec import encode

if TYPE_CHECKING:
    from remora.autograd.engine import Engine

NO_CONTEXT = -1


class RRefBackward:
    """Implements `RRef.backward`."""

    def __init__(self, engine: Engine, references: References) -> None:
        self._engine = engine
        self._references = references
        references.agent.dispatch.on(RRefBackwardReq.type, self._on_backward, inline=True)

    def backward(self, rref: Handle, context_id: int, retain_graph: bool) -> None:
        """Backpropagate from the value of a reference. Without a context: on its owner alone, into `.grad`."""
        if rref.value is not None:
            root = _tensor(rref.value.get())
            if context_id == NO_CONTEXT:
                root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            else:
                self._engine.backward(context_id, [root], retain_graph, smart=True)
            return
        if context_id == NO_CONTEXT:
            raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified for distributed autograd")
        rref.check_usable("backward() on it")
        packed = encode(RRefBackwardReq(rref.rref_id, context_id, retain_graph))
        kind = int(RRefBackwardReq.type)
        self._references.agent.caller.call(rref.owner, kind, packed, 0, UNSET_TIMEOUT, "RRef.backward")

    def _on_backward(self, request: Request) -> None:
        message = request.message(RRefBackwardReq)
        rref, context_id, retain_graph = message.rref, message.context_id, message.retain_graph
        value = self._references.table.owned.find(rref)
        if value is None:
            raise RemoraError(f"{rref} is not known to its owner {self._references.me.info}")

        def run() -> None:
            try:
                self._engine.backward(context_id, [_tensor(value.get())], retain_graph, smart=True)
            except BaseException as error:
                request.fail(error)
            else:
                request.reply(int(RRefBackwardResp.type), None)

        pool = self._references.agent.pool
        pool.call_soon(partial(value.when_ready, partial(pool.submit, run)))


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    return value
