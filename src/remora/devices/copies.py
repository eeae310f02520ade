"""Copies device memory within a device, and from the host to it. Each copy is in the order of the current stream.

The bytes of storages, whatever is in them: tensors here are of `uint8` and only a way to copy. To and from the host a device
copies by itself if the memory there is pinned. Pinned memory is torch's, which keeps it, and gives it out again when the
device is done with it; so only chunks are pinned, one being copied by the device while the host copies another. (What is
sent or received meanwhile: `remora.devices.staging`.)
"""

from __future__ import annotations

from functools import lru_cache

import torch

from remora.devices import registry

CHUNK = 1 << 23


@lru_cache(maxsize=64)
def _prototype(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=device)


def span(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """Return these bytes of a storage, as a tensor."""
    whole: torch.Tensor = _prototype(storage.device).new()  # cheaper than `torch.empty`
    return whole.set_(storage, start, (nbytes,), (1,))


def snapshot(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.UntypedStorage:
    """Return a copy of these bytes on the same device. Later changes of the storage do not show in it."""
    return span(storage, start, nbytes).clone().untyped_storage()


def to_device(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    """Return a copy of a storage on another device. The caller may change the storage when this returns."""
    nbytes = storage.nbytes()
    fresh = torch.empty(nbytes, dtype=torch.uint8, device=device)
    whole = span(storage, 0, nbytes)
    if storage.device.type != "cpu" or device.type in registry.UNNUMBERED:
        fresh.copy_(whole)
        return fresh.untyped_storage()
    for start in range(0, nbytes, CHUNK):
        piece = whole[start : start + CHUNK]
        fresh[start : start + CHUNK].copy_(pinned(piece.nbytes).copy_(piece), non_blocking=True)
    return fresh.untyped_storage()


def pinned(nbytes: int) -> torch.Tensor:
    """Return memory of the host that devices can copy from and to by themselves."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=_can_pin())
    except RuntimeError:  # no more can be had: without it a copy takes longer, and that is all
        return pageable(nbytes)


def pageable(nbytes: int) -> torch.Tensor:
    """Return ordinary memory of the host."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@lru_cache(maxsize=1)
def _can_pin() -> bool:
    return registry.accelerator() is not None
