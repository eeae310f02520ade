"""Distributed autograd. Only its place in the start of a worker exists so far."""

from __future__ import annotations

_worker_id: int | None = None


def _init(worker_id: int) -> None:
    """Remember which worker this process is; contexts will be numbered by it."""
    global _worker_id
    _worker_id = worker_id
