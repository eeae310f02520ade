"""Opens the c10d store where the workers of a group meet: `env://`, `tcp://host:port`, `file:///path`.

PyTorch's own rendezvous does the work. This module adds three things: the store may be shared with a process group and be
used by one group after the other; a failure is a RendezvousError that names the store, the worker and what to do, within
the timeout; Ctrl-C works. `remora.rendezvous.group` forms groups there.
"""

from __future__ import annotations

import math
import os
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral
from urllib.parse import parse_qsl, urlencode, urlparse, urlunparse

import torch.distributed as c10d
from torch.distributed import Store, TCPStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.rendezvous import _rendezvous_handlers as _handlers  # those that the program registered, too

from remora.errors import MeetingUnknown, RendezvousError
from remora.long_wait import LongWait
from remora.rendezvous.store_table import KIND, PREFIX, innermost, watch_process
from remora.transport.addresses import host_and_port, is_own_address
from remora.transport.deadlines import in_time, until, until_resolved
from remora.transport.store_probe import NoStore, StoreProbe

_FOR_EVER = timedelta(days=365)
_ANSWER_TIMEOUT = 10.0  # for a store that is there
_OWN_ANSWER_TIMEOUT = 5.0  # for a store of this very process
NAME_TIMEOUT = 10.0  # for the name of a host to become known; more, if the program says how long a group may take to form
_FREE_BYTES_NEEDED = 256 * 1024

_hosted: dict[int, Store] = {}
"""Stores that this process hosts, by port. They stay until it ends: workers of the next group may already be waiting
there when this process lets go of the last one."""


@dataclass(frozen=True)
class _Meeting:
    """One opening of a store: the worker, the address and the deadline."""

    url: str
    rank: int
    world_size: int | None
    timeout: float
    deadline: float
    name_timeout: float = NAME_TIMEOUT

    @property
    def scheme(self) -> str:
        return urlparse(self.url).scheme

    def left(self, most: float) -> float:
        """Return the seconds until the deadline, at most `most`."""
        return max(min(self.deadline - time.monotonic(), most), 0.001)

    def failed(self, reason: str) -> RendezvousError:
        who = f"rank {self.rank} of {self.world_size or 'a dynamic group'}"
        return RendezvousError(f"Cannot meet the other workers at {self.url} ({who}): {reason}")


def rank_and_size(
    rank: int, world_size: int | None, env: Mapping[str, str] = os.environ, init_method: str = ""
) -> tuple[int, int | None]:
    """Return rank and world size of this worker: as given, else from the launcher (RANK, WORLD_SIZE).

    WORLD_SIZE counts where the rank comes from the environment, too: `init_rpc(name, rank=2)` is how a program asks for a
    dynamic group, also under a launcher. A world size of 0 asks for one in any case.
    """
    query = dict(parse_qsl(urlparse(init_method).query))
    told = {"rank": query.get("rank") or env.get("RANK"), "world_size": query.get("world_size") or env.get("WORLD_SIZE")}
    rank_from = size_from = ""  # the variable that gave it, for errors
    if rank == -1:
        rank, rank_from = _number(told["rank"], "rank", "RANK"), "" if query.get("rank") else " (RANK)"
        if world_size is None and told["world_size"] not in (None, "-1"):
            world_size = _number(told["world_size"], "world_size", "WORLD_SIZE")
            size_from = "" if query.get("world_size") else " (WORLD_SIZE)"
    for what, given in (("rank", rank), ("world_size", world_size)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, Integral)):
            raise TypeError(f"{what} must be an int, got {type(given).__name__} {given!r}.")
    rank, world_size = int(rank), None if world_size is None else int(world_size)
    if world_size is not None and world_size < 0:
        raise MeetingUnknown(
            f"world_size must not be negative, got {world_size}{size_from}. Leave it out for a dynamic group."
        )
    if rank < 0 or (world_size and rank >= world_size):
        ranks = f"ranks are 0 to {world_size - 1}" if world_size else "ranks are 0 and up"
        size = f"{world_size}{size_from}" if world_size else "not given"
        raise MeetingUnknown(f"rank {rank}{rank_from} is outside the world: world_size is {size}, so {ranks}.")
    return rank, world_size


def _number(text: str | None, what: str, variable: str) -> int:
    if text is None:
        raise MeetingUnknown(
            f"{what} parameter missing: init_rpc was not given a {what} (environment variable {variable} expected, but not "
            f"set). Pass {what}=... to init_rpc, or start the program with a launcher (python -m remora.launch, torchrun)."
        )
    try:
        return int(text)
    except ValueError:
        raise MeetingUnknown(f"{variable} is not a number: {text!r}. It gives the {what} of this worker.") from None


def open_store(
    init_method: str, rank: int, world_size: int | None, timeout: float, name_timeout: float = NAME_TIMEOUT
) -> Store:
    """Open the store named by `init_method`. Rank 0 hosts it, unless it is a file. A timeout of 0 means to wait for ever."""
    deadline = time.monotonic() + timeout if timeout else math.inf
    rank, _ = rank_and_size(rank, world_size or 0, init_method=init_method)
    meeting = _Meeting(init_method, rank, world_size or None, timeout, deadline, name_timeout or math.inf)
    url = _with_query(meeting)
    if meeting.scheme == "file" and os.name != "nt":
        _check_file(meeting)
    if meeting.scheme in ("tcp", "env"):
        store = _open_tcp(meeting, url)
    elif meeting.scheme in _handlers:
        store = _rendezvous(meeting, url)
    else:
        unknown = f"{meeting.scheme}://" if meeting.scheme else f"init_method={meeting.url!r}, which begins with no scheme"
        raise meeting.failed(f"No rendezvous handler for {unknown}. Give env://, tcp://host:port or file:///path.")
    store.set_timeout(_duration(timeout or math.inf))
    return store


def hosts(store: Store) -> bool:
    """Return True if this process hosts the store: it ends with the process."""
    return any(innermost(store) is innermost(each) for each in _hosted.values())


def _with_query(meeting: _Meeting) -> str:
    """Return the URL with rank and world size, as PyTorch's handlers want them."""
    parts = urlparse(meeting.url)
    query = dict(parse_qsl(parts.query))
    query["rank"] = str(meeting.rank)
    # Over TCP the store would wait for all to connect. The group does that itself, and can name the missing ranks.
    size = None if meeting.scheme in ("tcp", "env") else meeting.world_size
    query["world_size"] = str(size or -1)
    return urlunparse(parts._replace(query=urlencode(query)))


def _rendezvous(meeting: _Meeting, url: str) -> Store:
    """Have PyTorch open the store, until the deadline, with our errors. A ValueError is the caller's and stays one."""
    timeout = _duration(max(meeting.deadline - time.monotonic(), 0.1))
    try:
        store: Store = in_time(lambda: next(rendezvous(url, timeout=timeout))[0], meeting.deadline)
        return store
    except TimeoutError:
        raise meeting.failed(f"the store did not answer within {meeting.timeout:g} s.") from None
    except RuntimeError as error:
        # Without its cause: torch's text goes on with a C++ stack trace.
        raise meeting.failed(str(error).partition("\n")[0]) from None


def _duration(seconds: float) -> timedelta:
    """Return a timeout that a store takes: it has no value for "for ever", nor for anything close to it."""
    return timedelta(seconds=seconds) if seconds < _FOR_EVER.total_seconds() else _FOR_EVER


# --- file:// ---


def _check_file(meeting: _Meeting) -> None:
    """Raise if the file cannot be used: PyTorch's file store waits minutes for a directory that does not exist, and for ever
    after a write that failed."""
    path = urlparse(meeting.url).path
    if not path:
        raise MeetingUnknown(f"{meeting.url}: path missing. Give file:///path of a file that every worker can write.")
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
    host, port = _place(meeting)
    _await_name(meeting, host)
    if meeting.rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # its launcher hosts the store
        probe = _await_host(meeting, host, port)
        store = _rendezvous(meeting, url)
        watch_process(store, probe)
        return store
    own = is_own_address(host)
    if not own:  # torch's client would wait there in silence, and then write a C++ stack trace
        url = urlunparse(urlparse(url)._replace(scheme="tcp", netloc=f"localhost:{port}"))
    try:
        store = _rendezvous(meeting, url)
    except RendezvousError as error:
        if "EADDRINUSE" not in str(error):
            raise
        return _join_former_host(meeting, host, port)
    if not own:
        _check_that_it_leads_here(meeting, host, port)
    _hosted[port] = store
    return store


def _check_that_it_leads_here(meeting: _Meeting, host: str, port: int) -> None:
    """Raise if no store answers at an address that is none of this host, where the others will look for the store that this
    process hosts. (It may be one that is translated on the way.)"""
    place = host_and_port(host, port)
    wait = LongWait(lambda: f"init_rpc: still waiting for {place} to lead to the store that rank 0 hosts here")
    allowed = meeting.left(meeting.name_timeout)
    deadline = time.monotonic() + allowed
    try:
        probe = until(lambda: _probe(meeting, host, port), deadline, wait.look)
    except (NoStore, OSError) as error:
        raise meeting.failed(
            f"{host} is no address of this host, where rank 0 hosts the store, and {place} does not lead here ({error}; "
            f"tried for {allowed:.0f} s). MASTER_ADDR, or the host in init_method, must be an address of rank 0's host: "
            "give another, or start rank 0 there."
        ) from None
    if probe is not None:
        probe.close()


def _place(meeting: _Meeting) -> tuple[str, int]:
    """Return host and port of the store."""
    parts = urlparse(meeting.url)
    try:
        given = parts.port
    except ValueError as error:
        raise MeetingUnknown(f"{meeting.url}: {error}.") from None
    if parts.scheme == "tcp":
        if not parts.hostname or not given:
            raise MeetingUnknown(f"{meeting.url}: port number missing, or no host. Give tcp://host:port, those of rank 0.")
        return parts.hostname, given
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value]
    if missing:
        raise MeetingUnknown(
            f"env:// reads the address of the store from the environment, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set. Set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a "
            "free port of it, name the store with init_method (tcp://host:port, file:///path), or start the program with a "
            "launcher (python -m remora.launch, torchrun)."
        )
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise MeetingUnknown(f"MASTER_PORT is not a port: {port!r}. Give a number from 1 to 65535.")
    return host, int(port)


def _await_name(meeting: _Meeting, host: str) -> None:
    """Wait until the name of the host resolves: in a cluster that starts, it may appear with the host. A wrong name never
    does."""
    wait = LongWait(lambda: f"init_rpc: still waiting for the name of a host, {host!r}, to become known")
    allowed = meeting.left(meeting.name_timeout)
    try:
        until_resolved(host, time.monotonic() + allowed, wait.look)
    except OSError as error:
        raise meeting.failed(
            f"no host named {host!r} is known here ({error}; tried for {allowed:.0f} s). MASTER_ADDR, or the host in "
            "init_method, must be a name or an address of rank 0's host that resolves on every host. If the name becomes "
            "known later, set bringup_timeout in the options: the name may take that long."
        ) from None


def _await_host(meeting: _Meeting, host: str, port: int) -> StoreProbe | None:
    """Wait until the store answers. It does so as soon as it runs, or when it has failed to look up our name. None: see
    `_probe`."""
    place = host_and_port(host, port)
    wait = LongWait(lambda: f"init_rpc: still waiting for rank 0, which hosts the store, to listen at {place}")
    try:
        return until(lambda: _probe(meeting, host, port), meeting.deadline, wait.look)
    except NoStore as error:
        raise meeting.failed(
            f"another program listens at {place}, and it is not a c10d store: {error}. Choose another port "
            "(MASTER_PORT, or the port in init_method)."
        ) from None
    except OSError as error:
        raise meeting.failed(
            f"nothing listened at {place} within {meeting.timeout:g} s ({error}). Rank 0 hosts the store there: check "
            "that it runs, and that this is its address."
        ) from None


def _probe(meeting: _Meeting, host: str, port: int) -> StoreProbe | None:
    """Return a connection to the store that listens there. None if the probe does not know the handshake of this version of
    torch: then only torch's own client can recognise a store."""
    try:
        return StoreProbe(host, port, meeting.left(_ANSWER_TIMEOUT))
    except NoStore:
        if _probe_knows_this_torch():
            raise
        return None


def _probe_knows_this_torch() -> bool:
    """Return True if a store of this process answers the probe. torch's client speaks the same version as that store, so a
    program that does not answer the probe would not answer torch either."""
    try:
        own = TCPStore("127.0.0.1", 0, None, True)
        StoreProbe("127.0.0.1", own.port, _OWN_ANSWER_TIMEOUT).close()
    except NoStore:
        return False
    except (OSError, RuntimeError):  # there cannot be one here, so nothing is known against the probe
        return True
    return True


def _join_former_host(meeting: _Meeting, host: str, port: int) -> Store:
    """Connect to the store on a port that is taken: the rank 0 of an earlier Remora group may host it. Raise if it is
    another."""
    taken = f"port {port} is in use by another program (address already in use{{}}). Choose another port, or end that one."
    try:
        probe = _probe(meeting, host, port)
    except (NoStore, OSError) as error:
        raise meeting.failed(taken.format(f"; {error}")) from None
    deadline = time.monotonic() + meeting.left(_ANSWER_TIMEOUT)

    def connect() -> Store | None:
        store = TCPStore(host, port, None, False, timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
        return store if c10d.is_initialized() or store.check([f"{PREFIX}/{KIND}"]) else None

    try:
        store = in_time(connect, deadline)
    except (RuntimeError, TimeoutError):
        store = None
    if store is None:
        if probe is not None:
            probe.close()
        raise meeting.failed(taken.format("; a c10d store, which no Remora group uses"))
    watch_process(store, probe)
    return store
