"""Copies of device memory: within a device, to the host and from it. Each is in the order of the current stream.

The bytes of storages, whatever is in them: tensors here are of `uint8` and only a way to copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from remora.devices import streams

PINNED_UP_TO = 1 << 28  # torch keeps pinned memory for good, in powers of two; beyond this a message has memory of its own


def span(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """These bytes of a storage, as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


def snapshot(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.UntypedStorage:
    """A copy of these bytes on the same device: what is done to the storage from now on does not show in it."""
    return span(storage, start, nbytes).clone().untyped_storage()


def to_host(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of device memory on the host. All copies are under way at the same time; returns when they are there."""
    parts = list(parts)
    found = [_host_memory(part).copy_(part, non_blocking=True) for part in parts]
    streams.wait_on_host({part.device for part in parts})
    return found


def _host_memory(part: torch.Tensor) -> torch.Tensor:
    """Pinned memory, to which the device copies by itself."""
    pinned = part.nbytes <= PINNED_UP_TO and part.device.type != "meta"
    try:
        return torch.empty(part.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    except RuntimeError:  # no memory can be pinned here (any more)
        return torch.empty(part.nbytes, dtype=torch.uint8, device="cpu")


def to_device(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    """A copy of a storage on another device. The host may use its memory otherwise when this returns."""
    nbytes = storage.nbytes()
    fresh = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if nbytes:
        fresh.copy_(span(storage, 0, nbytes))
    return fresh.untyped_storage()
