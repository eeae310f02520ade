"""Runs `async def` functions that peers call, on one event loop in a thread of its own, started when first needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from remora.agent.crew import act_for


class Coroutines:
    """An event loop for the functions of one worker."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.worker: object = None  # for whom the coroutines act
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        context: Context,
        done: Callable[[Any, BaseException | None], None],
    ) -> Callable[[], None]:
        """Run a coroutine in a context; `done(value, error)` is called on the loop's thread. Returns a way to cancel it."""
        loop = self._started()
        task: list[asyncio.Task[Any]] = []

        def begin() -> None:
            task.append(loop.create_task(coroutine, context=context))
            task[0].add_done_callback(finish)

        def finish(finished: asyncio.Task[Any]) -> None:
            if finished.cancelled():
                done(None, asyncio.CancelledError("the call was cancelled"))
            else:
                error = finished.exception()
                done(None if error is not None else finished.result(), error)

        def cancel() -> None:
            loop.call_soon_threadsafe(lambda: task[0].cancel() if task else coroutine.close())

        loop.call_soon_threadsafe(begin)
        return cancel

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, name=f"remora-{self._name}-loop", daemon=True)
                self._thread.start()
            return self._loop

    def _serve(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        act_for(self.worker)
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def stop(self) -> None:
        """Cancel what runs and end the thread."""
        with self._starting:
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(2.0)
