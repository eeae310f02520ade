"""The entry of a worker among those of this user on this host, and the signal that goes with it."""

from __future__ import annotations

import logging
import os

from remora.errors import RemoraError
from remora.introspection import stack_signal
from remora.introspection.snapshot import program
from remora.observer import directory
from remora.observer.directory import WorkerEntry
from remora.rendezvous.record import WorkerRecord

log = logging.getLogger("remora")


def enter(record: WorkerRecord, group: str, addresses: tuple[str, ...], key: bytes) -> WorkerEntry | None:
    """Write the entry of a worker that has started. None if there is no place for it: it can be observed all the same."""
    try:
        directory.make()
        signal = stack_signal.process.take(directory.stacks_path(os.getpid()))
        entry = WorkerEntry(
            name=record.name,
            rank=record.id,
            group=group,
            incarnation=record.incarnation,
            pid=os.getpid(),
            started=directory.start_of(os.getpid()),
            host=directory.host_name(),
            home=directory.home(),
            addresses=addresses,
            program=program(),
            key=key.hex(),
            stack_signal=None if signal is None else signal[0],
            stacks_file=None if signal is None else signal[1],
        )
        try:
            directory.write(entry)
        except BaseException:
            leave(entry)
            raise
    except (OSError, RemoraError) as error:
        log.info("%s has no entry among the workers of this user on this host: %s", record.name, error)
        return None
    return entry


def leave(entry: WorkerEntry) -> None:
    """The worker has ended."""
    directory.remove(entry)
    if entry.stack_signal is not None:
        stack_signal.process.release()
