"""A handler for torch's own debug server (`torch.distributed.debug.start_debug_server`): `POST /handler/remora` on the
server of a worker answers with its snapshot, as JSON. `?parts=calls,links` asks for some parts only.

torch has no secret there, and its documentation says to use it in trusted networks only. So does this.
"""

from __future__ import annotations

import json
from typing import Any

from remora.observe.snapshots import snapshot
from remora.observer.model import PARTS, Query
from remora.observer.snapshot_json import to_json

try:
    from torch._C._distributed_c10d import _register_handler
except ImportError as error:
    raise ImportError("remora.observe.debug_server needs a torch that has torch.distributed.debug: a newer one") from error

NAME = "remora"


def register() -> None:
    """Add the handler. Each process does so once, before or after the server is started."""
    _register_handler(NAME, _answer)


def _answer(request: Any, response: Any) -> None:
    """Called on a thread of torch's server."""
    try:
        asked = [part for part in _parameter(request, "parts").split(",") if part]
        unknown = sorted(set(asked) - set(PARTS))
        if unknown:
            raise ValueError(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
        content, status = json.dumps(to_json(snapshot(Query(parts=tuple(asked or PARTS))))), 200
    except ValueError as error:
        content, status = json.dumps({"error": str(error)}), 400
    except Exception as error:  # an exception that leaves this function would end the process
        content, status = json.dumps({"error": f"{type(error).__name__}: {error}"}), 500
    response.set_content(content, "application/json")
    response.set_status(status)


def _parameter(request: Any, name: str) -> str:
    try:
        return str(request.get_param(name))
    except Exception:  # torch has no common class for "there is none"
        return ""
