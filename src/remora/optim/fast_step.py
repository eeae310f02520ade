"""The step of a torch optimizer, without the ceremony around it while nobody watches.

torch wraps the `step` of its optimizers: for profiles, it gives each step a name, and it calls hooks. To do that with no
profile being made and no hooks there takes a third as long as a small step itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torchs

from remora.options import FAST_PATHS

_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_OWN_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)


def _code_of_ceremony() -> object:
    """What torch's wrapper runs, whatever it is around: the one mark that a wrapper of the program's does not inherit by
    `functools.wraps`."""
    try:
        return torchs.Optimizer.profile_hook_step(_profiled).__code__
    except (AttributeError, TypeError):
        return object()  # torch does it in another way: nothing is left out


_CEREMONY = _code_of_ceremony()


def step(optimizer: Any) -> None:
    """`optimizer.step()`."""
    wrapped: Any = getattr(type(optimizer), "step", None)
    if (
        not FAST_PATHS.fast_step
        or getattr(wrapped, "__code__", None) is not _CEREMONY
        or _profiled()
        or "step" in optimizer.__dict__  # a scheduler has wrapped that of this very optimizer
        or _has_hooks(optimizer)
    ):
        optimizer.step()
    else:
        wrapped.__wrapped__(optimizer)


def _has_hooks(optimizer: Any) -> bool:
    """Whether there are hooks, or may be: where torch keeps them is its own business."""
    unknown = (None,)
    return any(getattr(torchs, name, unknown) for name in _HOOKS) or any(
        getattr(optimizer, name, unknown) for name in _OWN_HOOKS
    )
