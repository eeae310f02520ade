"""What a call carries: values packed among other things, as arguments and as results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.autograd.language import Call, Shape
from tests.autograd.operations import SIDE


def _baggage() -> dict[str, Any]:
    return {
        "count": torch.tensor([1, 2]),
        "mask": torch.tensor([[True, False]]),
        "plain": torch.full((SIDE, SIDE), 0.25, dtype=torch.float64),
        "nothing": None,
        "label": "a word",
    }


def pack_arguments(call: Call, inputs: list[Tensor]) -> dict[str, Any]:
    """The arguments of a call."""
    return {"values": inputs, **(_baggage() if call.baggage else {})}


def unpack_arguments(parcel: dict[str, Any]) -> list[Tensor]:
    """The values that a body starts with: the arguments, and one made of the baggage, if there was any."""
    values = list(parcel["values"])
    if "plain" in parcel:
        values.append(parcel["plain"] * parcel["count"] * parcel["mask"])
    return values


def pack_results(shape: Shape, baggage: bool, results: list[Tensor]) -> Any:
    """What a function returns."""
    extra = _baggage() if baggage else {}
    match shape:
        case "list":
            return [*results, *extra.values()]
        case "dict":
            return {**{f"result {i}": result for i, result in enumerate(results)}, **extra}
        case "nested":
            return (extra, [(result, i) for i, result in enumerate(results)])


def unpack_results(call: Call, parcel: Any) -> list[Tensor]:
    """The values in what a function returned."""
    match call.shape:
        case "list":
            return list(parcel[: len(call.body.results)])
        case "dict":
            return [parcel[f"result {i}"] for i in range(len(call.body.results))]
        case "nested":
            return [result for result, _ in parcel[1]]
