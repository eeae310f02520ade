"""The gradients of leaves are lent to torch while it works on them: they are gathered in a context, and not in `.grad`.

While a context has lent its gradient of a leaf, that is what `.grad` is: torch adds to it by its own rules, runs the hooks
that belong there, and an optimizer finds it. Afterwards `.grad` is what it was. One at a time may do that with a leaf.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from remora.agent.crew import waiting

# The gradients of a context: by the id of the leaf, the leaf and its gradient. Not by the leaf itself, which torch hashes in
# Python; and while the leaf is in there, nothing else has its id.
Gathered = dict[int, tuple[torch.Tensor, torch.Tensor]]

_lock = threading.Lock()  # guards the next two
_claims: dict[int, int] = {}  # what is being worked on, by whom (a thread)
_sleepers = 0
_changed = threading.Condition(_lock)


class Lent:
    """`with Lent(leaves, gathered):` `.grad` of the leaves is what `gathered` has for them; what it is in the end goes
    there. `also`: what else nobody else may work on meanwhile."""

    __slots__ = ("_gathered", "_leaves", "_mine", "_own", "_things")

    def __init__(self, leaves: Sequence[torch.Tensor], gathered: Gathered, also: Iterable[object] = ()) -> None:
        self._leaves = leaves
        self._gathered = gathered
        self._things = {*map(id, leaves), *map(id, also)}
        self._own: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        gathered = self._gathered
        self._mine = _claim(self._things)
        try:
            for leaf in self._leaves:
                own = leaf.grad
                known = gathered.get(id(leaf))
                gradient = None if known is None else known[1]
                if gradient is not own:
                    if own is not None:
                        leaf.grad = own  # or raise while nothing is changed: it could not be put back, either
                    leaf.grad = gradient
                self._own.append(own)
        except BaseException:
            self._put_back()
            _give_back(self._mine)
            raise

    def __exit__(self, *error: object) -> None:
        gathered = self._gathered
        for leaf in self._leaves:
            gradient = leaf.grad
            if gradient is not None:
                gathered[id(leaf)] = leaf, gradient
            else:
                gathered.pop(id(leaf), None)  # a hook that has used the gradient may drop it
        try:
            self._put_back()
        finally:
            _give_back(self._mine)

    def _put_back(self) -> None:
        """`.grad` is what it was. If a leaf does not take it any more, because a hook has made something else of the leaf,
        it has none, and the others have theirs all the same."""
        refused: RuntimeError | None = None
        for leaf, own in zip(self._leaves, self._own, strict=False):  # not more than were lent
            if leaf.grad is not own:
                try:
                    leaf.grad = own
                except RuntimeError as error:
                    leaf.grad = None
                    refused = error
        if refused is not None:
            raise refused


def _claim(things: set[int]) -> set[int]:
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
        mine = things - _claims.keys()  # the rest this thread has already, further out
        _claims.update(dict.fromkeys(mine, me))
        return mine


def _free(things: set[int], me: int) -> bool:
    return all(_claims.get(key, me) == me for key in things)


def _give_back(things: set[int]) -> None:
    with _lock:
        for key in things:
            del _claims[key]
        if _sleepers:
            _changed.notify_all()
