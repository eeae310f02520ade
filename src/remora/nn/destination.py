"""Parses the place of a remote module, as programs write it: `worker1`, `worker1/cuda:0`, `rank:1`, `rank:1/cpu`."""

from __future__ import annotations


def parse(remote_device: object) -> tuple[str | int, str]:
    """Return the worker's name or rank, and the device there. The worker itself checks that it has such a device."""
    text = str(remote_device)
    worker, slash, device = text.partition("/")
    if not worker or "/" in device:
        raise ValueError(f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>'")
    kind, _, rank = worker.partition(":")
    if kind == "rank" and rank.isdecimal():
        return int(rank), device if slash else "cpu"
    return worker, device if slash else "cpu"
