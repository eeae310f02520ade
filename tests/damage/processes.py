"""Two worker processes with a man in the middle: the same trials, and the death of either is seen from outside.

The proxy is in the process of worker0, between it and every worker that it dials. What worker1 answers passes it, too.
"""

from __future__ import annotations

import time
from types import TracebackType

from remora.transport import sockets
from tests.damage import proxy, sessions
from tests.damage.trials import LIMIT, ROADS, TIMEOUT, Damage, Trial, described
from tests.workers import Workers

_middle: proxy.Proxy | None = None


class Pair:
    """The two processes."""

    def __init__(self, road: str) -> None:
        options = {**ROADS[road], "rpc_timeout": TIMEOUT}
        self._workers = Workers(2, options=options, join=False, leak_timeout=None)

    def __enter__(self) -> Pair:
        self._workers.__enter__()
        try:
            self._workers.run(0, _install)
            for pending in [self._workers.join(rank) for rank in range(2)]:
                pending.result(30)
            self._pids = [self._workers.pid(rank) for rank in range(2)]
            assert self._workers.run(0, sessions.well)
        except BaseException as error:
            self._workers.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._workers.__exit__(kind, error, trace)

    def try_out(self, trial: Trial) -> str:
        """Run one trial. What came of it; AssertionError if something is wrong."""
        outcome = self._workers.run(0, _try, trial)
        assert self._workers.run(1, _lives), "worker1 has ended"
        return outcome


def _install() -> None:
    global _middle
    _middle = proxy.Proxy()
    sockets.connect = _middle.connect


def _lives() -> bool:
    return True


def _try(trial: Trial) -> str:
    assert _middle is not None
    judge = Damage(trial)
    _middle.judge = judge
    begun = time.monotonic()
    try:
        outcome = "right" if sessions.PROGRAMS[trial.program]() else "wrong"
    except Exception as error:
        outcome = described(error)
    seconds = time.monotonic() - begun
    _middle.judge = proxy.pass_on
    assert not judge.changed or seconds < LIMIT, f"{trial}: it took {seconds:.1f} s: {outcome}"
    if judge.covered:
        assert outcome != "wrong", f"{trial}: a wrong value"
        assert not outcome.startswith("!"), f"{trial}: not an error that speaks of the damage: {outcome[1:]}"
    assert sessions.well(), f"{trial}: later calls are not right"
    return outcome if judge.changed else "missed"
