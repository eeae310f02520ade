"""Memory that two processes of one host share: a file without a name (`memfd`), whose size is sealed."""

from __future__ import annotations

import fcntl
import os
import stat
from functools import lru_cache

from remora.transport.shm.mapping import PAGE

_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
SEALS = sum(getattr(fcntl, name, 0) for name in _SEALS)


def seal(descriptor: int, size: int) -> None:
    """Give a new memfd its size, for good."""
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)


@lru_cache(maxsize=1)
def _memory_device() -> int:
    """Return the device number that all memfds of this kernel have, and no file with a name. (Memfds of huge pages have
    another: a fault there ends the process when there are no huge pages left.)"""
    probe = os.memfd_create("remora-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(probe).st_dev
    finally:
        os.close(probe)


def open_sealed(process: int, descriptor: int, size: int) -> int:
    """Open memory of another process of this user that has this size for good. Raises ValueError if the descriptor is
    anything else. The check comes before anything is opened: `O_PATH` names a file without opening it, so no device, pipe or
    file of the user's notices."""
    named = os.open(f"/proc/{process}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(named)
        if not stat.S_ISREG(found.st_mode) or found.st_dev != _memory_device() or found.st_uid != os.geteuid():
            raise ValueError(f"descriptor {descriptor} of process {process} is not memory that this user shares (memfd)")
        opened = os.open(f"/proc/self/fd/{named}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(named)
    try:
        if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError("its size is not sealed, so its owner could take it away while it is used")
        actual = os.fstat(opened).st_size
        if actual != size:
            raise ValueError(f"it has {actual} bytes, and not the {size} that were named")
    except BaseException:
        os.close(opened)
        raise
    return opened


def has_holes(descriptor: int, start: int, end: int) -> bool:
    """Return True if a part of a memfd has no memory yet: a process that touches it would have to allocate it."""
    return os.lseek(descriptor, start, os.SEEK_HOLE) < end


def identity() -> str:
    """Return what two processes must have in common to share memory; empty if this one cannot."""
    try:
        if _shares():
            with open("/proc/sys/kernel/random/boot_id") as file:
                return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except (OSError, AttributeError, ValueError):
        pass
    return ""


def _shares() -> bool:
    """Return True if all that sharing needs works here."""
    probe = os.memfd_create("remora-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        seal(probe, 2 * PAGE)
        os.pwrite(probe, b"x", 0)
        opened = open_sealed(os.getpid(), probe, 2 * PAGE)
        try:
            return not has_holes(opened, 0, PAGE) and has_holes(opened, 0, 2 * PAGE)
        finally:
            os.close(opened)
    finally:
        os.close(probe)
