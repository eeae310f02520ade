"""The order of work on devices between threads: moments that one thread marks and another waits for. Blocks nobody.

Work on a device is done in the order of streams, and each thread has current ones. When a value passes from a thread to
another, the first marks a *moment* on its streams, and the streams of the second wait for it; the host waits for nothing.
Between threads that use the same stream, as those do which never chose one, there is nothing to wait for.

Only devices that are watched count: those in the maps of a worker, and those whose tensors have come or gone. As long as
there are none, everything here is skipped by its callers, who look at `watched` first.
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
    """From now on, hand values over in the order of these devices' streams, too."""
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
        """The streams. Of two moments on the same streams, the later one is after the other."""
        return tuple(stream for stream, _ in self._points)

    def join(self, value: object = None) -> None:
        """Have the current streams wait for it. The memory of tensors in `value` is then theirs to use as well: it is
        not given to others before what they do with it is done."""
        for stream, event in self._points:
            current = _current(stream.device)
            if current != stream:
                current.wait_event(event)
                if value is not None:
                    _keep(value, current)


def moment() -> StreamPoint | None:
    """Now, on the current streams of this thread; None if nothing is watched."""
    points: list[tuple[Any, Any]] = []
    for device in watched:
        if registry.started(device.type) and registry.has_streams(device.type):
            stream = _current(device)
            points.append((stream, stream.record_event()))
    return StreamPoint(points) if points else None


def mark(device: torch.device) -> Any:
    """An event on the current stream of a device, for the host to wait for; None if it has no streams to wait for."""
    if device.type in registry.UNNUMBERED:
        return None
    if registry.has_streams(device.type):
        return _current(device).record_event()
    registry.module(device.type).synchronize()
    return None


# Copies to and from the host are made on streams of their own.


def aside(device: torch.device) -> Any:
    """A stream that goes on from where the current one is, beside it; None if the device has no streams."""
    if device.type in registry.UNNUMBERED or not registry.has_streams(device.type):
        return None
    stream = registry.module(device.type).Stream(device)
    stream.wait_event(_current(device).record_event())
    return stream


@lru_cache(maxsize=64)
def for_arrivals(device: torch.device) -> Any:
    """The stream on which memory of a device is filled with what arrives. One for each, for memory that was a stream's is
    given out again only to the same one."""
    if device.type in registry.UNNUMBERED or not registry.has_streams(device.type):
        return None
    return registry.module(device.type).Stream(device)


def on(stream: Any) -> AbstractContextManager[Any]:
    """Make a stream current, if there is one."""
    return nullcontext() if stream is None else registry.module(stream.device.type).stream(stream)


def follow(device: torch.device, event: Any) -> None:
    """Have the current stream of a device wait for an event, if there is one."""
    if event is not None:
        _current(device).wait_event(event)


def hand_over(tensor: torch.Tensor, event: Any) -> None:
    """What was made on a stream of ours, and is ready with an event, is the current stream's to use."""
    if event is not None:
        current = _current(tensor.device)
        current.wait_event(event)
        tensor.record_stream(current)


def raw(device: torch.device) -> int:
    """The address of the current stream of a CUDA device."""
    return _raw_stream(device.index)


def _current(device: torch.device) -> Any:
    return registry.module(device.type).current_stream(device)


def _keep(value: object, stream: Any) -> None:
    for tensor in tensors_in(value):
        if tensor.device == stream.device:
            for part in _parts(tensor):
                part.record_stream(stream)


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors in a value: in lists and dictionaries, and in objects that pickle can take apart."""
    found = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, _ATOMS)]
    tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
    if len(tensors) < len(found):
        try:
            return list(torch._jit_internal._extract_tensors(value))  # type: ignore[no-untyped-call]
        except Exception:  # then those that can be seen have to do
            pass
    return tensors


_ATOMS = (type(None), bool, int, float, str, bytes)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout is torch.strided else ()


def restoring(call: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Call a function of the program on a thread of ours. If it leaves other streams or devices current, they are waited for
    and the thread has its own again: the next function is somebody else's."""
    before = _tokens()
    try:
        return call(*args, **kwargs)
    finally:
        if before != _tokens():
            end = moment()
            for device, token, current in before:
                _make_current(_stream_of(device, token))
                registry.module(device.type).set_device(current)
            if end is not None:
                end.join()


def _tokens() -> list[tuple[torch.device, Any, int]]:
    """What tells the current streams and devices apart: of CUDA's streams their addresses, which are cheap to ask for."""
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
    """A coroutine that begins after a moment, and for which current streams are its own."""

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
                over, end = stop, moment()
        if end is not None:
            end.join(over.value)  # on the streams of whoever awaits it
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
    """Make these the current streams of the thread; afterwards they are those that were left, and the thread has its own."""
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
