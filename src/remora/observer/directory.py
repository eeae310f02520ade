"""The workers of this user on this host: a small file for each, by which observers find them without being told anything.

The files lie in the private directory beside the secret that is made for this user (`remora.rendezvous.secret`), which only
this user can read. Each has the addresses of the worker's observer sockets, and the key that observers of its group prove.
That key is derived from the group's secret and lets its holder ask questions, not make calls.

A worker writes its entry when it starts and removes it when it ends. One that was killed leaves its entry, which the next
reader removes: its process is gone, or has another start time than the entry says (its number was used again).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field

from remora.errors import AuthenticationError
from remora.observer.snapshot_json import from_json
from remora.rendezvous.secret import private_directory, user_directory
from remora.transport.addresses import host_identity

FOLDER = "workers"
MAX_BYTES = 64 << 10  # of an entry
_ENTRY, _STACKS, _DRAFT = ".json", ".stacks", ".draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEntry:
    """One worker, as it wrote itself down. `home` says where its `pid` means something: the running system, the network
    and the numbering of processes."""

    name: str
    rank: int
    group: str
    incarnation: str
    pid: int
    started: int  # when the process started, in ticks of the system's clock; 0: not known here
    host: str
    home: str
    addresses: tuple[str, ...]  # of the observer's sockets, best first
    program: str = ""
    key: str = field(default="", repr=False)  # hexadecimal; empty in a group that was started insecure
    stack_signal: int | None = None  # makes the process write its stacks, even where C code holds the interpreter
    stacks_file: str | None = None


def entries() -> list[WorkerEntry]:
    """Return the living workers of this user on this host, by group and rank. Entries of dead ones are removed."""
    place = folder()
    if not os.path.isdir(place):
        return []
    here, found = home(), []
    with _opened() as opened:
        for name in os.listdir(place if opened is None else opened):
            entry = _read(name, opened) if name.endswith(_ENTRY) else None
            if entry is None or entry.home != here:
                continue  # it is being written, or is of another container that has this directory, too
            if is_alive(entry):
                found.append(entry)
            else:
                _unlink(name, opened)
                _unlink(f"{entry.pid}{_STACKS}", opened)
    return sorted(found, key=lambda each: (each.group, each.rank, each.name))


def write(entry: WorkerEntry) -> None:
    """Put an entry in its place, whole. OSError or AuthenticationError if that cannot be."""
    text = json.dumps(asdict(entry)).encode()
    with _opened() as opened:
        draft = f"{entry.incarnation}.{secrets.token_hex(4)}{_DRAFT}"
        file = os.open(_path(draft, opened), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=opened)
        try:
            with open(file, "wb") as writing:
                writing.write(text)
            os.replace(
                _path(draft, opened), _path(entry.incarnation + _ENTRY, opened), src_dir_fd=opened, dst_dir_fd=opened
            )
        except BaseException:
            _unlink(draft, opened)
            raise


def make() -> None:
    """Make the directory, if it is not there. AuthenticationError if others can use it."""
    with _opened():
        pass


def remove(entry: WorkerEntry) -> None:
    """The worker has ended. Harmless if done twice."""
    with suppress(OSError, AuthenticationError), _opened() as opened:
        _unlink(entry.incarnation + _ENTRY, opened)


def stacks_path(pid: int) -> str:
    """Where a process writes its stacks."""
    return os.path.join(folder(), f"{pid}{_STACKS}")


def folder() -> str:
    """Where the entries are. It need not exist."""
    return os.path.join(user_directory(), FOLDER)


def home() -> str:
    """Return a text that is equal for two processes exactly if a number of a process means the same to both, and they reach
    each other's Unix sockets."""
    try:
        return f"{host_identity()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return host_identity()


def host_name() -> str:
    """This host, for people."""
    return socket.gethostname()


# Processes.


def start_of(pid: int) -> int:
    """Return when a process started, in ticks; 0 if it is gone, or that is not known here."""
    fields = _status(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel has it: R, S, D, T (stopped), Z (ended) …; empty if it is not known."""
    fields = _status(pid)
    return fields[0] if fields else ""


def is_alive(entry: WorkerEntry) -> bool:
    """Return True if the process that wrote an entry lives."""
    if not os.path.isdir("/proc/self"):
        return _answers_signals(entry.pid)
    return start_of(entry.pid) == entry.started and state_of(entry.pid) not in ("Z", "X", "")


def _answers_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _status(pid: int) -> list[str]:
    """What stands in /proc/<pid>/stat behind the name of the program, which may have spaces and brackets in it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


# Files.


@contextmanager
def _opened() -> Iterator[int | None]:
    """The folder of the entries, made if it is not there, and checked like the directory that it is in."""
    with private_directory(user_directory()), private_directory(folder()) as opened:
        yield opened


def _path(name: str, opened: int | None) -> str:
    return name if opened is not None else os.path.join(folder(), name)


def _read(name: str, opened: int | None) -> WorkerEntry | None:
    try:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with open(os.open(_path(name, opened), flags, dir_fd=opened), "rb") as file:
            return from_json(WorkerEntry, json.loads(file.read(MAX_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None  # it was removed meanwhile, or is none


def _unlink(name: str, opened: int | None) -> None:
    with suppress(OSError):
        os.unlink(_path(name, opened), dir_fd=opened)
