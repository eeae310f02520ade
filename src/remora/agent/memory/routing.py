"""Chooses the device on which a tensor arrives at each peer, by the device maps of both workers. Moves nothing.

Requests follow the caller's map, replies its inverse. Gradients return to the devices of their tensors: a map that leads
there saves a copy. Without one they go over the host, and the receiver copies them to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from remora.agent.memory.device import DeviceExchange, identity
from remora.devices import maps, registry, streams
from remora.devices.maps import DeviceMap, Placement
from remora.rendezvous.record import WorkerRecord
from remora.wire.device_buffers import Region

DEVICES = "devices"  # what a worker says of its devices, in its record


@dataclass(eq=False, slots=True)
class PeerRoute:
    """The `Route` of messages of one kind to one peer."""

    _map: DeviceMap
    _there: Placement
    _problem: str
    _refusal: str  # why what is not in the map is not sent; empty: it is
    _device_exchange: DeviceExchange
    _in_place: bool = False  # the caller waits for the answer, and its stream for the copy: see `DeviceExchange.fence`
    moves_cpu: bool = field(init=False)

    def __post_init__(self) -> None:
        self.moves_cpu = bool(self._problem) or self._map.get(registry.HOST, registry.HOST) != registry.HOST

    def target(self, device: torch.device) -> torch.device:
        """Return the device on which a tensor on `device` arrives. Raises if there is none."""
        if self._problem:
            raise ValueError(self._problem)
        found = self._map.get(device)
        if found is not None:
            return found
        if device.type in registry.UNNUMBERED:
            return device
        if self._refusal:
            raise RuntimeError(self._refusal.format(device=device))
        return device if self._there.has(device) else registry.HOST

    def lend(self, regions: Sequence[Region], target: torch.device) -> bytes | None:
        """Return a reference to regions that are to arrive on `target`; None if they have to go in buffers."""
        return self._device_exchange.lend(regions, target, self._in_place)

    def probe(self, regions: Sequence[Region], target: torch.device) -> bytes | None:
        """Return a reference for the receiver to try, if it has not been tried yet."""
        return None if target.type == "cpu" else self._device_exchange.probe(regions[0][0].device)

    def retract(self, reference: bytes) -> None:
        """Take back what was lent for a message that is never sent."""
        self._device_exchange.retract(reference)


class PeerRoutes(NamedTuple):
    awaited: PeerRoute  # of requests whose caller waits for the reply
    requests: PeerRoute
    replies: PeerRoute
    gradients: PeerRoute


class DeviceRouting:
    """The devices of one worker and of the peers it knows."""

    def __init__(self, name: str, wishes: maps.Wishes, auto: bool) -> None:
        self._name = name
        self._auto = auto
        self.mine = maps.placement(wishes)
        self._known: dict[str, Placement] = {name: self.mine}

    def credentials(self) -> dict[str, object]:
        """Return what other workers must know of the devices here."""
        return {DEVICES: {**self.mine.to_json(), **identity()}}

    def check_group(self, records: Sequence[WorkerRecord]) -> None:
        """Raise if the maps of a group whose workers are all known do not fit together."""
        found = {record.name: _placement_of(record) for record in records}
        self._known |= found
        problem = maps.problem_of_group(found)
        if problem:
            raise ValueError(problem)

    def check_alone(self, records: Sequence[WorkerRecord]) -> None:
        """Do the same for a worker of a dynamic group: check only its own devices and maps."""
        self._known |= {record.name: _placement_of(record) for record in records}
        problem = maps.problem_of_devices(self._name, self.mine)
        for to in self.mine.maps:
            if to in self._known:
                problem = problem or maps.problem_between(self._name, self.mine, to, self._known[to])
        if problem:
            raise ValueError(problem)

    def routes_to(self, record: WorkerRecord, device_exchange: DeviceExchange) -> PeerRoutes:
        """Return the routes to a peer, by its record."""
        name, there = record.name, _placement_of(record)
        self._known[name] = there
        wrong_there = maps.problem_between(self._name, self.mine, name, there) if name in self.mine.maps else ""
        wrong_back = maps.problem_between(name, there, self._name, self.mine) if self._name in there.maps else ""
        forth = {} if wrong_there else self.mine.maps.get(name, {})
        back = {} if wrong_back else maps.inverse(there.maps.get(self._name, {}))
        streams.watch(self.devices())
        refusal = "" if self._auto else _no_map(name, forth)
        return PeerRoutes(
            PeerRoute(forth, there, wrong_there, refusal, device_exchange, True),
            PeerRoute(forth, there, wrong_there, refusal, device_exchange),
            PeerRoute(back, there, wrong_back, "" if self._auto else _no_way_back(name, back), device_exchange),
            PeerRoute({**back, **forth}, there, "", "", device_exchange),
        )

    def map_for(self, name: str) -> DeviceMap:
        return dict(self.mine.maps.get(name, {}))

    def devices(self) -> list[torch.device]:
        return maps.used_by(self._name, self._known)


def _placement_of(record: WorkerRecord) -> Placement:
    return Placement.from_json(record.extra.get(DEVICES))


# Programs match on these texts.


def _no_map(name: str, device_map: DeviceMap) -> str:
    return (
        "TensorPipe RPC backend only supports CPU tensors by default: a tensor on {device} has no place on " + name
        + f" ({_shown(device_map)}). Move it to the CPU before the call, call `set_device_map` on "
        "`TensorPipeRpcBackendOptions`, or set `auto_device_map` to have such tensors go over the host."
    )  # fmt: skip


def _no_way_back(name: str, device_map: DeviceMap) -> str:
    return (
        "Response device mapping is not available: the result has a tensor on {device}, and the device map of the caller "
        + f"{name} for this worker does not lead there ({_shown(device_map)}). Move it to the CPU, call `set_device_map` on "
        "the `TensorPipeRpcBackendOptions` of the caller, or set `auto_device_map` here."
    )


def _shown(device_map: DeviceMap) -> str:
    if not device_map:
        return "there is no device map"
    return "the device map has " + ", ".join(f"{here} to {there}" for here, there in device_map.items())
