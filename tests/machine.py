"""For how long the system did not run this process: the baseline for a bound that only real time can show.

    with Gaps() as gaps:
        seconds = what_is_measured()
    assert seconds < 0.5 + 3 * gaps.longest

On a quiet machine the gaps are a few milliseconds. Beside other busy processes each step of what is measured waits as long.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

STEP = 0.001  # seconds


class Gaps:
    """A thread that asks to be run again and again, and notes how late it is."""

    def __init__(self) -> None:
        self.longest = 0.0  # seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Gaps:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            asked = time.monotonic()
            time.sleep(STEP)
            self.longest = max(self.longest, time.monotonic() - asked - STEP)
