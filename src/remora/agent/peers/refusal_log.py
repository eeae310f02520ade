"""Logs connections that were refused: the first few of each kind, then one line with counts every 10 s."""

from __future__ import annotations

import logging
from collections import Counter

from remora.protocol.conversation import Why
from remora.recorder import REFUSED, Recorder

log = logging.getLogger("remora")

IN_FULL = 3  # lines for each kind of refusal in a minute
MINUTE = 60.0  # seconds
SUMMARY = 10.0  # seconds between two lines with counts


class RefusalLog:
    """Any thread may tell it. It has no lock: two threads at the same moment may count one for two."""

    def __init__(self, me: str, recorder: Recorder) -> None:
        self._me = me
        self._recorder = recorder
        self._said: Counter[str] = Counter()
        self._unsaid: Counter[str] = Counter()
        self._minute = self._summary = 0.0  # when each began

    def refused(self, kind: str, text: str) -> None:
        """A connection was refused. `text` is a line for people, printable."""
        if self._said[kind] < IN_FULL:
            self._said[kind] += 1
            self._recorder.note(REFUSED, None, text)
            # (a member that dials a worker which is leaving does what it should: no news for the program)
            level = logging.INFO if kind == Why.LEAVING.value else logging.WARNING
            log.log(level, "%s refused a connection: %s", self._me, text)
        else:
            self._unsaid[kind] += 1

    def count(self, kind: str) -> None:
        """Count something that has no line of its own."""
        self._unsaid[kind] += 1

    def tick(self, now: float) -> None:
        """Log the counts when it is time. Called about twice a second, by one thread."""
        if now - self._minute >= MINUTE:
            self._minute = now
            self._said.clear()
        if self._unsaid and now - self._summary >= SUMMARY:
            self._summary = now
            unsaid, self._unsaid = self._unsaid, Counter()
            counts = ", ".join(f"{kind} ({n})" for kind, n in unsaid.most_common())
            log.warning("%s refused %d more connections: %s", self._me, unsaid.total(), counts)
