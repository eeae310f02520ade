"""What a call costs in interpreter instructions and in calls of C functions: `make bench ARGS="--instructions"`.

Times vary with the machine and its load. These counts do not, so they show a change of one percent on a busy machine.
They are no substitute for times: one instruction may cost a hundred times another, and system calls are not in them.

On the caller the main thread is counted, on the callee the thread that serves. A block of calls is counted on both sides,
and so is an empty block, whose counts are subtracted. What is told is the median of the blocks, for one call. A thread that
polls before it sleeps would add instructions by chance, so workers do not (`ENVIRONMENT`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Any

from benchmarks.calls import nothing, same
from benchmarks.contestants import REMORA
from benchmarks.measure import Benchmark, Reading, Setting, Unit

ENVIRONMENT = {"REMORA_LOOK": "0"}  # of the workers
WARM_UP_BLOCKS = 2
BLOCKS, QUICK_BLOCKS = 15, 7
CALLS = 20  # of a block
FLIGHT = 200  # … of calls that are under way at once

Action = Callable[[], object]  # makes all calls of a block
Prepare = Callable[[Setting, Any, str], Action]  # given also the RPC module and the name of the callee


class Counter:
    """Counts on one thread of this process, from `begin` to `end`."""

    def __init__(self) -> None:
        self._counted = 0
        self._thread = 0

    def begin(self, unit: Unit) -> None:
        self._counted, self._thread = 0, get_ident()
        if unit is Unit.C_CALLS:
            sys.setprofile(self._profile)
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # those that run already count from now on, too
            frame.f_trace = self._trace(frame, "call", None)
            frame = frame.f_back
        sys.settrace(self._trace)

    def end(self) -> int | None:
        """The count; None if another thread began."""
        sys.setprofile(None)
        sys.settrace(None)
        return self._counted if self._thread == get_ident() else None

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "c_call":
            self._counted += 1

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self._counted += 1
        elif event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._trace


_counter = Counter()  # of this process


def begin(unit: str) -> None:
    """Runs on the callee: the thread that runs this one serves the calls that follow."""
    _counter.begin(Unit(unit))


def end() -> int | None:
    """Runs on the callee."""
    return _counter.end()


@dataclass(frozen=True)
class Counting:
    """A benchmark that counts what each of so many calls costs; what `prepare` returns makes all of them."""

    prepare: Prepare
    calls: int

    def __call__(self, setting: Setting) -> Iterator[Reading]:
        action = self.prepare(setting, setting.rpc, setting.peers[0])
        for unit in (Unit.INSTRUCTIONS, Unit.C_CALLS):
            blocks = setting.effort(BLOCKS, QUICK_BLOCKS)
            full = [self._block(setting, unit, action) for _ in range(WARM_UP_BLOCKS + blocks)]
            empty = [self._block(setting, unit, _idle) for _ in range(blocks)]
            for index, side in enumerate(("caller", "callee")):
                most, least = (_median(block[index] for block in each) for each in (full[WARM_UP_BLOCKS:], empty))
                yield Reading(side if unit is Unit.INSTRUCTIONS else f"{side}, C calls", (most - least) / self.calls, unit)

    def _block(self, setting: Setting, unit: Unit, action: Action) -> tuple[int | None, int | None]:
        rpc, (peer, *_) = setting.rpc, setting.peers
        rpc.rpc_sync(peer, begin, args=(unit.value,))
        _counter.begin(unit)
        action()
        here = _counter.end()
        return here, rpc.rpc_sync(peer, end)


def _median(counts: Iterator[int | None]) -> float:
    """Of those that one thread counted."""
    return statistics.median([count for count in counts if count is not None])


def _idle() -> None:
    """An empty block."""


def _noop(_: Setting, rpc: Any, peer: str) -> Action:
    return _repeated(lambda: rpc.rpc_sync(peer, nothing))


def _add(_: Setting, rpc: Any, peer: str) -> Action:
    import torch

    args = (torch.ones(4), torch.ones(4))
    return _repeated(lambda: rpc.rpc_sync(peer, torch.add, args=args))


def _flight(_: Setting, rpc: Any, peer: str) -> Action:
    import torch

    return lambda: torch.futures.wait_all([rpc.rpc_async(peer, nothing) for _ in range(FLIGHT)])


def _reference(_: Setting, rpc: Any, peer: str) -> Action:
    return _repeated(lambda: rpc.remote(peer, nothing).to_here())


def _echo(_: Setting, rpc: Any, peer: str, size: int = 4000) -> Action:
    import torch

    args = (torch.arange(size, dtype=torch.int32).to(torch.uint8),)
    return _repeated(lambda: rpc.rpc_sync(peer, same, args=args))


def _echo_megabyte(setting: Setting, rpc: Any, peer: str) -> Action:
    return _echo(setting, rpc, peer, 10**6)


def _nested(_: Setting, rpc: Any, peer: str) -> Action:
    """What a model is often called with: tensors in a list and in a dictionary, and by keyword."""
    import torch

    args = ([torch.ones(4), torch.ones(4)],)
    kwargs = {"named": {"mask": torch.ones(4)}}
    return _repeated(lambda: rpc.rpc_sync(peer, taken, args=args, kwargs=kwargs))


def taken(tensors: object, named: object) -> None:
    """Runs on the callee."""


def _training(setting: Setting, *_: object) -> Action:
    from benchmarks.suite import training

    return _repeated(training.prepared(setting))


def _repeated(action: Action) -> Action:
    def repeat() -> None:
        for _ in range(CALLS):
            action()

    return repeat


def _benchmark(name: str, title: str, prepare: Prepare, calls: int = CALLS) -> Benchmark:
    return Benchmark(name, title, Counting(prepare, calls), contestants=(REMORA,), rounds=2)


SUITE = [
    _benchmark("noop", "rpc_sync no-op", _noop),
    _benchmark("add", "rpc_sync torch.add", _add),
    _benchmark("flight", f"{FLIGHT} rpc_async at once", _flight, FLIGHT),
    _benchmark("reference", "remote() + to_here()", _reference),
    _benchmark("echo", "echo of 4 KB", _echo),
    _benchmark("echo-1-mb", "echo of 1 MB", _echo_megabyte),
    _benchmark("nested-tensors", "tensors in containers", _nested),
    _benchmark("training", "one training step", _training),
]
