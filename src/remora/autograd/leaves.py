"""The gradients of leaves are lent to torch while it works on them: they are gathered in a context, and not in `.grad`.

While a context has lent its gradient of a leaf, that is what `.grad` is: torch adds to it by its own rules, runs the hooks
that belong there, and an optimizer finds it. Afterwards `.grad` is what it was. One at a time may do that with a leaf.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import torch

from remora.agent.crew import waiting

_changed = threading.Condition()
_claims: dict[object, int] = {}  # what is being worked on, by whom (a thread)


@contextmanager
def claimed(things: Iterable[object]) -> Iterator[None]:
    """Have these for this thread alone. They are taken all at once, so nobody waits for somebody who waits."""
    me = threading.get_ident()
    keys = set(map(id, things))
    with _changed:
        if any(_claims.get(key, me) != me for key in keys):
            with waiting():
                _changed.wait_for(lambda: all(_claims.get(key, me) == me for key in keys))
        mine = [key for key in keys if key not in _claims]  # the rest this thread has already, further out
        _claims.update((key, me) for key in mine)
    try:
        yield
    finally:
        with _changed:
            for key in mine:
                del _claims[key]
            _changed.notify_all()


@contextmanager
def lent(
    leaves: Sequence[torch.Tensor], gradients: MutableMapping[torch.Tensor, torch.Tensor], also: Iterable[object] = ()
) -> Iterator[None]:
    """Let `.grad` of the leaves be what `gradients` has for them; what it is afterwards goes there."""
    with claimed([*leaves, *also]):
        own = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = gradients.get(leaf)
        try:
            yield
        finally:
            for leaf, before in zip(leaves, own, strict=True):
                gathered = leaf.grad
                if gathered is not None:
                    gradients[leaf] = gathered
                else:
                    gradients.pop(leaf, None)  # a hook that has used the gradient may drop it
                leaf.grad = before
