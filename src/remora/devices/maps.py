"""Device maps: their form in the options and in a worker's record, and the checks that they fit together.

No tensors here. A map gives the device of another worker for each device of this one; replies follow its inverse. Programs
match on the texts of the errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from remora.devices import registry

DeviceMap = dict[torch.device, torch.device]


@dataclass(frozen=True)
class Wishes:
    """The devices and maps that a program gives when it starts a worker."""

    maps: Mapping[str, DeviceMap] = field(default_factory=dict)  # by the name of the other worker
    devices: Sequence[torch.device] = ()  # those this worker uses; none: those that appear in maps


@dataclass(frozen=True)
class Placement:
    """The devices and maps of a worker, as the others know them."""

    maps: Mapping[str, DeviceMap]
    devices: tuple[torch.device, ...]
    counts: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        """Return the form that goes into the worker's record."""
        maps = {to: [[str(here), str(there)] for here, there in each.items()] for to, each in self.maps.items()}
        return {"maps": maps, "devices": [str(each) for each in self.devices], "counts": dict(self.counts)}

    @classmethod
    def from_json(cls, fields: object) -> Placement:
        """Read what `to_json` wrote. Anything else gives a placement without devices."""
        try:
            said = cast("dict[str, dict[str, list[tuple[str, str]]]]", fields)
            maps = {
                str(to): {torch.device(here): torch.device(there) for here, there in pairs}
                for to, pairs in said["maps"].items()
            }
            counts = {str(kind): int(cast(int, count)) for kind, count in said["counts"].items()}
            return cls(maps, tuple(torch.device(each) for each in said["devices"]), counts)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
            return NOWHERE

    def has(self, device: torch.device) -> bool:
        """Return True if the worker has such a device. There is one CPU, and one of each kind that is not counted."""
        if device.type in registry.UNNUMBERED:
            return True
        return 0 <= (device.index or 0) < self.counts.get(device.type, 0)


NOWHERE = Placement({}, (), {})


def placement(wishes: Wishes) -> Placement:
    """Return the placement of this process for the wishes of a program."""
    return Placement(wishes.maps, tuple(wishes.devices), registry.counts())


def inverse(device_map: Mapping[torch.device, torch.device]) -> DeviceMap:
    """Return the inverse map, which replies follow."""
    return {there: here for here, there in device_map.items()}


def used_by(name: str, all: Mapping[str, Placement]) -> list[torch.device]:
    """Return the devices of a worker: the declared ones, else those in its maps and those that others' maps lead to."""
    mine = all.get(name, NOWHERE)
    if mine.devices:
        return list(mine.devices)
    found = {here for each in mine.maps.values() for here in each}
    for placed in all.values():
        found.update(placed.maps.get(name, {}).values())
    return registry.sorted_devices(found)


def problem_of_group(all: Mapping[str, Placement]) -> str:
    """Return what is wrong with the maps of a group whose workers are all known; empty if nothing is."""
    for name, placed in all.items():
        unknown = sorted(set(placed.maps) - set(all))
        if unknown:
            return (
                f"Node {name} has invalid target node names in its device maps: {', '.join(unknown)}; the workers are "
                f"{', '.join(all)}"
            )
        wrong = problem_of_devices(name, placed)
        for to in placed.maps:
            wrong = wrong or problem_between(name, placed, to, all[to])
        if wrong:
            return wrong
    return ""


def problem_of_devices(name: str, placed: Placement) -> str:
    """Return what is wrong with the devices that a worker declared; empty if nothing is."""
    devices = placed.devices
    if len(set(devices)) != len(devices):
        return f"Node {name} has duplicated devices: {_listed(devices)}"
    missing = [each for each in devices if not placed.has(each)]
    if missing:
        return f"Node {name} has devices with invalid indices: {_listed(missing)}; it has {_counted(placed)}"
    return ""


def problem_between(name: str, placed: Placement, to: str, other: Placement) -> str:
    """Return what is wrong with the map of one worker for another; empty if nothing is."""
    device_map = placed.maps[to]
    head, tail = f"Node {name} has", f"in its device map for {to}"
    shown = ", ".join(f"{here} to {there}" for here, there in device_map.items())
    missing = [here for here in device_map if not placed.has(here)]
    if missing:
        return f"{head} source devices with invalid indices {tail} ({shown}): {name} has {_counted(placed)}"
    if placed.devices and (strange := _outside(device_map, placed.devices)):
        return f"{head} unexpected source devices {tail} ({shown}): its devices are not {_listed(strange)}"
    if len(set(device_map.values())) != len(device_map):
        return f"{head} duplicated target devices {tail} ({shown}): replies could not be mapped back"
    missing = [there for there in device_map.values() if not other.has(there)]
    if missing:
        return f"{head} target devices with invalid indices {tail} ({shown}): {to} has {_counted(other)}"
    if other.devices and (strange := _outside(device_map.values(), other.devices)):
        return f"{head} unexpected target devices {tail} ({shown}): the devices of {to} are not {_listed(strange)}"
    return ""


def _outside(devices: Iterable[torch.device], declared: Sequence[torch.device]) -> list[torch.device]:
    return [each for each in devices if each.type != "cpu" and each not in declared]


def _listed(devices: Sequence[torch.device]) -> str:
    return ", ".join(map(str, devices))


def _counted(placed: Placement) -> str:
    found = ", ".join(f"{count} {kind}" for kind, count in placed.counts.items())
    return f"{found or 'none'} besides the CPU"
