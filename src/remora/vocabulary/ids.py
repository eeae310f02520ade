"""Identities: of workers, and of things numbered by the worker that made them. Plain values, nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

MAX_NAME_LENGTH = 128
MAX_WORKER_ID = 2**15 - 1
_NAME = re.compile(r"[A-Za-z0-9\-_:]+")


def check_worker_name(name: str) -> None:
    """Raise RuntimeError unless `name` may name a worker (the rule and its words are PyTorch's); TypeError if no text."""
    if not isinstance(name, str):
        raise TypeError(f"Worker name must be a str, got {type(name).__name__} {name!r}.")
    if not name or len(name) >= MAX_NAME_LENGTH:
        raise RuntimeError(
            f"Worker name must be non-empty and shorter than {MAX_NAME_LENGTH} chars, not {name[:40]!r}."
        )
    if not _NAME.fullmatch(name):
        raise RuntimeError(f"Worker name must match ^[A-Za-z0-9-_:]*$, got {name!r}.")


class WorkerInfo:
    """A worker's name and id, as programs see it. Equal when both are equal, hashed by id."""

    __slots__ = ("id", "name")
    name: str
    id: int

    def __init__(self, name: str, id: int) -> None:
        check_worker_name(name)
        if not 0 <= id <= MAX_WORKER_ID:
            raise RuntimeError(f"Worker id must be from 0 to {MAX_WORKER_ID}, got {id}.")
        self.name = name
        self.id = id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerInfo) and other.id == self.id and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[str, int]]:
        return WorkerInfo, (self.name, self.id)


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """One start of one worker: a worker that comes back under the same name and id is another one."""

    id: int
    incarnation: str

    def __str__(self) -> str:
        return f"{self.id}/{self.incarnation[:6]}"


class GloballyUniqueId(NamedTuple):
    """The `local_id`-th thing that worker `created_on` numbered. A tuple, because the tables of references are keyed by
    these, and Python compares and hashes tuples by itself."""

    created_on: int
    local_id: int

    def __reduce__(self) -> tuple[type[GloballyUniqueId], tuple[int, int]]:
        return GloballyUniqueId, (self.created_on, self.local_id)  # twice as fast as what tuples do
