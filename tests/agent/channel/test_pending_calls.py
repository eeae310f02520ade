"""The list of calls that are not answered: each call is taken by one thread, and nothing is left of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from remora.agent.calls.call import Call
from remora.agent.channel.pending_calls import PendingCalls
from remora.protocol.reader import Reader


class FakeCall:
    """Notes how it ended."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.failure: BaseException | None = None
        self.settled = 0

    def fail(self, error: BaseException) -> None:
        self.failure = error

    def settle(self, how: object) -> None:
        self.settled += 1


def calls_with(*numbers: int) -> tuple[PendingCalls, list[Any]]:
    calls, made = PendingCalls(Reader()), [FakeCall(number) for number in numbers]
    calls.waiting.update((each.id, cast(Call, each)) for each in made)
    return calls, made


def test_a_call_that_is_taken_leaves_nothing_behind() -> None:
    calls, (call,) = calls_with(7)
    for ids in (calls.low_priority, calls.arriving, calls.notify_ids):
        ids.add(7)
    assert calls.take(7) is call
    assert not any((calls.waiting, calls.low_priority, calls.arriving, calls.notify_ids))


def test_it_can_be_taken_once() -> None:
    calls, made = calls_with(*range(200))
    taken: list[object] = []

    def take_all() -> None:
        taken.extend(call for each in made if (call := calls.take(each.id)) is not None)

    threads = [threading.Thread(target=take_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.id for each in cast(Any, taken)) == list(range(200))


def test_a_call_that_was_answered_cannot_be_forgotten() -> None:
    calls, (call,) = calls_with(1)
    assert calls.forget(call)
    assert not calls.forget(call)


def test_all_fail_each_with_its_own_error_but_those_that_are_answered() -> None:
    calls, (first, second) = calls_with(1, 2)
    calls.arriving.add(2)
    pool: Any = SimpleNamespace(submit_system=None)
    calls.fail_all(pool, lambda call: ValueError(call.id), answered_too=False)
    assert (str(first.failure), first.settled) == ("1", 1)
    assert (second.failure, list(calls.waiting)) == (None, [2])
    calls.fail_all(pool, lambda call: ValueError(call.id))
    assert (str(second.failure), second.settled, calls.waiting) == ("2", 1, {})
