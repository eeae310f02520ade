"""Keeps the order of device work when a value passes between threads: one thread marks a point, another waits for it.

A device works in the order of streams, and each thread has current ones. When a value passes from a thread to another, the
first marks a *stream point* on its streams, and the streams of the second wait for it; the host waits for nothing. Threads
that use the same stream, as do all threads that never chose one, have nothing to wait for.

Only watched devices count: those in the maps of a worker, and those whose tensors have come or gone. As long as there are
none, the callers skip everything here; they check `watched` first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from remora.devices import registry

R = TypeVar("R")

# What torch's own functions ask, without what they make of it.
_raw_stream: Callable[[int | None], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)

watched: tuple[torch.device, ...] = ()


def watch(devices: Collection[torch.device]) -> None:
    """Hand values over in the order of these devices' streams, too, from now on."""
    global watched
    if any(device not in watched for device in devices):
        watched = tuple(registry.sorted_devices({*watched, *devices}))


class StreamPoint:
    """A point in the order of work on some streams."""

    __slots__ = ("_points",)

    def __init__(self, points: list[tuple[Any, Any]]) -> None:
        self._points = points  # stream, event

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the streams. Of two points on the same streams, the later one includes the other."""
        return tuple(stream for stream, _ in self._points)

    def join(self, value: object = None) -> None:
        """Make the current streams wait for it, and record that they use the memory of the tensors in `value`: torch does
        not reuse that memory before their work is done."""
        for stream, event in self._points:
            current = _current(stream.device)
            if current != stream:
                current.wait_event(event)
                if value is not None:
                    _keep(value, current)


def stream_point() -> StreamPoint | None:
    """Return the current point on the streams of this thread; None if no device is watched."""
    points = [(stream, stream.record_event()) for stream in _current_streams()]
    return StreamPoint(points) if points else None


def mark(device: torch.device) -> Any:
    """Return an event on the current stream of a device, for the host to wait for; None if the device has no streams."""
    if device.type in registry.UNNUMBERED:
        return None
    if registry.has_streams(device.type):
        return _current(device).record_event()
    registry.module(device.type).synchronize()
    return None


# Copies to and from the host are made on streams of their own.


def aside(device: torch.device) -> Any:
    """Return a stream that starts where the current one is; None if the device has no streams."""
    if device.type in registry.UNNUMBERED or not registry.has_streams(device.type):
        return None
    stream = registry.module(device.type).Stream(device)
    stream.wait_event(_current(device).record_event())
    return stream


@lru_cache(maxsize=64)
def for_arrivals(device: torch.device) -> Any:
    """Return the stream on which received bytes are copied to a device. There is one for each device, because torch reuses
    memory of a stream only on the same stream."""
    if device.type in registry.UNNUMBERED or not registry.has_streams(device.type):
        return None
    return registry.module(device.type).Stream(device)


def on(stream: Any) -> AbstractContextManager[Any]:
    """Make a stream current, if there is one."""
    return nullcontext() if stream is None else registry.module(stream.device.type).stream(stream)


def follow(device: torch.device, event: Any) -> None:
    """Make the current stream of a device wait for an event, if there is one."""
    if event is not None:
        _current(device).wait_event(event)


def hand_over(tensor: torch.Tensor, event: Any) -> None:
    """Let the current stream use a tensor that another stream made: wait for the event, and record the use."""
    if event is not None:
        current = _current(tensor.device)
        current.wait_event(event)
        tensor.record_stream(current)


def raw(device: torch.device) -> int:
    """Return the address of the current stream of a CUDA device."""
    return _raw_stream(device.index)


def _current(device: torch.device) -> Any:
    return registry.module(device.type).current_stream(device)


def _keep(value: object, stream: Any) -> None:
    for tensor in tensors_in(value):
        if tensor.device == stream.device:
            for part in _parts(tensor):
                part.record_stream(stream)


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors in a value: in lists and dictionaries, and in objects that pickle can take apart."""
    found = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, _ATOMS)]
    tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
    if len(tensors) < len(found):
        try:
            return list(torch._jit_internal._extract_tensors(value))  # type: ignore[no-untyped-call]
        except Exception:  # then the tensors found so far have to do
            pass
    return tensors


_ATOMS = (type(None), bool, int, float, str, bytes)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout is torch.strided else ()


def restoring(call: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Call a function of the program on a thread of a worker. If it leaves other streams or devices current, wait for them
    and restore the thread's own: the next function belongs to another caller."""
    before = _tokens()
    try:
        return call(*args, **kwargs)
    finally:
        if before != _tokens():
            end = stream_point()
            for device, token, current in before:
                _make_current(_stream_of(device, token))
                registry.module(device.type).set_device(current)
            if end is not None:
                end.join()


def _tokens() -> list[tuple[torch.device, Any, int]]:
    """Return the current streams and devices in a form that is cheap to compare: CUDA streams by their addresses."""
    return [
        (device, _raw_stream(device.index), _current_cuda_device())
        if registry.module(device.type) is torch.cuda
        else (device, _current(device), registry.module(device.type).current_device())
        for device in watched
        if registry.started(device.type) and registry.has_streams(device.type)
    ]


def _stream_of(device: torch.device, token: Any) -> Any:
    if not isinstance(token, int):
        return token
    return torch.cuda.ExternalStream(token, device) if token else torch.cuda.default_stream(device)  # type: ignore[no-untyped-call]


# Coroutines share a thread: what one of them makes its current stream must not be the next one's.


class OnItsOwnStreams(Coroutine[Any, Any, R]):
    """A coroutine that begins after a stream point, and has current streams of its own."""

    __slots__ = ("_begin", "_mine", "_steps")

    def __init__(self, coroutine: Coroutine[Any, Any, R], begin: StreamPoint | None) -> None:
        self._steps = coroutine
        self._begin = begin
        self._mine: list[Any] = []  # its current streams, while it waits for something

    def _step(self, go_on: Callable[..., Any], *how: Any) -> Any:
        with _lent_streams(self._mine):
            if self._begin is not None:
                self._begin.join()
                self._begin = None
            try:
                return go_on(*how)
            except StopIteration as stop:
                over, end = stop, stream_point()
        if end is not None:
            end.join(over.value)  # on the streams of the awaiting coroutine
        raise over

    def send(self, value: Any) -> Any:
        return self._step(self._steps.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._steps.throw, *error)

    def close(self) -> None:
        self._steps.close()

    def __await__(self) -> Generator[Any, Any, R]:
        return self

    def __iter__(self) -> OnItsOwnStreams[R]:
        return self

    def __next__(self) -> Any:
        return self.send(None)


@contextmanager
def _lent_streams(mine: list[Any]) -> Iterator[None]:
    """Make these the current streams of the thread. Afterwards the list has the streams that were left, and the thread its
    own."""
    before = _current_streams()
    for stream in mine:
        _make_current(stream)
    try:
        yield
    finally:
        after = _current_streams()
        mine[:] = after
        for stream in before:
            if stream not in after:
                _make_current(stream)


def _current_streams() -> list[Any]:
    return [_current(each) for each in watched if registry.started(each.type) and registry.has_streams(each.type)]


def _make_current(stream: Any) -> None:
    module = registry.module(stream.device.type)
    with module.device(stream.device):  # whichever device is current stays it
        module.set_stream(stream)
