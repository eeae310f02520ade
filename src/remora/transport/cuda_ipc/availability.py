"""Finds out if device memory can be shared, and with which processes, as far as one process can tell. Shares nothing.

Another process must try to open it to be sure: so it tries once, with a small piece.
"""

from __future__ import annotations

import functools
import os

import torch

from remora.transport.cuda_ipc import driver as cuda
from remora.transport.cuda_ipc.flags import FlagPage, Word
from remora.transport.shm import sealed_memory


@functools.cache
def available(device: torch.device) -> str:
    """Return why memory of a device cannot be exported; empty if it can. This initialises CUDA, if it is a CUDA device."""
    if device.type != "cuda":
        return f"only CUDA devices can share memory, and {device} is not one"
    if not identity():
        return "this system does not let processes share memory, or torch is built without CUDA"
    try:
        return _try(torch.empty(1, dtype=torch.uint8, device=device))
    except (OSError, RuntimeError, AssertionError) as error:  # torch raises the latter two
        return str(error)


def _try(sample: torch.Tensor) -> str:
    driver, device = cuda.load(), sample.device
    with driver.on(device):
        try:
            driver.handle(driver.allocation(sample.data_ptr())[0])
        except cuda.DriverError as error:
            return f"torch's allocator (expandable segments or cudaMallocAsync?) gives memory that cannot be shared: {error}"
    return _try_words(driver, device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _try_words(driver: cuda.Driver, device: torch.device, stream: torch.cuda.Stream) -> str:
    flags = FlagPage.create()
    try:
        with driver.on(device):
            flags.attach(driver, device)
            driver.write(stream.cuda_stream, flags.place(0, Word.READY), 1)
            driver.wait(stream.cuda_stream, flags.place(0, Word.READY), 1)
        stream.synchronize()  # nothing else is on it
        return "" if flags.has_reached(0, Word.READY, 1) else f"streams of {device} cannot write where the host can read"
    finally:
        flags.close()


def identity() -> str:
    """Return what another process must know of this one to share memory with it; empty if it cannot."""
    place = _place() if torch.version.cuda else ""
    return f"{place} {os.getpid()}" if place else ""


_place = functools.cache(sealed_memory.identity)


def reachable(theirs: str) -> str:
    """Return why the process of this identity cannot fetch what this one exports; empty if no reason is known."""
    place, _, process = theirs.rpartition(" ")
    our_place, _, our_process = identity().rpartition(" ")
    if not place or not our_place:
        return "one of the two cannot share memory of devices"
    if place != our_place:
        return "they are on different hosts or in different containers, or belong to different users"
    return "they are one process" if process == our_process else ""
