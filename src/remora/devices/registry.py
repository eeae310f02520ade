"""Finds the devices of this process, and torch's module for each kind. Starts no device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

DeviceType = int | str | torch.device
HOST = torch.device("cpu")
UNNUMBERED = ("cpu", "meta")


def as_device(device: DeviceType) -> torch.device:
    """Return the device that a program names; a number is a device of the accelerator."""
    if isinstance(device, int) and device >= 0:
        found = torch.device(accelerator() or "cuda", device)  # whether it exists is found out when a worker starts
    else:
        found = torch.device(device)
    if found.type in UNNUMBERED:
        return torch.device(found.type)
    return found if found.index is not None else torch.device(found.type, 0)


def accelerator() -> str | None:
    """Return the kind of device that this process computes on besides the CPU, if there is one."""
    api: Any = getattr(torch, "accelerator", None)  # since torch 2.6
    if api is None:
        return next((kind for kind in ("cuda", "xpu", "mps") if module(kind).device_count()), None)
    found = api.current_accelerator()
    # How many there are can be asked without starting the driver; whether they are available cannot.
    return str(found.type) if found is not None and module(found.type).device_count() else None


@cache
def module(kind: str) -> Any:
    """Return torch's module for a kind of device, like `torch.cuda`."""
    return torch.get_device_module(kind)


def counts() -> dict[str, int]:
    """Return the number of devices of each kind, without the kinds that need no number."""
    kind = accelerator()
    number = 0 if kind is None else int(module(kind).device_count())
    return {kind: number} if kind is not None and number else {}


def started(kind: str) -> bool:
    """Return True if this process uses that kind of device already."""
    is_initialized = getattr(module(kind), "is_initialized", None)
    return is_initialized is None or bool(is_initialized())


def has_streams(kind: str) -> bool:
    """Return True if work on it is ordered by streams that can wait for each other."""
    return hasattr(module(kind), "current_stream")


def sorted_devices(devices: Iterable[torch.device]) -> list[torch.device]:
    """Return each device once, by kind and number, without those that have no number."""
    return sorted({each for each in devices if each.type not in UNNUMBERED}, key=lambda each: (each.type, each.index or 0))
