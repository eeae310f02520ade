"""Distributed autograd: backpropagation through calls, with the names of `torch.distributed.autograd`.

    with remora.autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", forward, args=(x,)).sum()
        remora.autograd.backward(context_id, [loss])
        gradients = remora.autograd.get_gradients(context_id)
"""

import torch

from remora.agent.calls.call_context import current_call_context
from remora.agent.runtime.current import acting_worker
from remora.autograd.context import Context
from remora.autograd.context_registry import ContextManager
from remora.autograd.engine import Engine

_MAX_WORKER = 2**16 - 1


def _engine() -> Engine:
    engine: Engine = acting_worker().autograd
    return engine


def context() -> ContextManager:
    """`with context() as context_id:` calls made inside belong to one context, and so do the calls those make. It is
    released, on all workers, at the end."""
    return ContextManager(_engine().contexts)


# TorchScript may call these two. It wants their types as they are here, and compiles what is not said to be Python; the
# name is the one that a scripted program sees in its graph.


def dist_backward(context_id: int, roots: list[torch.Tensor], retain_graph: bool = False, mode: str = "smart") -> None:
    """Backpropagate from `roots`, scalars of this worker, through all calls of the context they came from.

    The gradients are added to the context's (`get_gradients`) on each worker that has leaves of the graph. With "smart" the
    workers first find out which messages take part; with "fast" every result of every call has to be used for the roots.
    """
    _backward(context_id, roots, retain_graph, mode)


backward = dist_backward


@torch.jit.ignore  # type: ignore[untyped-decorator]
def _backward(context_id: int, roots: list[torch.Tensor], retain_graph: bool, mode: str) -> None:
    if not isinstance(context_id, int) or not isinstance(roots, list | tuple):
        raise TypeError(
            f"backward(): incompatible function arguments ({type(context_id).__name__}, {type(roots).__name__}): it takes "
            f"the id of a context and a list of tensors"
        )
    if mode not in ("smart", "fast"):
        raise ValueError(f'mode is "smart" or "fast", not {mode!r}')
    _engine().backward(context_id, roots, retain_graph, mode == "smart")


@torch.jit.ignore  # type: ignore[untyped-decorator]
def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients gathered in a context on this worker, by the leaf they belong to."""
    gathered = _engine().contexts.get(context_id).ready_gradients()
    return dict(gathered.values())


def is_available() -> bool:
    """Always, like `remora.rpc`."""
    return True


# What PyTorch's tests and some programs use.

DistAutogradContext = Context


def _init(worker_id: int) -> None:
    """Check the id of a worker: contexts are numbered by it."""
    if not 0 <= worker_id <= _MAX_WORKER:
        raise RuntimeError(f"worker_id needs to be between 0 and {_MAX_WORKER}, got {worker_id}")


def _new_context() -> Context:
    """A context that is current from now on, until `_release_context`."""
    return _engine().contexts.enter()


def _release_context(context_id: int) -> None:
    """Release a context everywhere."""
    contexts = _engine().contexts
    current = current_call_context.get()
    if isinstance(current, Context) and current.id == context_id:
        current_call_context.set(None)
    contexts.release(context_id)


def _retrieve_context(context_id: int) -> Context:
    return _engine().contexts.get(context_id)


def _known_context(context_id: int) -> Context | None:
    """A context, if this worker has a part of it."""
    return _engine().contexts.known(context_id)


def _is_valid_context(context_id: int) -> bool:
    return _known_context(context_id) is not None


def _current_context() -> Context:
    current = current_call_context.get()
    if not isinstance(current, Context):
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code with `with "
            "remora.autograd.context() as context_id` to generate a valid context"
        )
    return current


def _get_max_id() -> int:
    return _engine().contexts.largest_id


def _get_debug_info() -> dict[str, str]:
    return {key: str(value) for key, value in _engine().counts().items()}


__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]
