"""The gradients of leaves are lent to torch while it works on them: they are gathered in a context, and not in `.grad`.

While a context has lent its gradient of a leaf, that is what `.grad` is: torch adds to it by its own rules, runs the hooks
that belong there, and an optimizer finds it. Afterwards `.grad` is what it was. One at a time may do that with a leaf.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, MutableMapping, Sequence

import torch

from remora.agent.crew import waiting

_lock = threading.Lock()  # guards the next two
_claims: dict[int, int] = {}  # what is being worked on, by whom (a thread)
_sleepers = 0
_changed = threading.Condition(_lock)


class Lent:
    """`with Lent(leaves, gradients):` `.grad` of the leaves is what `gradients` has for them; what it is in the end goes
    there. `also`: what else nobody else may work on meanwhile."""

    __slots__ = ("_gradients", "_leaves", "_mine", "_own", "_things")

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        gradients: MutableMapping[torch.Tensor, torch.Tensor],
        also: Iterable[object] = (),
    ) -> None:
        self._leaves = leaves
        self._gradients = gradients
        self._things = {*map(id, leaves), *map(id, also)}

    def __enter__(self) -> None:
        gradients = self._gradients
        self._mine = _claim(self._things)
        try:
            self._own = [leaf.grad for leaf in self._leaves]
            for leaf, own in zip(self._leaves, self._own, strict=True):
                gathered = gradients.get(leaf) if gradients else None
                if gathered is not own:
                    leaf.grad = gathered
        except BaseException:
            _give_back(self._mine)
            raise

    def __exit__(self, *error: object) -> None:
        gradients = self._gradients
        for leaf, own in zip(self._leaves, self._own, strict=True):
            gathered = leaf.grad
            if gathered is not None:
                gradients[leaf] = gathered
            elif gradients:
                gradients.pop(leaf, None)  # a hook that has used the gradient may drop it
            if gathered is not own:
                leaf.grad = own
        _give_back(self._mine)


def _claim(things: set[int]) -> list[int]:
    """Have these for this thread alone. They are taken all at once, so nobody waits for somebody who waits."""
    global _sleepers
    me = threading.get_ident()
    with _lock:
        if _claims and not _free(things, me):
            _sleepers += 1
            try:
                with waiting():
                    _changed.wait_for(lambda: _free(things, me))
            finally:
                _sleepers -= 1
        mine = [key for key in things if key not in _claims]  # the rest this thread has already, further out
        for key in mine:
            _claims[key] = me
        return mine


def _free(things: set[int], me: int) -> bool:
    return all(_claims.get(key, me) == me for key in things)


def _give_back(things: list[int]) -> None:
    with _lock:
        for key in things:
            del _claims[key]
        if _sleepers:
            _changed.notify_all()
