"""Carries what upper layers know and add while a value is packed or rebuilt. No pickling here."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from remora.wire.device_buffers import Landing, Route
from remora.wire.undo import Undo

Mark = tuple[int, int]  # so many undos, so many attachments
# Of a reference: the owner, the value's id (2), the fork's id (2), the parent, "script" or "PyObject"
ForkData = tuple[int, int, int, int, int, int, str]
Attachment = tuple[ForkData, str, bytes]  # and the owner's incarnation, and the owner's record as JSON (b"": not sent)
BEGINNING: Mark = (0, 0)


class PackScope:
    """One value on its way out: its receiver, and how to undo what its reducers did.

    A reducer with a side effect (a fork registered, a child pinned) appends its undo. `pack` runs those when it fails;
    after it succeeded they stay here for the sender, which runs them if it fails.
    """

    __slots__ = ("attachments", "detached", "links", "ordered", "peer", "route", "shares_main", "undo")

    def __init__(
        self, peer: object = None, ordered: bool = False, route: Route | None = None, shares_main: bool = True
    ) -> None:
        self.peer = peer
        self.shares_main = shares_main  # the receiver runs the same main program: code of `__main__` goes by name
        self.route = route  # of tensors on devices; None: they cannot be sent
        # The message goes over the channel of our own requests, so a later release cannot overtake it.
        self.ordered = ordered
        self.undo = Undo(armed=ordered)  # (an ordered message is a request)
        self.attachments: list[Attachment] = []  # what the receiver must know before it unpacks the value
        self.links: list[torch.Tensor] | None = None  # tensors whose history goes on at the receiver, if it is recorded
        self.detached = False  # sent under no_grad: tensors arrive as if they had been copied there

    def mark(self) -> Mark:
        """Return the current position, for `roll_back`."""
        return len(self.undo), len(self.attachments)

    def roll_back(self, mark: Mark = BEGINNING, error: BaseException | None = None) -> None:
        """Undo what was done since then, last first. An undo that raises is noted on `error`."""
        if self.links:
            self.links.clear()
        undos, attachments = mark
        del self.attachments[attachments:]
        while len(self.undo) > undos:
            undo = self.undo[-1]
            try:
                undo()
            except Exception as failure:
                if error is None:
                    raise
                error.add_note(f"While taking back what packing had done, {undo!r} raised {failure!r}.")
            self.undo.pop()  # now: had it been interrupted, the destructor would run it


class UnpackScope:
    """One value on its way in: its sender, and what came with it."""

    __slots__ = ("arrival", "landing", "links", "owners", "peer")

    def __init__(self, peer: object = None, arrival: object = None, landing: Landing | None = None) -> None:
        self.peer = peer
        self.landing = landing  # the device memory that came with it
        self.arrival = arrival  # what was made of the attachments
        self.links: dict[int, torch.Tensor] = {}  # whose history began at the sender, by their number there
        self.owners: dict[object, torch.Tensor] = {}  # of memory that some of those share: the tensor of each element


class _Incoming(threading.local):
    """The value this thread is rebuilding: its buffers and its scope. `unpack` sets and restores it, so it nests."""

    frame: tuple[Sequence[torch.UntypedStorage], UnpackScope | None] = ((), None)


incoming = _Incoming()


def current_unpack_scope() -> UnpackScope | None:
    """Return the scope of the innermost `unpack` of this thread, for functions that rebuild objects."""
    return incoming.frame[1]
