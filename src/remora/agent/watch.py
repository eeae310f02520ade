"""Who of the crew looks at the poller, and how. Knows nothing of what the events mean.

Usually every idle thread sleeps at the poller, and while one of them is busy another is there for what comes next. Each
event then wakes a thread, which takes longer than most functions run, and threads that run such functions side by side
only wait for the interpreter. So in *brisk* times, when one event follows upon the other, one thread leads: it looks for
the next event as soon as it is done with the last one, and runs what came. The others are kept from the poller, because
the kernel would wake them for what the leader sees anyway. One of them stands by and looks after the leader from time to
time: if long functions pile up, it helps to run them. Brisk times end when nothing comes for a moment, or when the leader is
stuck in what it runs. A leader that knows that it is about to wait hands over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident

from remora.transport.eagerness import MOMENT
from remora.transport.poller import Event, Poller

SPARE = 4  # threads on watch beyond which one that comes back goes home
STREAK = 8  # events in a row, each within a moment of the last, that make the times brisk
PATROL = 0.001  # seconds from one look after the leader to the next
FEW = 8  # who runs fewer functions than this between two patrols runs long ones

NOBODY = 0  # leads: the times are not brisk
VACANT = -1  # whoever stands by is to lead


class Watch:
    """See the head of this file. `hire` starts a thread, which has been counted as being on watch; `queued` says how much
    there is that could be run now."""

    def __init__(self, poller: Poller, hire: Callable[[], None], queued: Callable[[], int]) -> None:
        self._poller = poller
        self._hire = hire
        self._queued = queued
        self._glance = poller.glance
        self._lock = threading.Lock()  # guards the next two
        self.standing = 0  # threads at the poller, on their way to it, or standing by
        self._asleep = 0  # those of them who sleep at the poller
        self._slept_at = 0.0  # when a thread last went to sleep
        self._streak = 0
        self._leader = NOBODY  # or a thread
        self._steps = 0  # what was begun, and looks
        self._looking = False  # the leader is not busy
        self._relief = threading.Lock()  # released to have who stands by look up
        self._relief.acquire()

    # For threads with nothing to do.

    def enrol(self, n: int = 1) -> None:
        """One more thread is on its way here (or will not come)."""
        with self._lock:
            self.standing += n

    def events(self) -> list[Event] | None:
        """What is to be done next; None if the thread is not needed any more."""
        if self._leader == get_ident():
            events = self._look()
            if events is not None:
                return events
            self._slow_down()
        with self._lock:
            if self.standing >= (SPARE if self._leader == NOBODY else 1) and not self._queued():
                return None
            self.standing += 1
        return self.wait()

    def wait(self) -> list[Event]:
        """Sleep until something happens. The thread has been counted."""
        while self._leader != NOBODY:
            if self._stand_by():
                self.enrol(-1)
                return []
        if self._queued():  # left behind in brisk times, when nobody is woken for it
            self.enrol(-1)
            return []
        with self._lock:
            self._asleep += 1
        self._slept_at = time.monotonic()
        events = self._poller.wait()
        with self._lock:
            self._asleep -= 1
            self.standing -= 1
        self._consider_leading()
        return events

    def _consider_leading(self) -> None:
        if self._glance is None or self._leader != NOBODY:
            return
        self._streak = self._streak + 1 if time.monotonic() - self._slept_at < MOMENT else 0
        if self._streak >= STREAK:
            self._leader = get_ident()

    def _look(self) -> list[Event] | None:
        """What comes within a moment."""
        look, clock = self._glance, time.monotonic
        assert look is not None
        self._looking = True
        self._steps += 1
        end = clock() + MOMENT
        while not (seen := look()):
            if clock() > end:
                break
        self._looking = False
        return self._poller.fired(seen) if seen else None

    def _slow_down(self) -> None:
        """Brisk times are over: all may sleep at the poller again."""
        self._leader = NOBODY
        self._streak = 0
        self._look_up()

    def _stand_by(self) -> bool:
        """Look after the leader. Whether the thread has to do something: it leads now, or there is too much to do."""
        steps, queued = self._steps, self._queued()
        self._relief.acquire(timeout=PATROL)
        if self._leader == NOBODY:
            return False
        if self._leader == VACANT:
            self._leader = get_ident()
            return True
        if self._steps == steps and not self._looking:  # the leader is stuck
            self._slow_down()
            return False
        return self._steps - steps < min(queued, FEW)

    # For threads that are busy.

    def keep(self) -> None:
        """See to it that somebody is on watch, or stands by."""
        if self.standing < 1:
            self.enrol()
            self._hire()

    def step(self) -> bool:
        """The current thread is about to run something that may block. True if somebody should be woken for the rest."""
        self.keep()
        self._steps += 1
        if self._leader == NOBODY:
            return True
        if self._asleep:  # brisk times have just begun: have it stand by
            self._poller.wake()  # (the leader may be the one to hear it, but not if it is stuck in what it runs)
        return False

    def block(self) -> None:
        """The current thread is about to wait. If it leads, another one is to do so."""
        if self._leader == get_ident():
            self._leader = VACANT
            self._look_up()
        self.keep()

    def wake(self) -> None:
        """Have a thread see that there is something to do."""
        self._poller.wake()

    def stop(self) -> None:
        """Let everybody come back."""
        self._slow_down()
        self._poller.wake()

    def _look_up(self) -> None:
        try:
            self._relief.release()
        except RuntimeError:
            pass  # it has not looked since the last time
