"""Holds threads back from the poller: until it is opened for one of them, or the alarm rings. Linux only.

The gate watches the poller for them, so that opening it wakes no thread unless the poller has an event; and the alarm is a
timer of the kernel, so that setting it wakes no thread until it rings. Neither takes longer than a system call.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

AT_ONCE = 1e-9  # seconds: a timer set to nothing would never ring


class _Seconds(ctypes.Structure):
    _fields_ = [("whole", ctypes.c_long), ("nano", ctypes.c_long)]


class _Setting(ctypes.Structure):
    _fields_ = [("interval", _Seconds), ("first", _Seconds)]


@lru_cache(maxsize=16)
def _once_after(seconds: float) -> Any:
    whole = int(seconds)
    return ctypes.byref(_Setting(_Seconds(0, 0), _Seconds(whole, max(int((seconds - whole) * 1e9), 1))))


class Gate:
    """A gate for any number of threads."""

    def __init__(self, poller: select.epoll) -> None:
        self._poller = poller.fileno()
        self._epoll = select.epoll()
        self._timer = _timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            self._epoll.close()
            raise OSError(ctypes.get_errno(), "no timer could be had")
        self._epoll.register(self._timer, select.EPOLLIN | select.EPOLLET)  # told once each time, and never read
        self._epoll.register(self._poller, select.EPOLLONESHOT)

    def open(self) -> None:
        """Let one thread pass when the poller has an event, or has one now."""
        self._set(select.EPOLLIN | select.EPOLLONESHOT)

    def shut(self) -> None:
        """Let no thread pass."""
        self._set(select.EPOLLONESHOT)

    def _set(self, events: int) -> None:
        try:
            self._epoll.modify(self._poller, events)
        except (OSError, ValueError):  # closed
            pass

    def alarm(self, seconds: float) -> None:
        """Make one thread return from `wait` after so many seconds. Replaces the earlier alarm."""
        _timerfd_settime(self._timer, 0, _once_after(seconds), None)

    def wait(self, seconds: float = -1.0) -> tuple[bool, bool]:
        """Sleep, for `seconds` at most, or for ever if negative. Return (this thread may pass, the alarm rang for it)."""
        try:
            seen = self._epoll.poll(seconds, 2)
        except ValueError:  # closed
            return False, True
        descriptors = [descriptor for descriptor, _ in seen]
        return self._poller in descriptors, self._timer in descriptors

    def crowded(self) -> bool:
        """Return True if the poller has an event now."""
        look = select.poll()
        look.register(self._poller, select.POLLIN)
        return bool(look.poll(0))

    def close(self) -> None:
        """Close the gate's descriptors. No thread may be in `wait`."""
        self._epoll.close()
        timer, self._timer = self._timer, -1
        if timer >= 0:
            os.close(timer)


_CLOCK_MONOTONIC = 1
_timerfd_create: Callable[..., int]
_timerfd_settime: Callable[..., int]

if sys.platform == "linux":
    _libc = ctypes.PyDLL(None, use_errno=True)  # they do not block, so there is no need to let go of the interpreter
    _timerfd_create = _libc.timerfd_create
    _timerfd_settime = _libc.timerfd_settime


def make_gate(poller: select.epoll) -> Gate | None:
    """Return a gate for the poller; None where the system has none."""
    try:
        return Gate(poller)
    except (NameError, OSError):
        return None
