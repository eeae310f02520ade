"""Device maps: what is wrong with them is said in the words that programs match on, whoever's map it is."""

from __future__ import annotations

import json

import pytest
import torch

from remora import rpc
from remora.devices import maps, registry
from remora.devices.maps import NOWHERE, DeviceMap, Placement

CPU = torch.device("cpu")
GPU = [torch.device("cuda", index) for index in range(4)]


def placed(maps: dict[str, DeviceMap], devices: tuple[torch.device, ...] = (), gpus: int = 2) -> Placement:
    return Placement(maps, devices, {"cuda": gpus} if gpus else {})


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (placed({"b": {GPU[0]: GPU[1]}}), placed({}), ""),
        (placed({"b": {CPU: GPU[1], GPU[0]: CPU}}), placed({}), ""),
        (placed({"a": {GPU[0]: GPU[1], GPU[1]: GPU[0]}}), placed({}), ""),
        (placed({"c": {}}), placed({}), "Node a has invalid target node names in its device maps"),
        (placed({"b": {GPU[2]: GPU[0]}}), placed({}), "a has source devices with invalid indices in its device map for b"),
        (placed({"b": {GPU[0]: GPU[2]}}), placed({}), "a has target devices with invalid indices in its device map for b"),
        (placed({"b": {GPU[0]: GPU[0]}}), placed({}, gpus=0), "a has target devices with invalid indices"),
        (placed({}), placed({"a": {GPU[3]: CPU}}), "Node b has source devices with invalid indices in its device map for a"),
        (placed({"b": {GPU[0]: CPU, GPU[1]: CPU}}), placed({}), "a has duplicated target devices in its device map for b"),
        (placed({"b": {GPU[0]: CPU}}, (GPU[1],)), placed({}), "a has unexpected source devices in its device map for b"),
        (placed({"b": {CPU: GPU[0]}}), placed({}, (GPU[1],)), "a has unexpected target devices in its device map for b"),
        (placed({"b": {CPU: GPU[1]}}, (GPU[1],)), placed({}, (GPU[1],)), ""),
        (placed({}, (GPU[1], GPU[1])), placed({}), "Node a has duplicated devices"),
        (placed({}, (GPU[2],)), placed({}), "Node a has devices with invalid indices"),
    ],
)
def test_what_is_wrong_with_the_maps_of_a_group(first: Placement, second: Placement, problem: str) -> None:
    found = maps.problem_of_group({"a": first, "b": second})
    assert problem in found
    assert bool(found) == bool(problem)


def test_the_first_worker_is_blamed_by_all() -> None:
    wrong = placed({"a": {GPU[3]: CPU}})
    assert "Node a has source" in maps.problem_of_group({"a": wrong, "b": wrong})


def test_the_devices_of_a_worker() -> None:
    group = {"a": placed({"b": {GPU[1]: GPU[0], CPU: CPU}}), "b": placed({"a": {CPU: GPU[0]}}), "c": placed({}, (GPU[1],))}
    assert maps.used_by("a", group) == [GPU[0], GPU[1]]
    assert maps.used_by("b", group) == [GPU[0]]
    assert maps.used_by("c", group) == [GPU[1]]


def test_placements_travel_as_json() -> None:
    sent = placed({"b": {GPU[1]: GPU[0], CPU: torch.device("meta")}}, (GPU[1],))
    assert Placement.from_json(json.loads(json.dumps(sent.to_json()))) == sent


NONSENSE = {"maps": {"b": [["nonsense", "cpu"]]}, "devices": [], "counts": {}}


@pytest.mark.parametrize("said", [None, {}, {"maps": 3}, NONSENSE])
def test_what_is_no_placement_says_nothing(said: object) -> None:
    assert Placement.from_json(said) == NOWHERE


def test_how_programs_name_devices() -> None:
    assert registry.as_device("cuda") == registry.as_device("cuda:0") == GPU[0]
    assert registry.as_device("cpu:0") == registry.as_device(CPU) == CPU
    assert registry.as_device(1) == torch.device(registry.accelerator() or "cuda", 1)
    with pytest.raises(RuntimeError, match="Device index must not be negative"):
        registry.as_device(-1)


def test_options_take_maps_as_they_come() -> None:
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"w": {0: 1}}, devices=["cuda:0", 1])
    options.set_device_map("w", {1: "cuda:1"})  # whether it can be is found out when the worker starts
    assert options.device_maps == {"w": {GPU[0]: GPU[1], GPU[1]: GPU[1]}}
    assert options.devices == GPU[:2]
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        options.set_device_map("w", {0: 0})
    with pytest.raises(RuntimeError, match="Device index must not be negative"):
        options.set_device_map("w", {0: -1})


def test_counting_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("CUDA was started"))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was started"))
    assert registry.counts() == ({"cuda": torch.cuda.device_count()} if torch.cuda.device_count() else {})
