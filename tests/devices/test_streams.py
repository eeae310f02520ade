"""The order of streams between threads, on a device that only writes down what it is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from remora.agent.calls.future import Future
from remora.autograd.context import Context
from remora.devices import streams
from remora.rref.value import Value
from remora.vocabulary.ids import GloballyUniqueId
from tests.devices.pretence import PRETENDED, Module, Stream

pytestmark = pytest.mark.usefixtures("module")


def test_a_moment_is_waited_for_by_other_streams_only(module: Module) -> None:
    moment = streams.stream_point()
    assert moment is not None
    moment.join()
    assert module.current.told == []
    with module.stream(Stream("side")):
        moment.join()
        assert module.current.told == ["default"]


def test_a_device_that_is_not_in_use_is_left_alone(module: Module) -> None:
    module.started = False
    assert streams.stream_point() is None


def test_the_value_of_a_future_is_ready_on_the_stream_of_whoever_looks(module: Module) -> None:
    future: Future[int] = Future("a test")
    with module.stream(Stream("made on")):
        future._succeed(1)
    for look in (future.wait, future.value):
        with module.stream(Stream("side")):
            look()
            assert module.current.told == ["made on"]
    assert module.current.told == []


def test_what_follows_a_future_is_ready_too(module: Module) -> None:
    future: Future[int] = Future("a test")

    def callback(done: Any) -> int:
        with module.stream(Stream("in the callback")):
            found: int = done.value()
            assert module.current.told == ["made on"]
        return found

    child = future.then(callback)
    with module.stream(Stream("made on")):
        future._succeed(1)
    with module.stream(Stream("side")):
        child.wait()
        assert module.current.told == ["made on"]


def test_the_value_of_a_reference(module: Module) -> None:
    with module.stream(Stream("made on")):
        given = Value(GloballyUniqueId(0, 0), 1)
        made = Value(GloballyUniqueId(0, 1))
        made.settle(2, None)
    for value in (given, made):
        with module.stream(Stream("side")):
            value.get()
            assert module.current.told == ["made on"]


def test_gradients_are_ready_when_they_are_asked_for(module: Module) -> None:
    context = Context(1, lambda: 1)
    for name in ("one", "two"):
        stream = Stream(name)
        with module.stream(stream):
            context.gradients.touch()
            context.gradients.touch()
    with module.stream(Stream("side")):
        context.ready_gradients()
        assert module.current.told == ["one", "two"]


def test_a_function_that_leaves_its_stream_current(module: Module) -> None:
    def function() -> None:
        module.set_stream(Stream("left"))
        module.set_device(3)

    before = module.current
    streams.restoring(function)
    assert module.current is before
    assert module.current_device() == 0
    assert before.told == ["left"]


def test_the_arguments_of_a_function_may_have_any_name(module: Module) -> None:
    assert streams.restoring(dict, call=1, args=2) == {"call": 1, "args": 2}


def test_coroutines_have_streams_of_their_own(module: Module) -> None:
    seen: list[str] = []

    async def one() -> str:
        with module.stream(Stream("one's")):
            await asyncio.sleep(0)
            seen.append(module.current.name)
            await asyncio.sleep(0)
        return "one"

    async def two() -> str:
        seen.append(module.current.name)
        await asyncio.sleep(0)
        module.set_stream(Stream("two's"))
        with pytest.raises(ZeroDivisionError):
            await _fail()
        seen.append(module.current.name)
        return "two"

    async def awaited(begun: streams.StreamPoint | None, each: Any) -> Any:
        return await streams.OnItsOwnStreams(each(), begun)

    async def both() -> list[str]:
        begun = streams.stream_point()
        return await asyncio.gather(*(awaited(begun, each) for each in (one, two)))

    before = module.current
    assert asyncio.run(both()) == ["one", "two"]
    assert seen == ["default", "one's", "two's"]
    assert module.current is before
    assert before.told == ["two's"]  # on which a value was left


async def _fail() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError


def test_cancelling_such_a_coroutine(module: Module) -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cleanly")

    async def cancelled() -> None:
        task = asyncio.ensure_future(streams.OnItsOwnStreams(forever(), None))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert ended == ["cleanly"]
    never_begun = forever()
    streams.OnItsOwnStreams(never_begun, None).close()
    with pytest.raises(RuntimeError, match="cannot reuse"):
        never_begun.send(None)


def test_copies_are_made_beside_the_current_stream_and_after_what_it_was_told(module: Module) -> None:
    beside = streams.aside(PRETENDED)
    assert beside is not module.current
    assert beside.told == ["default"]
    with streams.on(beside):
        done = streams.mark(PRETENDED)
    assert done.stream is beside
    streams.follow(PRETENDED, done)
    assert module.current.told == [beside.name]
    assert streams.aside(torch.device("cpu")) is streams.for_arrivals(torch.device("cpu")) is None
    with streams.on(None):
        streams.follow(torch.device("cpu"), None)


def test_what_arrives_has_one_stream_on_each_device_and_is_handed_over(module: Module) -> None:
    streams.for_arrivals.cache_clear()
    arriving = streams.for_arrivals(PRETENDED)
    assert streams.for_arrivals(PRETENDED) is arriving
    kept: list[object] = []

    class Tensor:
        device = PRETENDED
        record_stream = kept.append

    streams.hand_over(Tensor(), arriving.record_event())  # type: ignore[arg-type]
    assert module.current.told == [arriving.name]
    assert kept == [module.current]
    streams.for_arrivals.cache_clear()


def test_tensors_are_found_wherever_they_are() -> None:
    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    tensor = torch.ones(2)
    assert streams.tensors_in([{"a": tensor}, 1, "x"]) == [tensor]
    assert streams.tensors_in(3) == []
    assert len(streams.tensors_in(Box(tensor))) <= 1  # (a local class cannot be taken apart)


def test_what_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "watched", ())
    streams.watch([torch.device("cpu"), torch.device("meta")])
    assert streams.watched == ()
    streams.watch([torch.device("cuda:1"), PRETENDED])
    streams.watch([PRETENDED])
    assert streams.watched == (PRETENDED, torch.device("cuda:1"))
