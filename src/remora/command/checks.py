"""The checks of `remora doctor` on this host. Each yields what it found, and advice if that is not well."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from remora import __version__
from remora.command.text import size
from remora.errors import RemoraError
from remora.observer.directory import entries
from remora.options import Settings
from remora.rendezvous.secret import find_secret, loopback_secret
from remora.transport import sockets
from remora.transport.addresses import advertised_host, choose_bind_host, host_and_port, is_loopback, parse_ports

FEWEST_DESCRIPTORS = 1024  # a worker needs one per peer, and some for shared memory
ENOUGH_DESCRIPTORS = 4096
SMALL_SHARED_MEMORY = 1 << 30
OLDEST_TORCH = (2, 4)
_UNSYNCHRONIZED = 5  # what adjtimex returns then


class State(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. `advice` says what to do about it."""

    name: str
    state: State
    text: str
    advice: str = ""


Check = Callable[[], Iterator[Finding]]


def versions() -> Iterator[Finding]:
    yield Finding("python", State.OK, f"{sys.version.split()[0]} at {sys.executable}")
    yield Finding("remora", State.OK, __version__)
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding(
            "torch", State.FAIL, "not installed for this Python", "install torch, or use the Python that has it"
        )
        return
    numbers = tuple(int(each) for each in torch.split("+")[0].split(".")[:2] if each.isdecimal())
    if numbers < OLDEST_TORCH:
        yield Finding("torch", State.FAIL, f"{torch} is too old", "Remora needs torch 2.4 or newer")
    else:
        yield Finding("torch", State.OK, torch)


def addresses() -> Iterator[Finding]:
    """The names and addresses of this host, as its own workers and those of other hosts have them."""
    name = socket.gethostname()
    advice = "name an address that other hosts reach: REMORA_HOST, or REMORA_INTERFACE"
    try:
        found = list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
        yield Finding("host name", State.OK, f"{name} is {', '.join(found)}")
    except OSError as error:
        yield Finding(
            "host name", State.WARN, f"{name} is not known here ({error})", f"add it to /etc/hosts, or {advice}"
        )
    settings = Settings().with_environment()
    try:
        host = choose_bind_host(settings.host, settings.interface, secured=True)
        reached = advertised_host(host)
    except RemoraError as error:
        yield Finding("address", State.FAIL, str(error), advice)
        return
    if is_loopback(reached):
        text = f"workers with a secret would tell others {reached}, which leads other hosts to themselves"
        yield Finding("address", State.WARN, text, f"on several hosts, {advice}. On one host this is well")
    else:
        yield Finding("address", State.OK, f"other hosts would be told {reached}")
    yield from _ports(host, settings)


def _ports(host: str, settings: Settings) -> Iterator[Finding]:
    try:
        listening, address = sockets.listen_tcp(host, parse_ports(settings.port))
        listening.close()
    except (RemoraError, ValueError) as error:
        yield Finding("port", State.FAIL, str(error), "choose others with REMORA_PORT (29600-29650)")
        return
    which = f"of {settings.port}" if settings.port else "that the system chooses"
    text = f"can listen on {host_and_port(host, address.port)}, a port {which}"
    advice = "" if settings.port else "behind a firewall, open a range and name it: REMORA_PORT=29600-29650"
    yield Finding("port", State.OK, text, advice)
    try:
        with closing(sockets.listen_unix(f"doctor-{os.getpid()}")[0]):
            yield Finding("unix sockets", State.OK, "workers of this host can use them")
    except OSError as error:
        yield Finding(
            "unix sockets",
            State.WARN,
            f"none can be made ({error})",
            "they will use TCP, which is slower",
        )


def secret() -> Iterator[Finding]:
    try:
        found = find_secret(None, None)
        if found is not None:
            yield Finding("secret", State.OK, found.origin)
            return
        loopback_secret()
    except RemoraError as error:
        yield Finding("secret", State.FAIL, str(error))
        return
    text = "this user's, for this host only: workers on other hosts cannot have it"
    yield Finding("secret", State.OK, text, "for several hosts, set REMORA_SECRET or REMORA_SECRET_FILE on each")


def memory() -> Iterator[Finding]:
    """Shared memory: large tensors go through it on one host."""
    try:
        _try_shared_memory()
    except OSError as error:
        yield Finding(
            "shared memory", State.WARN, f"none can be made ({error})", "large tensors will go through sockets"
        )
        return
    limit = _shared_memory_limit()
    if limit is not None and limit[0] < SMALL_SHARED_MEMORY:
        text = f"/dev/shm has {size(limit[0])} free of {size(limit[1])}"
        yield Finding(
            "shared memory", State.WARN, text, "in a container: --shm-size=8g. torch's own sharing needs it, too"
        )
    else:
        yield Finding("shared memory", State.OK, f"/dev/shm has {size(limit[0])} free" if limit else "can be made")


def _try_shared_memory() -> None:
    file = os.memfd_create("remora-doctor")
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        with mmap.mmap(file, mmap.PAGESIZE) as mapped:
            mapped[0] = 1
    finally:
        os.close(file)


def _shared_memory_limit() -> tuple[int, int] | None:
    """Bytes that are free in /dev/shm, and all; None if there is no such thing."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def descriptors() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "without limit" if soft == resource.RLIM_INFINITY else f"{soft:,} (ulimit -n)"
    advice = f"raise it for large groups: ulimit -n {'unlimited' if hard == resource.RLIM_INFINITY else hard}"
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_DESCRIPTORS:
        state = State.WARN if soft >= FEWEST_DESCRIPTORS else State.FAIL
        yield Finding("descriptors", state, f"at most {shown}; a worker needs one for each peer, and some more", advice)
    else:
        yield Finding("descriptors", State.OK, shown if soft == resource.RLIM_INFINITY else f"at most {shown}")


def clock() -> Iterator[Finding]:
    """Look for a service that keeps the clock right: traces and lists of events compare times of several hosts."""
    try:
        asked = ctypes.create_string_buffer(512)  # a struct timex with no mode set: only asks
        state = ctypes.CDLL(None, use_errno=True).adjtimex(asked)
    except (OSError, AttributeError):
        return
    if state == _UNSYNCHRONIZED:
        text = "this host's clock is not synchronized, as far as the kernel knows"
        advice = "run chrony or systemd-timesyncd, if there are several hosts; traces correct clocks by round trips"
        yield Finding("clock", State.WARN, text, advice)
    elif state >= 0:
        yield Finding("clock", State.OK, "synchronized")


def observing() -> Iterator[Finding]:
    try:
        count = len(entries())
        yield Finding(
            "workers", State.OK, f"{count} of this user's on this host" if count else "none of this user's on this host"
        )
    except (RemoraError, OSError) as error:
        yield Finding("workers", State.FAIL, str(error), "`remora ps` cannot find the workers of this host")
    tool = shutil.which("py-spy")
    yield Finding("py-spy", State.OK, tool or "not installed, and not needed: it shows stacks of C code, too")


def gpus() -> Iterator[Finding]:
    """Needs torch, which takes seconds to import: only if asked for."""
    import torch

    if not torch.cuda.is_available():
        text = "torch finds no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
        yield Finding("gpu", State.WARN, text, "install a torch with CUDA, and check the driver with nvidia-smi")
        return
    from remora.transport.cuda_ipc.availability import available

    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        yield Finding(f"gpu {number}", State.OK, f"{name}, {size(free)} free of {size(total)}")
        if why := available(device):
            advice = "CUDA tensors to workers of this host will go over the host's memory"
            yield Finding(f"gpu {number} sharing", State.WARN, why, advice)
        else:
            yield Finding(f"gpu {number} sharing", State.OK, "processes of this host can share its memory")


CHECKS: tuple[Check, ...] = (versions, addresses, secret, memory, descriptors, clock, observing)


def findings(gpu: bool = False) -> Iterator[Finding]:
    """Everything that is found on this host, in order."""
    for check in (*CHECKS, gpus) if gpu else CHECKS:
        yield from check()
