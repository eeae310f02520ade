"""SerialQueue of a shared machine: one at a time, in order, all of them, and no thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from remora.agent.runtime.serial_queue import SerialQueue
from tests.systematic.tracing import SIGNALS, AtMoment, moments_of, raising


@pytest.fixture
def later() -> list[Callable[[], None]]:
    return []


@pytest.fixture
def steps(later: list[Callable[[], None]]) -> SerialQueue:
    return SerialQueue(later.append)


def test_a_step_is_taken_at_once(steps: SerialQueue) -> None:
    taken: list[int] = []
    steps.post(taken.append, 1)
    assert taken == [1]
    assert not steps


def test_one_that_is_posted_within_another_comes_after_it(steps: SerialQueue) -> None:
    taken: list[str] = []

    def outer() -> None:
        steps.post(taken.append, "inner")  # as a destructor does, wherever it runs
        taken.append("outer")

    steps.post(outer)
    assert taken == ["outer", "inner"]


def test_one_of_another_thread_is_left_to_the_one_that_is_at_it(steps: SerialQueue) -> None:
    begun, go_on = threading.Event(), threading.Event()
    taken: list[str] = []

    def slow() -> None:
        begun.set()
        assert go_on.wait(5.0)
        taken.append(threading.current_thread().name)

    thread = threading.Thread(target=steps.post, args=(slow,), name="slow")
    thread.start()
    assert begun.wait(5.0)
    steps.post(lambda: taken.append(threading.current_thread().name))  # does not wait
    assert taken == []
    go_on.set()
    thread.join()
    assert taken == ["slow", "slow"]


def test_one_that_fails_does_not_stop_the_rest(steps: SerialQueue, caplog: pytest.LogCaptureFixture) -> None:
    taken: list[int] = []

    def outer() -> None:
        steps.post(taken.append, 1)
        raise ValueError("on purpose")

    thread = threading.Thread(target=steps.post, args=(outer,))
    thread.start()
    thread.join()
    assert taken == [1]
    assert "on purpose" in caplog.text


def test_on_the_main_thread_an_error_may_be_a_signal_handlers(steps: SerialQueue, later: list[Callable[[], None]]) -> None:
    """It is raised, and another thread takes the step again."""
    taken: list[int] = []

    def struck_once() -> None:
        taken.append(1)
        if len(taken) == 1:
            raise TimeoutError("of an alarm")

    with pytest.raises(TimeoutError):
        steps.post(struck_once)
    [go_on] = later
    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join()
    assert taken == [1, 1]
    assert not steps


def test_many_threads_take_all_steps_in_order(steps: SerialQueue) -> None:
    taken: list[tuple[int, int]] = []
    under_way: list[int] = []

    def step(thread: int, n: int) -> None:
        under_way.append(n)
        assert len(under_way) == 1
        taken.append((thread, n))
        under_way.pop()

    def post(thread: int) -> None:
        for n in range(500):
            steps.post(step, thread, n)

    threads = [threading.Thread(target=post, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 2000
    for i in range(4):
        assert [n for thread, n in taken if thread == i] == list(range(500))


def test_a_thread_that_is_interrupted_leaves_the_rest_to_another() -> None:
    """At each moment where a signal handler may raise: the turn is free afterwards, and what was posted is done."""

    def two(steps: SerialQueue, taken: list[int]) -> None:
        steps.post(taken.append, 1)
        steps.post(taken.append, 2)

    unharmed = SerialQueue(print)
    for n in range(len(moments_of(lambda: two(unharmed, []), SIGNALS))):
        later: list[Callable[[], None]] = []
        steps, taken = SerialQueue(later.append), list[int]()
        with pytest.raises(KeyboardInterrupt), AtMoment(n, raising(KeyboardInterrupt), SIGNALS):
            two(steps, taken)
        for go_on in later:
            go_on()
        assert not steps, "nothing is left in the queue"
        steps.post(taken.append, 3)
        assert taken[-1] == 3, "nobody has the turn"
        assert taken == sorted(taken), "in order"
