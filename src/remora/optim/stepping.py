"""The step of a torch optimizer, without the ceremony around it while nobody watches.

torch wraps the `step` of its optimizers: for profiles, it gives each step a name, and it calls hooks. To do that with no
profile being made and no hooks there takes a third as long as a small step itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torchs

_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_OWN_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)


def step(optimizer: Any) -> None:
    """`optimizer.step()`."""
    bare = getattr(type(optimizer).step, "__wrapped__", None)
    if bare is None or _profiled() or not _is_only_wrapped(optimizer) or _has_hooks(optimizer):
        optimizer.step()
    else:
        bare(optimizer)


def _is_only_wrapped(optimizer: Any) -> bool:
    """Whether torch has wrapped the step of its class, and nobody (a scheduler) that of this very optimizer."""
    return getattr(type(optimizer).step, "hooked", False) is True and "step" not in optimizer.__dict__


def _has_hooks(optimizer: Any) -> bool:
    """Whether there are hooks, or may be: where torch keeps them is its own business."""
    unknown = (None,)
    return any(getattr(torchs, name, unknown) for name in _HOOKS) or any(
        getattr(optimizer, name, unknown) for name in _OWN_HOOKS
    )
