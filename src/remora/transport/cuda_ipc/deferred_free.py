"""What cannot be let go of yet, because the other process may be using it, or a stream of ours. Looked at now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable

LetGo = Callable[[bool], bool]  # told whether the other process is gone, lets go of what it can, and says if that was all

_lock = threading.RLock()  # guards: _left
_left: list[tuple[int, LetGo]] = []


def leave(process: int, let_go: LetGo) -> None:
    """Let go of what is shared with that process: now, or when `sweep` finds that nobody uses it any more."""
    with _lock:
        _left.append((process, let_go))
    sweep()


def sweep() -> None:
    """Let go of what has become possible. To be called now and then."""
    if not _left:
        return
    with _lock:
        _left[:] = [each for each in _left if not each[1](not is_running(each[0]))]


def is_running(process: int) -> bool:
    """Whether there is such a process, one that has ended and was not waited for aside."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def count() -> int:
    """How much is left."""
    return len(_left)
