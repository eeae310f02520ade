"""What a process holds that outlives a test: threads, descriptors, children, shared memory. Looks, never cleans up.

Take a `census()` before, and ask `leaked_since(before, timeout)` after. What is on its way out is given until the
timeout to go; what is still there then is named as the kernel names it. Off Linux only threads are seen.

Threads are those that run Python. Native ones (torch's pools) are started once, on first use, and are no leak.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_Things = dict[Any, str]
_KINDS = ("threads", "descriptors", "processes", "shared_files", "shared_mappings")


@dataclass(frozen=True)
class Census:
    """What there is, by kind: each thing under a key that no other thing has had, with words for a person."""

    threads: dict[int, str] = field(default_factory=dict)
    descriptors: dict[tuple[int, str], str] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    shared_files: dict[str, str] = field(default_factory=dict)
    shared_mappings: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, kind) for kind in _KINDS)

    def __sub__(self, other: Census) -> Census:
        """What is here and was not there."""
        return self._combine(other, lambda mine, theirs: {key: mine[key] for key in mine.keys() - theirs.keys()})

    def __or__(self, other: Census) -> Census:
        return self._combine(other, lambda mine, theirs: {**mine, **theirs})

    def _combine(self, other: Census, merge: Callable[[_Things, _Things], _Things]) -> Census:
        return Census(**{kind: merge(getattr(self, kind), getattr(other, kind)) for kind in _KINDS})

    def __str__(self) -> str:
        lines = [words for kind in _KINDS for words in getattr(self, kind).values()]
        return "\n".join(lines) or "nothing"


_kept = Census()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever appears inside is meant to live as long as the test run (a fork server, say) and is never reported."""
    global _kept
    before = census()
    try:
        yield
    finally:
        _kept |= census() - before


def census() -> Census:
    """Everything this process holds now."""
    return Census(
        threads=_threads(),
        descriptors=_descriptors(),
        processes=_processes(),
        shared_files=_shared_files(),
        shared_mappings=_shared_mappings(),
    )


def leaked_since(before: Census, timeout: float) -> Census:
    """What appeared since `before` and did not go away within `timeout` seconds. One census when all is clean."""
    deadline = time.monotonic() + timeout
    pause = 0.001
    leaked = _ours(census() - before - _kept)
    while leaked and time.monotonic() < deadline:
        gc.collect()  # an unreachable cycle that holds a socket is garbage, not a leak
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        leaked = _ours(census() - before - _kept)
    return leaked


def _threads() -> dict[int, str]:
    # Not threading.enumerate() alone: a thread made by `_thread`, or one that torch lent to Python, is not in it.
    known = {thread.ident: thread for thread in threading.enumerate()}
    return dict(_describe_thread(ident, known.get(ident)) for ident in sys._current_frames())


def _describe_thread(ident: int, thread: threading.Thread | None) -> tuple[int, str]:
    if thread is None or thread.native_id is None:
        return ident, f"unnamed thread {ident}"
    # The kernel's number, since Python's is an address, and the next thread gets the address of the last.
    return thread.native_id, f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"


def stacks(leaked: Census) -> str:
    """Where each leaked thread stands now. Apart from the census, because formatting a stack is slow."""
    lines: list[str] = []
    for ident, frame in sys._current_frames().items():
        thread = next((thread for thread in threading.enumerate() if thread.ident == ident), None)
        key, words = _describe_thread(ident, thread)
        if key in leaked.threads:
            lines.append(f"{words} is at\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(lines)


def _descriptors() -> dict[tuple[int, str], str]:
    found: dict[tuple[int, str], str] = {}
    for name in _listing("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that read the listing is itself in it, and closed by now
            target = os.readlink(f"/proc/self/fd/{name}")
            found[int(name), target] = f"descriptor {name} -> {target}"
    return found


def _processes() -> dict[int, str]:
    """Descendants, not only children: what a fork server forked is its child and our business."""
    found: dict[int, str] = {}
    pending = _children("self")
    while pending:
        pid = pending.pop()
        found[pid] = f"process {pid}"
        pending += _children(str(pid))
    return found


def _children(pid: str) -> list[int]:
    found: list[int] = []
    for task in _listing(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as listing:
            found += map(int, listing.read().split())
    return found


def describe_processes(leaked: Census) -> str:
    """The parent, state and command line of each leaked process, as far as it is still there."""
    lines: list[str] = []
    for pid in leaked.processes:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            facts = [line.replace("\t", " ") for line in status if line.startswith(("State:", "PPid:"))]
            lines.append(f"process {pid}: {command[:200] or 'ended, and nobody waited for it'} ({', '.join(facts)})")
    return "\n".join(lines)


def _shared_files() -> dict[str, str]:
    """Everybody's: the folder is one for all processes of the machine. `_ours` tells them apart, which takes longer."""
    return {name: f"shared memory /dev/shm/{name}" for name in _listing("/dev/shm")}


def _ours(leaked: Census) -> Census:
    """Without the shared files of processes that are none of ours: what one of them has mapped, and, while one of them is a
    tracker of multiprocessing, semaphores of multiprocessing: those that wait for a child that begins are not mapped. What
    no process uses any more was left by ours."""
    if not leaked.shared_files:
        return leaked
    ours = {str(os.getpid()), *map(str, _processes())}
    others = [pid for pid in _listing("/proc") if pid.isdigit() and pid not in ours]
    mapped = _mapped_by(others)
    tracked = any(_is_tracker(pid) for pid in others)
    files = {
        name: words
        for name, words in leaked.shared_files.items()
        if name not in mapped and not (tracked and name.startswith("sem.mp-"))
    }
    return replace(leaked, shared_files=files)


def _mapped_by(pids: Iterable[str]) -> set[str]:
    """The names of what these processes have mapped from /dev/shm."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            found.update(line.rstrip().rpartition("/dev/shm/")[2] for line in maps if " /dev/shm/" in line)
    return found


def _is_tracker(pid: str) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


_resident_shared = 0
_mappings: dict[str, str] = {}


def _shared_mappings() -> dict[str, str]:
    """Memory shared without a name that is mapped here: it stays when its descriptor was closed."""
    global _resident_shared, _mappings
    # Reading the maps of a process with torch in it takes 0.4 ms; this number takes 0.02 and says whether to bother.
    resident = _resident_shared_kib()
    if resident != _resident_shared:
        _resident_shared, _mappings = resident, _read_mappings()
    return _mappings


def _resident_shared_kib() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssShmem:"):
                return int(line.split()[1])
    return 0


def _read_mappings() -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            if "/memfd:" in line or "/dev/shm/" in line:
                span, _, _, _, inode, path = line.rstrip().split(maxsplit=5)
                found[f"{span} {inode}"] = f"mapping of {path} at {span}"
    return found


def _listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
