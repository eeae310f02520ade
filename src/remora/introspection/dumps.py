"""Dumps that a worker writes by itself, where `REMORA_DUMP_DIR` names a folder: when a call times out, a peer is lost,
SIGUSR2 comes, or the program ends with an error. `remora explain` reads the dumps of all workers together.

A dump is written on a thread of its own, never on one that serves calls; only a program that ends with an error writes its
last one itself. Their number is bounded: a fault that comes back again and again must not fill the disk.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import traceback

from remora.introspection import endings, snapshot
from remora.introspection.subject import Subject
from remora.observer.dump import Cause, WorkerDump, write_worker_dump
from remora.recorder import DIED, TIMED_OUT, Note

log = logging.getLogger("remora")

MOST = 10  # dumps of a worker, beside its last words
INTERVAL = 10.0  # seconds between two dumps of one cause
MOMENT = 0.2  # seconds after which a dump is written: what else happens at the same time is in it
PATIENCE = 5.0  # seconds that the end of a worker waits for a dump that is being written
LAST_WORDS = 100_000  # characters, of the end of a traceback

_CAUSES = {DIED: Cause.PEER_LOST, TIMED_OUT: Cause.TIMEOUT}


class AutomaticDumps:
    """The dumps of one worker, and the thread that writes them."""

    def __init__(self, folder: str, subject: Subject) -> None:
        self._folder = folder
        self._name = name = subject.name
        self._subject = subject
        self._pid = os.getpid()
        # (`SimpleQueue.put` never waits, not even for itself: signal handlers use it.)
        self._told: queue.SimpleQueue[tuple[Cause, str] | None] = queue.SimpleQueue()
        self._enough = False  # no more dumps are written; set once, by the thread
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"remora-{name}-dumps", daemon=True)
        self._thread.start()
        subject.agent.recorder.subscribe(on_note=self.hear)
        endings.process.add(self)

    def tell(self, cause: Cause, text: str) -> None:
        """Something happened that is worth a dump, unless there were many. Any thread may call it, and signal handlers."""
        if not self._enough:
            self._told.put((cause, text))

    def hear(self, note: Note) -> None:
        """The recorder noted something."""
        cause = _CAUSES.get(note.kind)
        if cause is not None:
            self.tell(cause, f"{note.peer}: {note.text}" if cause is Cause.PEER_LOST else note.text)

    def last_words(self, error: BaseException) -> None:
        """The program ends with this error. Written on this thread: there may be no time for another one."""
        if os.getpid() == self._pid:  # else this is a forked child, which has no worker
            said = "".join(traceback.format_exception(error))
            self._write(Cause.ERROR, type(error).__name__, said[-LAST_WORDS:])

    def close(self) -> None:
        """Hear no more, and end the thread when it has written what was told until now."""
        endings.process.remove(self)
        self._subject.agent.recorder.unsubscribe(on_note=self.hear)
        self._ended.set()
        self._told.put(None)
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE)

    def _serve(self) -> None:
        """The thread. Of what comes in quick succession the first counts."""
        written: dict[Cause, float] = {}
        left = MOST
        while left and (told := self._told.get()) is not None:
            cause, text = told
            now = time.monotonic()
            if now - written.get(cause, -INTERVAL) >= INTERVAL:
                self._ended.wait(MOMENT)
                written[cause] = now
                left -= 1
                self._write(cause, text)
        self._enough = True

    def _write(self, cause: Cause, text: str, last_words: str = "") -> None:
        try:
            dump = WorkerDump(cause=cause, snapshot=snapshot.take(self._subject), text=text, last_words=last_words)
            path = write_worker_dump(self._folder, dump)
            log.warning("%s wrote a dump, because %s: %s", self._name, cause, path)
        except Exception as error:  # a disk that is full must not harm the program
            log.warning("%s cannot write a dump to %s: %s", self._name, self._folder, error)
