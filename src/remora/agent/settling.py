"""Passes the outcomes of asynchronous calls on: to their futures, and to callbacks of the program."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from remora.agent.calls import Call
from remora.agent.crew import Crew
from remora.agent.turn import may_be_struck

log = logging.getLogger("remora")


def settle(calls: Sequence[Call]) -> None:
    """Pass them on now, one after the other."""
    for call in calls:
        _pass_on(call)


def have_settled(crew: Crew, calls: Sequence[Call]) -> None:
    """Have the crew pass them on, though it may be going home: they are on no list any more. None waits for another: a
    callback may wait for the outcome of the next call."""
    if calls:
        crew.see_to(_Settling(crew, calls))


class _Settling:
    """Whoever begins with one of several calls sees to it that somebody goes on with the rest, should it be kept."""

    __slots__ = ("_another", "_calls", "_crew")

    def __init__(self, crew: Crew, calls: Sequence[Call]) -> None:
        self._crew = crew
        self._calls = deque(calls)
        self._another = True  # is on its way, and has not begun

    def __call__(self) -> None:
        self._another = False
        calls = self._calls
        while calls:
            try:
                call = calls.popleft()
            except IndexError:
                return  # another thread was quicker
            if calls and not self._another:
                self._another = True
                self._crew.see_to(self)
            _pass_on(call)


def _pass_on(call: Call) -> None:
    try:
        call.finish()
    except BaseException:
        if may_be_struck():
            raise  # the call can still be passed on: see `Call.finish`
        log.exception("the outcome of the %s could not be passed on", call.what)
