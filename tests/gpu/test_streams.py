"""Values are handed over in the order of work on the device: with late kernels before and after every hand-over."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from remora import rpc
from tests.gpu.late import SIZE, clutter, delay, late, on_another_stream, on_another_thread, seen
from tests.workers import Workers

TIMES = 3


# What workers run for others.


def look(tensor: torch.Tensor) -> float:
    return seen(tensor)


def look_late(tensor: torch.Tensor) -> float:
    delay()
    return seen(tensor)


def look_on_another_stream(tensor: torch.Tensor) -> float:
    """As a function does that knows about streams: it makes its own wait for the one on which its arguments are ready."""
    stream = torch.cuda.Stream("cuda:0")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return seen(tensor)


def make(value: float) -> torch.Tensor:
    return late(value)


def add_late(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    delay()
    return a + b


def leave_a_stream_current(value: float) -> torch.Tensor:
    torch.cuda.set_stream(torch.cuda.Stream("cuda:0"))
    return late(value)


@rpc.functions.async_execution
def make_later(to: str, value: float) -> Any:
    """Its result is a callback's, which works on a stream of its own choice."""
    return rpc.rpc_async(to, make, args=(value,)).then(lambda future: add_late(future.value(), future.value()))


@rpc.functions.async_execution
def make_by_thread(value: float) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=["cuda:0"])
    threading.Thread(target=lambda: on_another_stream(lambda: future.set_result(late(value)))).start()
    return future


async def add_slowly(to: str, a: torch.Tensor) -> torch.Tensor:
    stream = torch.cuda.Stream("cuda:0")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # others run on this thread while it waits
        b = await rpc.rpc_async(to, make, args=(2.0,))
        await asyncio.sleep(0.001)
        total = add_late(a, b)
    torch.cuda.current_stream().wait_stream(stream)
    return total


def value_of(rref: Any) -> float:
    return on_another_stream(lambda: seen(rref.local_value()))


# What the first worker does.


def arguments() -> list[float]:
    found = []
    for times in range(TIMES):
        for function in (look, look_late, look_on_another_stream):
            tensor = on_another_stream(late, times + 1.0)
            torch.cuda.current_stream().synchronize()  # (it is not done: that is another stream)
            del tensor
            found.append(on_another_stream(lambda f=function, t=times: rpc.rpc_sync("worker1", f, (late(t + 1.0),)) - t))
    return found


def test_arguments(workers: Workers) -> None:
    assert workers.run(0, arguments) == [1.0] * 3 * TIMES


def results() -> list[float]:
    found = []
    for times in range(TIMES):
        found.append(on_another_stream(lambda t=times: seen(rpc.rpc_sync("worker1", make, (t + 1.0,))) - t))
        future = rpc.rpc_async("worker1", make, (times + 1.0,))
        found.append(on_another_stream(lambda f=future, t=times: seen(f.wait()) - t))
        future = rpc.rpc_async("worker1", make, (times + 1.0,))
        found.append(on_another_thread(lambda f=future, t=times: seen(f.wait()) - t))
        tensor = rpc.rpc_sync("worker1", leave_a_stream_current, (times + 1.0,))
        found.append(seen(tensor) - times)
    return found


def test_results(workers: Workers) -> None:
    assert workers.run(0, results) == [1.0] * 4 * TIMES


def callbacks() -> list[float]:
    found: list[float] = []
    for times in range(TIMES):
        future = rpc.rpc_async("worker1", make, (times + 1.0,))
        child = future.then(lambda done: on_another_stream(lambda: _joined(add_late(done.value(), done.value()))))
        told: torch.futures.Future[float] = torch.futures.Future()
        future.add_done_callback(lambda done, told=told: told.set_result(on_another_stream(lambda: seen(done.value()))))
        found.append(on_another_stream(lambda c=child: seen(c.wait())) - 2 * times - 1)
        found.append(told.wait() - times)
        late_child = future.then(lambda done: add_late(done.value(), done.value()))  # of a future that is done
        found.append(on_another_thread(lambda c=late_child: seen(c.wait())) - 2 * times - 1)
    return found


def _joined(tensor: torch.Tensor) -> torch.Tensor:
    """Made on the current stream: the default one waits for it, as a callback that chooses streams has to see to."""
    torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
    tensor.record_stream(torch.cuda.default_stream())
    return tensor


def test_callbacks(workers: Workers) -> None:
    assert workers.run(0, callbacks) == [1.0] * 3 * TIMES


def asynchronous() -> list[float]:
    found = []
    for times in range(TIMES):
        value = times + 1.0
        nested = rpc.rpc_async("worker1", make_later, ("worker2", value))
        thread = rpc.rpc_async("worker1", make_by_thread, (value,))
        coroutines = [rpc.rpc_async("worker1", add_slowly, ("worker2", late(value))) for _ in range(3)]
        found.append(on_another_stream(lambda f=nested: seen(f.wait())) - 2 * times - 1)
        found.append(on_another_stream(lambda f=thread: seen(f.wait())) - times)
        found += [on_another_stream(lambda f=each: seen(f.wait())) - times - 2 for each in coroutines]
    return found


def test_async_execution_and_coroutines(workers: Workers) -> None:
    assert workers.run(0, asynchronous) == [1.0] * 5 * TIMES


def references() -> list[float]:
    found = []
    for times in range(TIMES):
        rref = rpc.remote("worker1", make, (times + 1.0,))
        found.append(on_another_stream(lambda r=rref: seen(r.to_here())) - times)
        found.append(rpc.rpc_sync("worker1", value_of, (rref,)) - times)
        doubled = rpc.remote("worker1", add_late, (late(times + 1.0), late(0.0)))
        found.append(rpc.rpc_sync("worker2", _fetched, (doubled,)) - times)
        mine = on_another_stream(lambda t=times: rpc.RRef(late(t + 1.0)))
        found.append(rpc.rpc_sync("worker1", _fetched, (mine,)) - times)
        found.append(on_another_stream(lambda r=mine: seen(r.local_value())) - times)
        found.append(on_another_stream(lambda r=mine: seen(r.to_here())) - times)
    return found


def _fetched(rref: Any) -> float:
    return on_another_stream(lambda: seen(rref.to_here()))


def test_references(workers: Workers) -> None:
    assert workers.run(0, references) == [1.0] * 6 * TIMES


def values() -> list[float]:
    """What the caller does to a tensor after the call began, and after it returned, is not seen by the callee."""
    found = []
    for times in range(TIMES):
        tensor = late(times + 1.0)
        future = rpc.rpc_async("worker1", look_late, (tensor,))
        tensor.fill_(-1.0)
        found.append(future.wait() - times)
        tensor.fill_(times + 1.0)
        kept = rpc.remote("worker1", _identity, (tensor,))
        tensor.fill_(-1.0)
        found.append(rpc.rpc_sync("worker1", value_of, (kept,)) - times)
    return found


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_kept: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> None:
    _kept[:] = [tensor]


def look_at_what_was_kept() -> float:
    return seen(_kept.pop())


def values_of_calls_that_return_at_once() -> list[float]:
    """The callee answers while its copy waits for the caller's late kernel; the caller goes on at once."""
    found = []
    rpc.rpc_sync("worker1", look, (late(1.0),))
    for times in range(2 * TIMES):
        tensor = late(times + 1.0, 64 * SIZE)
        rpc.rpc_sync("worker1", keep, (tensor,))
        tensor.fill_(-1.0)
        del tensor
        clutter(64 * SIZE)
        found.append(rpc.rpc_sync("worker1", look_at_what_was_kept) - times)
    return found


def test_arguments_of_synchronous_calls_are_values(workers: Workers) -> None:
    assert workers.run(0, values_of_calls_that_return_at_once) == [1.0] * 2 * TIMES


def test_arguments_are_values(workers: Workers) -> None:
    assert workers.run(0, values) == [1.0] * 2 * TIMES


def reuse() -> list[float]:
    """Memory that becomes free on one stream is not given to others while another stream is to read it."""
    found = []
    for times in range(TIMES):
        futures = [rpc.rpc_async("worker1", look_late, (late(times + 1.0),)) for _ in range(4)]
        clutter()
        found += [future.wait() - times for future in futures]
        found += [_read_and_drop(times + 1.0) - times for _ in range(4)]
    return found


def _read_and_drop(value: float) -> float:
    """What a stream is to read late is dropped, and its memory wanted by another stream, before it has been read."""
    future = rpc.rpc_async("worker1", make, (value,))
    stream = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(stream):
        tensor = future.wait()
        delay()
        total = tensor + 0.0
    del tensor, future
    clutter()
    with torch.cuda.stream(stream):
        return seen(total)


def test_memory_is_not_reused_too_early(workers: Workers) -> None:
    assert workers.run(0, reuse) == [1.0] * 8 * TIMES


def to_oneself() -> list[float]:
    found = []
    for times in range(TIMES):
        found.append(on_another_stream(lambda t=times: rpc.rpc_sync("worker0", look_late, (late(t + 1.0),))) - times)
        found.append(on_another_stream(lambda t=times: seen(rpc.rpc_sync("worker0", make, (t + 1.0,)))) - times)
        tensor = late(times + 1.0)
        future = rpc.rpc_async("worker0", add_late, (tensor, tensor))
        tensor.fill_(-1.0)
        found.append(on_another_stream(lambda f=future: seen(f.wait())) - 2 * times - 1)
    return found


def test_calls_to_oneself(workers: Workers) -> None:
    assert workers.run(0, to_oneself) == [1.0] * 3 * TIMES


def chain() -> list[float]:
    """Many calls at once, each the argument of the next."""
    tensors = [torch.zeros(SIZE, device="cuda:0") for _ in range(8)]
    for _ in range(5):
        futures = [rpc.rpc_async(f"worker{1 + i % 2}", add_late, (t, torch.ones_like(t))) for i, t in enumerate(tensors)]
        tensors = [future.wait() for future in futures]
    return [seen(tensor) for tensor in tensors]


def test_chains_of_calls(workers: Workers) -> None:
    assert workers.run(0, chain) == [5.0] * 8


def while_a_graph_is_captured(mode: str) -> list[float]:
    """What is captured must not contain, or be spoilt by, what other threads send meanwhile."""
    counter, tensor = torch.zeros(1, device="cuda:0"), torch.full((SIZE,), 5.0, device="cuda:0")
    rpc.rpc_sync("worker1", look, (tensor,))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        counter.add_(1.0)
        found = on_another_thread(lambda: [rpc.rpc_sync("worker1", look, (tensor,)) for _ in range(TIMES)])
        counter.add_(1.0)
    counter.zero_()
    graph.replay()
    return [*found, counter.item()]


def test_graphs(workers: Workers, request: pytest.FixtureRequest) -> None:
    # Over the host, memory is pinned and events are waited for: under "global" no thread of the process may do that.
    is_lent = request.node.callspec.params["workers"] == "lent"
    for mode in ["thread_local", "global"] if is_lent else ["thread_local"]:
        assert workers.run(0, while_a_graph_is_captured, mode) == [5.0] * TIMES + [2.0], mode
