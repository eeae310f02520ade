"""Stores for tests of groups: every kind, and one that counts what is asked of it."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from remora.rendezvous.record import WorkerRecord

T = TypeVar("T")
Open = Callable[[], Store]
KINDS = ["hash", "tcp", "file", "prefix"]

_incarnations = itertools.count()


def record(name: str, rank: int) -> WorkerRecord:
    """A new start of a worker."""
    return WorkerRecord(name, rank, f"incarnation-{next(_incarnations)}", "host", (f"tcp://127.0.0.1:{1000 + rank}",))


@contextmanager
def meeting_place(kind: str, folder: Path) -> Iterator[Open]:
    """A function that opens one and the same store, for each worker anew where stores are made for one."""
    if kind == "tcp":
        hosted = [TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))]
        yield lambda: TCPStore("127.0.0.1", hosted[0].port, None, False, timedelta(seconds=30))
        hosted.clear()  # whoever still has the function that opens it does not keep it alive
    elif kind == "file":
        yield lambda: FileStore(str(folder / "store"), -1)
    else:
        shared = HashStore()
        yield (lambda: shared) if kind == "hash" else (lambda: PrefixStore("somebody", PrefixStore("elses", shared)))


def at_once(*functions: Callable[[], T]) -> list[Future[T]]:
    """Run all at the same time; when it returns, all are done."""
    start = threading.Barrier(len(functions))

    def go(function: Callable[[], T]) -> T:
        start.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [pool.submit(go, function) for function in functions]


class CountingStore(Store):  # type: ignore[misc]
    """Hands everything on to another store and counts it."""

    def __init__(self, inner: Store, extended: bool = True) -> None:
        super().__init__()
        self.inner = inner
        self.extended = extended
        self.counts: Counter[str] = Counter()

    def _ask(self, operation: str, *arguments: Any) -> Any:
        self.counts[operation] += 1
        return getattr(self.inner, operation)(*arguments)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> Any:
        return self._ask("get", key)

    def add(self, key: str, amount: int) -> Any:
        return self._ask("add", key, amount)

    def compare_set(self, key: str, old: Any, new: Any) -> Any:
        return self._ask("compare_set", key, old, new)

    def check(self, keys: Any) -> Any:
        return self._ask("check", keys)

    def wait(self, keys: Any, timeout: timedelta = timedelta(seconds=30)) -> None:
        self._ask("wait", keys, timeout)

    def multi_get(self, keys: Any) -> Any:
        return self._ask("multi_get", keys)

    def has_extended_api(self) -> bool:
        return self.extended


class FrozenStore(CountingStore):
    """Answers nothing while it is frozen, as a store does whose host is."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.thawed = threading.Event()

    def _ask(self, operation: str, *arguments: Any) -> Any:
        self.thawed.wait()
        return super()._ask(operation, *arguments)
