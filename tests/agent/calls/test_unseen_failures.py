"""A failed future that no thread looked at is reported, once, with where it was started."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.calls.unseen_failures import UnseenFailures, unseen_failures
from tests.eventually import eventually

release = threading.Event()


def fail(text: str = "unseen words") -> None:
    raise ValueError(text)


def wait_for_release() -> None:
    assert release.wait(10.0)


def double(x: int) -> int:
    return 2 * x


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    unseen_failures.report()
    return [record.getMessage() for record in caplog.records if "failed unseen" in record.getMessage()]


def start_and_drop(to: str) -> int:
    """Start a call that fails and forget its future; the line of the start."""
    future = rpc.rpc_async(to, fail)
    line = sys._getframe().f_lineno - 1
    eventually(future.done)
    return line


def test_it_is_reported_once_with_file_and_line(me: str, caplog: pytest.LogCaptureFixture) -> None:
    line = start_and_drop(me)
    eventually(lambda: reports(caplog))
    (report,) = reports(caplog)
    assert f"{__file__}:{line}" in report
    assert "ValueError" in report
    assert "unseen words" in report
    assert "fail on alone" in report
    assert next(record for record in caplog.records if "failed unseen" in record.getMessage()).levelno == logging.ERROR
    gc.collect()
    assert len(reports(caplog)) == 1


def test_a_future_dropped_before_its_call_failed_is_reported_too(me: str, caplog: pytest.LogCaptureFixture) -> None:
    rpc.rpc_async(me, fail)
    eventually(lambda: reports(caplog))
    assert len(reports(caplog)) == 1


def test_each_of_several_is_reported(me: str, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(5):
        future = rpc.rpc_async(me, fail, args=(f"number {i}",))
        eventually(future.done)
        del future
        eventually(lambda i=i: len(reports(caplog)) == i + 1)
    assert all(any(f"number {i}" in report for report in reports(caplog)) for i in range(5))


def test_hundreds_that_are_dropped_together_are_one_line(
    me: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pool does not report before all are there.
    monkeypatch.setattr("remora.agent.calls.unseen_failures.TOGETHER", 1000.0)
    futures = [rpc.rpc_async(me, fail, args=(f"number {i}",)) for i in range(200)]
    eventually(lambda: all(future.done() for future in futures))
    futures.clear()
    gc.collect()
    eventually(lambda: len(unseen_failures) == 200)
    monkeypatch.setattr("remora.agent.calls.unseen_failures.TOGETHER", 0.0)
    eventually(lambda: not unseen_failures and caplog.records)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "number" in line
    assert "(199 more calls failed unseen; this was the first)" in line


def test_what_was_forgotten_is_reported_before_the_worker_ends(caplog: pytest.LogCaptureFixture) -> None:
    unseen_failures = UnseenFailures()
    unseen_failures.reporters = 1
    unseen_failures.add("call of f on w1", None, ValueError("first"))
    unseen_failures.add("call of f on w1", None, ValueError("second"))
    assert not caplog.records  # a destructor writes nothing where a worker will
    unseen_failures.report()
    unseen_failures.report()
    assert len(caplog.records) == 1
    unseen_failures.reporters = 0
    unseen_failures.add("call of f on w1", None, ValueError("third"))
    assert "third" in caplog.records[1].getMessage()


def test_without_a_worker_they_share_lines_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remora.agent.calls.unseen_failures.TOGETHER", 1000.0)
    unseen_failures = UnseenFailures()
    for number in range(200):
        unseen_failures.add("call of f on w1", None, ValueError(number))
    assert len(caplog.records) == 1
    unseen_failures.report()
    assert "(198 more calls failed unseen; this was the first)" in caplog.records[1].getMessage()


def test_those_of_a_worker_that_has_ended_are_told_when_the_program_ends() -> None:
    program = """
from remora.agent.calls import unseen_failures
unseen_failures.TOGETHER = 1000.0
for number in range(3):
    unseen_failures.unseen_failures.add("call of f on w1", None, ValueError(number))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    first, rest = done.stderr.splitlines()
    assert first.endswith("ValueError(0)")
    assert rest.endswith("ValueError(1) (1 more call failed unseen; this was the first)")


def _wait(future: Any) -> None:
    with pytest.raises(ValueError):
        future.wait()


def _value(future: Any) -> None:
    eventually(future.done)
    with pytest.raises(ValueError):
        future.value()


def _exception(future: Any) -> None:
    eventually(future.done)
    assert isinstance(future.exception(), ValueError)


def _then(future: Any) -> None:
    chained = future.then(lambda done: done.exception())
    chained.wait()


def _wait_all(future: Any) -> None:
    with pytest.raises(ValueError):
        torch.futures.wait_all([future])


def _wait_all_of_many(future: Any) -> None:
    with pytest.raises(ValueError):
        torch.futures.wait_all([rpc.rpc_async("alone", double, args=(1,)), future])


def _collect_all(future: Any) -> None:
    collected = torch.futures.collect_all([future])
    with pytest.raises(ValueError):
        collected.wait()


def _await(future: Any) -> None:
    async def main() -> None:
        await future

    with pytest.raises(ValueError):
        asyncio.run(main())


@pytest.mark.parametrize(
    "look",
    [_wait, _value, _exception, _then, _wait_all, _wait_all_of_many, _collect_all, _await],
    ids=lambda f: f.__name__,
)
def test_it_is_not_reported_when_somebody_looked(
    me: str, caplog: pytest.LogCaptureFixture, look: Callable[[Any], None]
) -> None:
    look(rpc.rpc_async(me, fail))
    assert reports(caplog) == []
    # Something that is reported, so that the silence above means something.
    start_and_drop(me)
    eventually(lambda: reports(caplog))
    assert len(reports(caplog)) == 1


def test_neither_success_nor_cancelling_is_reported(me: str, caplog: pytest.LogCaptureFixture) -> None:
    rpc.rpc_async(me, double, args=(1,))
    rpc.rpc_async(me, double, args=(1,)).cancel()
    rpc.rpc_sync(me, double, args=(1,))
    assert reports(caplog) == []


def test_a_synchronous_call_is_not_reported_on_top_of_raising(me: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError):
        rpc.rpc_sync(me, fail)
    assert reports(caplog) == []


def test_a_timeout_nobody_looked_at_is_reported(me: str, caplog: pytest.LogCaptureFixture) -> None:
    release.clear()
    rpc.rpc_async(me, wait_for_release, timeout=0.02)
    eventually(lambda: reports(caplog))
    release.set()
    assert "RPC ran for more than" in reports(caplog)[0]
