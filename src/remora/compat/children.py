"""Makes the processes that this one starts run on Remora, too, by two environment variables. Starts no process.

`REMORA_COMPAT=1` says that they should (0, no, off, false or nothing: they should not; an interpreter that is to ignore its
environment, `python -E` or `-I`, ignores it). It is read when an interpreter starts, by a line that the wheel of Remora puts
into site-packages (remora-compat.pth). Where Remora was not installed as a wheel there is no such line; so the folder
`startup` is put on PYTHONPATH as well, and the sitecustomize in it does the same. That reaches whatever inherits the
environment: spawn, fork servers, torchrun, plain subprocesses. A forked child needs none of it.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "REMORA_COMPAT"
STARTUP = str(Path(__file__).with_name("startup"))

_before: dict[str, str | None] | None = None


def include() -> None:
    """Make children run on Remora from now on."""
    global _before
    if _before is None:
        _before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    mark(os.environ)


def exclude() -> None:
    """Put the environment back as it was before `include`."""
    global _before
    for name, value in (_before or {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before = None


def mark(environment: MutableMapping[str, str]) -> None:
    """Make it the environment of a process that runs on Remora."""
    environment[VARIABLE] = "1"
    before = environment.get("PYTHONPATH")
    path = [part for part in before.split(os.pathsep) if part != STARTUP] if before else []
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *path])  # an empty part of it means the current folder
