"""The worker that introspection looks at: its parts, as `remora.worker` put them together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from remora.agent.agent import Agent
from remora.autograd.engine import Engine
from remora.rendezvous.record import WorkerRecord
from remora.rref.references import References


@dataclass(frozen=True)
class Subject:
    """One worker. It does not change after the worker has started."""

    agent: Agent
    references: References
    autograd: Engine
    record: WorkerRecord
    group: str
    joined_at: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.record.name
