"""The record by which other workers find a worker: plain data and its JSON form. No store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from remora.errors import RendezvousError
from remora.vocabulary.ids import WorkerInfo

_MAX_TEXT = 1024
_MAX_ADDRESSES = 16


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One start of one worker. Two records with the same `incarnation` are the same start."""

    name: str
    id: int
    incarnation: str
    host: str
    addresses: tuple[str, ...]
    extra: dict[str, object] = field(default_factory=dict, hash=False)

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.id)

    def to_json(self) -> bytes:
        """Return the record as one line of ASCII, the same for equal records, since stores compare bytes."""
        try:
            return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RendezvousError(f"The record of worker {self.name!r} cannot be written as JSON: {error}.") from None

    @classmethod
    def from_json(cls, data: bytes | str) -> WorkerRecord:
        """Read what `to_json` wrote, and check every field: in an insecure group, any process may have written it."""
        try:
            return cls.from_fields(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise RendezvousError(f"The store holds a value that is not a worker's record: {data[:80]!r}.") from error

    @classmethod
    def from_fields(cls, fields: object) -> WorkerRecord:
        """Build a record from parsed JSON; ValueError if it is none."""
        if not isinstance(fields, dict) or fields.keys() != {"name", "id", "incarnation", "host", "addresses", "extra"}:
            raise ValueError("not the fields of a record")
        name, number, addresses, extra = (fields[key] for key in ("name", "id", "addresses", "extra"))
        incarnation, host = fields["incarnation"], fields["host"]
        if not isinstance(addresses, list) or len(addresses) > _MAX_ADDRESSES:
            raise ValueError("not a list of addresses")
        if not all(_is_short_text(text) for text in (name, incarnation, host, *addresses)):
            raise ValueError("not a short, printable text where one should be")
        if type(number) is not int or not isinstance(extra, dict) or not incarnation:
            raise ValueError("not an id, not an object, or no incarnation")
        try:
            WorkerInfo(name, number)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return cls(name, number, incarnation, host, tuple(addresses), extra)

    def __str__(self) -> str:
        return f"{self.name!r} (rank {self.id})"


def _is_short_text(text: object) -> bool:
    """Return True if a text may be shown in errors and logs: a control character would reach the terminal."""
    return isinstance(text, str) and len(text) <= _MAX_TEXT and text.isprintable()
