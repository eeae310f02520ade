"""Runs `async def` functions that peers call, on one event loop in a thread of its own, started when first needed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

from remora.agent.channel.flow_control import FlowControl
from remora.agent.runtime.clean_state import InItsOwnState, begin_thread, new_task
from remora.agent.runtime.current import set_current_worker
from remora.clock import SYSTEM, Clock
from remora.transport.clock_selector import ClockedSelector

log = logging.getLogger("remora")

Done = Callable[[list[Any], BaseException | None], None]  # a list of one value, to be taken out; or an error


class Coroutines:
    """An event loop for the functions of one worker."""

    def __init__(self, name: str, clock: Clock = SYSTEM, worker: object = None) -> None:
        self._name = name
        self._clock = clock
        self.worker = worker  # the worker for which the coroutines act
        self._starting = threading.RLock()  # guards: loop, _thread and _stopped
        self.loop: asyncio.AbstractEventLoop | None = None  # before the first coroutine: none
        self._stopped = False
        self._thread: threading.Thread | None = None

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        context: Context,
        flow_control: FlowControl,
        done: Done,
        grad_enabled: bool = True,
    ) -> Callable[[], None]:
        """Run a coroutine in a context, and return a function that cancels it. The loop's thread calls `done([value],
        error)`."""
        loop = self._started()
        task: list[asyncio.Task[None]] = []

        def begin() -> None:
            following = InItsOwnState(_follow(coroutine, flow_control, done), grad_enabled)
            task.append(loop.create_task(following, context=context))
            task[0].add_done_callback(finish)

        def finish(finished: asyncio.Task[None]) -> None:
            if finished.cancelled():  # perhaps before it began
                coroutine.close()
                done([], asyncio.CancelledError("the call was cancelled"))

        def cancel() -> None:
            loop.call_soon_threadsafe(lambda: task[0].cancel())  # (it has begun: the loop keeps the order)

        loop.call_soon_threadsafe(begin)
        return cancel

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self.loop is None:
                self.loop = asyncio.new_event_loop() if self._clock is SYSTEM else _ClockedLoop(self._clock)
                self._thread = threading.Thread(target=self._serve, name=f"remora-{self._name}-loop", daemon=True)
                self._thread.start()
            return self.loop

    @property
    def idle(self) -> bool:
        """Return True if all coroutines wait. Known only under another clock than the system's."""
        return not isinstance(self.loop, _ClockedLoop) or self.loop.selector.idle

    def _serve(self) -> None:
        loop = self.loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        loop.set_task_factory(new_task)
        set_current_worker(self.worker)
        begin_thread()
        while not self._stopped:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a task that a coroutine began
                log.exception("a task of %s raised SystemExit or KeyboardInterrupt; its event loop goes on", self._name)
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def stop(self) -> None:
        """Cancel what runs and end the thread."""
        with self._starting:
            loop, thread = self.loop, self._thread
        if loop is None or thread is None:
            return
        self._stopped = True
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(2.0)


class _ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop with the time of a worker: what sleeps there sleeps by its clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.selector = ClockedSelector(clock, self._look_again)
        super().__init__(self.selector)

    def time(self) -> float:
        return self._clock.now()

    def _look_again(self) -> None:
        self.call_soon_threadsafe(lambda: None)


async def _follow(coroutine: Coroutine[Any, Any, Any], flow_control: FlowControl, done: Done) -> None:
    """Run a coroutine to its end and pass the outcome on in the same step: results that waited for the next round of the
    loop would pile up. It begins when the caller has room for its answer (other calls may have used it since)."""
    try:
        await _room(flow_control)
        held = [await coroutine]
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # also SystemExit: it must not end the loop that others run on
        done([], error)
    else:
        done(held, None)


async def _room(flow_control: FlowControl) -> None:
    loop = asyncio.get_running_loop()
    room: asyncio.Future[None] = loop.create_future()
    while not flow_control.room_for(partial(_tell, loop, room)):
        await room
        room = loop.create_future()


def _tell(loop: asyncio.AbstractEventLoop, room: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(lambda: None if room.done() else room.set_result(None))
    except RuntimeError:
        pass  # the loop is closed: no coroutine waits
