"""Opens the c10d store where the workers of a group meet: `env://`, `tcp://host:port`, `file:///path`.

PyTorch's own rendezvous does the work. What is added: the store may be shared with a process group and be used by one
group after the other; a failure is a RendezvousError that says where, who and what to do, within the timeout; Ctrl-C
works. How a group forms there is in `remora.rendezvous.group`.
"""

from __future__ import annotations

import math
import os
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar
from urllib.parse import parse_qsl, urlencode, urlparse, urlunparse

import torch.distributed as c10d
from torch.distributed import Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from remora.errors import RendezvousError
from remora.rendezvous.board import KIND, PREFIX
from remora.transport.addresses import host_and_port
from remora.transport.patience import in_time, until_listening

_FOR_EVER = timedelta(days=365)
_ANSWER_TIMEOUT = 10.0  # for a store that is there
_FREE_BYTES_NEEDED = 256 * 1024

T = TypeVar("T")

_hosted: dict[int, Store] = {}
"""Stores that this process hosts, by port. They stay until it ends: workers of the next group may already be waiting
there when this process lets go of the last one."""


@dataclass(frozen=True)
class _Meeting:
    """Who wants to meet where, until when."""

    url: str
    rank: int
    world_size: int | None
    timeout: float
    deadline: float

    @property
    def scheme(self) -> str:
        return urlparse(self.url).scheme

    def within(self, seconds: float) -> _Meeting:
        """The same, with no more time than that."""
        deadline = time.monotonic() + seconds
        return self if self.deadline <= deadline else replace(self, timeout=seconds, deadline=deadline)

    def failed(self, reason: str) -> RendezvousError:
        who = f"rank {self.rank} of {self.world_size or 'a dynamic group'}"
        return RendezvousError(f"Cannot meet the other workers at {self.url} ({who}): {reason}")


def open_store(init_method: str, rank: int, world_size: int | None, timeout: float) -> Store:
    """The store named by `init_method`. Rank 0 hosts it, unless it is a file. A timeout of 0 means to wait for ever."""
    deadline = time.monotonic() + timeout if timeout else math.inf
    meeting = _Meeting(init_method, rank, world_size or None, timeout, deadline)
    url = _with_query(meeting)
    if meeting.scheme == "file":
        store = _open_file(meeting, url)
    elif meeting.scheme in ("tcp", "env"):
        store = _open_tcp(meeting, url)
    else:
        store = _rendezvous(meeting, url)
    store.set_timeout(_duration(timeout or math.inf))
    return store


def release_stores() -> None:
    """Let go of the stores this process hosts: whoever uses one after that finds it closed."""
    _hosted.clear()


def _with_query(meeting: _Meeting) -> str:
    """The URL with rank and world size, as PyTorch's handlers want them. If the rank is unknown, they say so."""
    parts = urlparse(meeting.url)
    query = dict(parse_qsl(parts.query))
    if meeting.rank != -1:
        query["rank"] = str(meeting.rank)
    # Over TCP the store would wait for all to connect. The group does that itself, and can tell who is missing.
    size = None if meeting.scheme in ("tcp", "env") else meeting.world_size
    query["world_size"] = str(size or -1)
    return urlunparse(parts._replace(query=urlencode(query)))


def _rendezvous(meeting: _Meeting, url: str) -> Store:
    def meet() -> Store:
        store: Store = next(rendezvous(url, timeout=_left(meeting)))[0]
        return store

    return _translated(meeting, meet)


def _translated(meeting: _Meeting, function: Callable[[], T]) -> T:
    """Run something that may block, until the deadline, with our errors. A ValueError is the caller's and stays one."""
    try:
        return in_time(function, meeting.deadline)
    except TimeoutError:
        raise meeting.failed(
            f"something is there, but it did not answer within {meeting.timeout:g} s. It is probably no c10d store; "
            "choose another port."
        ) from None
    except RuntimeError as error:
        raise meeting.failed(str(error).partition("\n")[0]) from error


def _left(meeting: _Meeting) -> timedelta:
    return _duration(max(meeting.deadline - time.monotonic(), 0.1))


def _duration(seconds: float) -> timedelta:
    """What a store takes for a timeout: it has no word for ever, nor for what comes close to it."""
    return timedelta(seconds=seconds) if seconds < _FOR_EVER.total_seconds() else _FOR_EVER


# --- file:// ---


def _open_file(meeting: _Meeting, url: str) -> Store:
    if os.name != "nt":
        _check_file(meeting, urlparse(url).path)
    return _rendezvous(meeting, url)


def _check_file(meeting: _Meeting, path: str) -> None:
    """PyTorch's file store waits minutes for a directory that is not there, and for ever after a write that failed."""
    if not path:
        return  # PyTorch says so
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            regular = stat.S_ISREG(os.fstat(file).st_mode)
        finally:
            os.close(file)
        free = shutil.disk_usage(os.path.dirname(path)).free
    except OSError as error:
        raise meeting.failed(f"{path}: {error.strerror}. Give a file that every worker can write.") from error
    if not regular:
        raise meeting.failed(f"{path} is not a plain file.")
    if free < _FREE_BYTES_NEEDED:
        raise meeting.failed(f"no space left on the disk of {path}: only {free} bytes are free.")


# --- tcp:// and env:// ---


def _open_tcp(meeting: _Meeting, url: str) -> Store:
    place = _place(url)
    if place is None:
        return _rendezvous(meeting, url)  # something is missing or wrong, and PyTorch says what
    host, port, hosts = place
    if not hosts:
        _await_host(meeting, host, port)
        # Somebody listens there. A store answers at once, or when it has looked up our name in vain.
        return _rendezvous(meeting.within(_ANSWER_TIMEOUT), url)
    try:
        store = _rendezvous(meeting, url)
    except RendezvousError as error:
        if "EADDRINUSE" not in str(error):
            raise
        return _join_former_host(meeting, host, port)
    _hosted[port] = store
    return store


def _place(url: str) -> tuple[str, int, bool] | None:
    """Host and port of the store, and whether this process is to host it; None if any of that is missing or wrong."""
    parts = urlparse(url)
    query = dict(parse_qsl(parts.query))
    if parts.scheme == "env":
        rank, host, port = (os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    else:
        rank, host, port = "", parts.hostname or "", str(parts.port or "")
    rank = query.get("rank", rank)
    if not (rank.isdigit() and host and port.isdigit() and int(port) < 2**16):
        return None
    launcher_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return host, int(port), rank == "0" and not launcher_hosts


def _await_host(meeting: _Meeting, host: str, port: int) -> None:
    try:
        until_listening(host, port, meeting.deadline)
    except OSError as error:
        raise meeting.failed(
            f"nobody listened at {host_and_port(host, port)} within {meeting.timeout:g} s ({error}). Rank 0 hosts the "
            "store there: is it running, and is this its address?"
        ) from error


def _join_former_host(meeting: _Meeting, host: str, port: int) -> Store:
    """The port is taken: fine if by a store where groups of ours met before, hosted by the rank 0 of then."""

    deadline = min(meeting.deadline, time.monotonic() + _ANSWER_TIMEOUT)

    def connect() -> Store | None:
        store = TCPStore(host, port, None, False, timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
        return store if c10d.is_initialized() or store.check([f"{PREFIX}/{KIND}"]) else None

    taken = meeting.failed(
        f"port {port} is in use by another program (address already in use). Choose another port, or end that program."
    )
    try:
        store = in_time(connect, deadline)
    except (RuntimeError, TimeoutError) as error:
        raise taken from error
    if store is None:
        raise taken
    return store
