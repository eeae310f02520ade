"""From an address to a first worker of a group: one of its observer's sockets, or the store where the group met."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from remora.errors import NothingFound, ObserverError, RemoraError
from remora.observer.client import ObserverLink
from remora.transport.addresses import split_host_and_port

log = logging.getLogger("remora")

KNOCK = 1.0  # seconds in which a door of an observer answers the first message
SEEDS = 8  # workers that leave their addresses in the store; others go by what they say
KEY = "observers"


def worker_at(at: str, key: bytes, timeout: float) -> ObserverLink | None:
    """Return a connection to the worker whose observer's socket is there. None if something else is, a store perhaps.
    AuthenticationError if it has another secret."""
    if at.startswith(("file://", "env://")):
        return None
    try:
        return ObserverLink(at, key, timeout=min(timeout, KNOCK))
    except ObserverError:
        if at.startswith("tcp://"):
            return None
        raise


def worker_of_store(at: str, secret: bytes, key: bytes, timeout: float) -> ObserverLink:
    """Return a connection to a worker whose address is in the store there. NothingFound if there is none that answers."""
    try:
        left = _left_in(at, secret, timeout)
    except RemoraError:
        raise
    except Exception as error:  # torch's, of many kinds
        raise NothingFound("", f"no observer's socket and no store answers at {at}: {error}") from None
    tried: list[str] = []
    for addresses in left:
        for address in addresses:
            try:
                return ObserverLink(address, key, timeout=timeout)
            except ObserverError as error:
                tried.append(f"{address} ({error.reason})")
    raise NothingFound("", f"no worker of the group at {at} can be reached" + (f": {'; '.join(tried)}" if tried else ""))


def leave_addresses(publish: Callable[[str, str], None], rank: int, addresses: list[str]) -> None:
    """A worker leaves the addresses of its observer's sockets in the store, by `publish(key, text)`. A few do."""
    try:
        publish(f"{KEY}/{rank % SEEDS}", json.dumps(addresses))
    except RemoraError as error:  # the store is gone, which harms no worker that has joined
        log.info("observers will not find the group by its store: %s", error)


def _left_in(at: str, secret: bytes, timeout: float) -> list[list[str]]:
    """The addresses that workers left in a store."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    from remora.rendezvous.seal import RecordSeal
    from remora.rendezvous.store_table import StoreTable

    if at.startswith("file://"):
        if not os.path.exists(at.removeprefix("file://")):  # (torch would make one)
            raise NothingFound("", f"there is no file {at.removeprefix('file://')}, so no group meets there")
        store: Any = FileStore(at.removeprefix("file://"), -1)
    else:
        host, port = split_host_and_port(at.removeprefix("tcp://"))
        store = TCPStore(host, port, None, False, timedelta(seconds=max(timeout, 1.0)))
    table = StoreTable(store, RecordSeal(secret), timeout)
    try:
        keys = [key for key in (f"{KEY}/{n}" for n in range(SEEDS)) if table.has([key])]
        texts = table.take_proven(keys) if keys else []
    finally:
        table.close()
    return [[str(address) for address in json.loads(text)] for text in texts if text]
