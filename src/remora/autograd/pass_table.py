"""The backward passes that run on one worker, by their contexts.

A pass is opened by its first message and closed when nothing is left to do for it here. Passes that ended stay known until
their context is released: a late message must not open them again, and a failure must reach the workers that were told.
"""

from __future__ import annotations

import threading

from remora.agent.peers.manager import Peer
from remora.autograd.backward_pass import Key, Pass
from remora.autograd.context import Context


class _ContextPasses:
    """The passes of one context."""

    __slots__ = ("ended", "lock", "running")

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards: running, ended, and `serving` of each pass
        self.running: dict[Key, Pass] = {}
        self.ended: dict[Key, set[Peer]] = {}  # passes that are over here, and the workers that we had told of them


class PassTable:
    """Every thread may call every method."""

    def __init__(self) -> None:
        # By the id of the context. An entry is added by `setdefault` and removed by `pop`, so no lock guards the dict.
        self._contexts: dict[int, _ContextPasses] = {}

    def open(self, context: Context, key: Key, serve: bool) -> Pass:
        """The pass of that key, made if it is new here. It is kept until it is closed, or, if the caller is to `serve` a
        request that belongs to it, until `served` finds that nothing is left to do."""
        entry = self._contexts.get(context.id) or self._contexts.setdefault(context.id, _ContextPasses())
        with entry.lock:
            # Looked at under the lock and after the entry is there: `release` sets the flag first and takes the entry then,
            # so either it finds the pass, or the flag is seen here.
            if context.released:
                self._contexts.pop(context.id, None)
                context.check()
            if key in entry.ended:
                raise RuntimeError(f"the backward pass {key[2]} of worker {key[1]} is over")
            found = entry.running.get(key)
            if found is None:
                found = entry.running[key] = Pass(key, context)
            found.serving += serve
            return found

    def served(self, this: Pass) -> None:
        """A request that belongs to the pass is about to be answered. The last one closes a pass that is done."""
        entry = self._contexts.get(this.context.id)
        if entry is None:
            return  # the context was released, and the pass with it
        with entry.lock:
            this.serving -= 1
            if not this.serving and this.done and entry.running.pop(this.key, None) is not None:
                entry.ended[this.key] = this.told

    def close(self, this: Pass) -> None:
        """Close a pass, whatever requests are being served."""
        entry = self._contexts.get(this.context.id)
        if entry is None:
            return
        with entry.lock:
            if entry.running.pop(this.key, None) is not None:
                entry.ended[this.key] = this.told

    def end(self, context: Context, key: Key, known: Pass | None) -> tuple[Pass | None, set[Peer]]:
        """Close a pass that failed. Returns it, if it ran here, and the workers that we told of it and must tell again.
        A caller that knows the pass gives it: `release` may have removed it from here, and it has not ended by that."""
        entry = self._contexts.get(context.id) or self._contexts.setdefault(context.id, _ContextPasses())
        with entry.lock:
            this = entry.running.pop(key, None)
            told = this.told if this is not None else entry.ended.get(key, set())
            entry.ended[key] = set()
        if not context.released:
            return this, told
        self._contexts.pop(context.id, None)
        return (known, known.told) if known is not None else (this, told)

    def release(self, context_id: int) -> list[Pass]:
        """Remove the passes of a context that was released, and return those that ran."""
        entry = self._contexts.pop(context_id, None)
        if entry is None:
            return []
        with entry.lock:
            return list(entry.running.values())

    def running(self) -> list[Pass]:
        """The passes that run now."""
        return [each for entry in self._contexts.copy().values() for each in entry.running.copy().values()]
