"""Something happens at a chosen moment inside Remora: tests of a whole class of faults try one moment after the other.

A moment is a point in the source of Remora that a thread has come to. There are three kinds:

    LINES     before each line. For what may happen anywhere.
    MAKING    before each line on which something may be called or made. For a collection that runs a destructor: the
              interpreter collects when it makes an object, or (from 3.12 on) where it looks for signals. It does not on a
              line like `self.count += 1`, which reads, computes a number, compares and stores.
    SIGNALS   where the interpreter looks for signals: after a call of a C function, at the start of a Python function, at
              the end of a turn of a loop. For exceptions that a signal handler raises. They cannot strike elsewhere; in
              particular, not between the last line of a `with` block and the release of its lock, and not between the
              `return` of a Python function and what its caller does next.

    moments = moments_of(work)                      # what the current thread comes to, in order
    with AtMoment(17, raising(KeyboardInterrupt)):  # before the 17th; counted from 0
        work()
    with AtPlace(place, action) as strike:          # the first time that the current thread comes to this place
        work()
    assert strike.place is not None                 # it did come
    with AtEachPlace(action, threads=True):         # the first time that any thread comes to any place
        work()

Two runs of the same work need not pass the same number of moments (a wait may look twice), but they pass the same
places. The action runs on the thread that came there, in the midst of what it does, and is not traced itself. What it
raises is raised there. After that, CPython does not trace this thread any more."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import remora

SOURCE = str(Path(remora.__file__).parent) + "/"
LINES, MAKING, SIGNALS = "lines", "making", "signals"

_RESUME, _NOTHING = dis.opmap["RESUME"], -1
_CHECKED_AFTER = {code for name, code in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD"))}
_CHECKED_AFTER -= {code for name, code in dis.opmap.items() if "NO_INTERRUPT" in name}
_CHECKED_AFTER.add(_RESUME)

# What reads, stores, jumps, compares or computes. (The numbers of Remora, that is: a sum of lists makes one.)
_MAKES_NOTHING = (
    "LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_DEREF", "STORE_", "DELETE_", "BINARY_OP", "COMPARE_OP",
    "IS_OP", "UNARY_NOT", "POP_", "JUMP_FORWARD", "RETURN_", "CACHE", "NOP", "COPY", "SWAP", "EXTENDED_ARG", "TO_BOOL",
)  # fmt: skip


@cache
def _lines_that_make(code: CodeType) -> frozenset[int]:
    found, line = set(), code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line if type(instruction.starts_line) is int else line
        if not instruction.opname.startswith(_MAKES_NOTHING):
            found.add(line)
    return frozenset(found)


class Place(NamedTuple):
    """A point in the source. `offset` tells apart the moments of one line; it is 0 for the line itself."""

    file: str  # relative to src/remora
    line: int
    function: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})" + (f" +{self.offset}" if self.offset else "")


Action = Callable[[Place], object]


def raising(error: type[BaseException]) -> Action:
    """An action that raises."""

    def strike(place: Place) -> None:
        raise error(f"raised on purpose at {place}")

    return strike


class Tracer:
    """`with tracer:` `reached(place)` is called at each moment of the current thread; with `threads`, also at those of
    threads that are started meanwhile, for as long as the block lasts."""

    def __init__(self, kind: str = LINES, threads: bool = False) -> None:
        self._kind = kind
        self._threads = threads
        self._on = False
        self._before: Any = None

    def reached(self, place: Place) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        self._on = True
        if self._threads:
            threading.settrace(self._call)
        self._before = sys.gettrace()
        if self._kind == SIGNALS:  # 3.12 traces instructions only if a frame of the process wants that before `settrace`
            sys._getframe().f_trace_opcodes = True
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        if self._threads:
            threading.settrace(None)  # type: ignore[arg-type]
        self._on = False  # threads that were started meanwhile go on calling us

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if not self._on or not code.co_filename.startswith(SOURCE):
            return None
        if self._kind != SIGNALS:
            return self._line
        caller = frame.f_back
        if caller is not None and code.co_name != "__init__":  # (a constructor is called by C)
            came_from = getattr(caller.f_trace, "__self__", None)
            if isinstance(came_from, _Opcodes):
                came_from.called_python()
        step = _Opcodes(self, code).step
        frame.f_trace = step  # from 3.13 on, instructions of a frame are traced only if this is there before the next line
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return step

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and self._on:
            code = frame.f_code
            if self._kind == LINES or frame.f_lineno in _lines_that_make(code):
                self.reached(Place(code.co_filename[len(SOURCE) :], frame.f_lineno, code.co_qualname))
        return self._line if self._on else None

    def instruction(self, frame: FrameType) -> None:
        """The interpreter has looked for signals, and is about to go on with the current instruction of the frame."""
        code = frame.f_code
        self.reached(Place(code.co_filename[len(SOURCE) :], frame.f_lineno, code.co_qualname, frame.f_lasti))

    @property
    def on(self) -> bool:
        return self._on


class _Opcodes:
    """The instructions of one frame. The interpreter looks for signals after some of them."""

    __slots__ = ("_code", "_last", "_tracer")

    def __init__(self, tracer: Tracer, code: CodeType) -> None:
        self._tracer = tracer
        self._code = code.co_code
        self._last = _NOTHING

    def called_python(self) -> None:
        """The current instruction calls a Python function. The interpreter looks at its start, and not when it is
        back."""
        self._last = _NOTHING

    def step(self, frame: FrameType, event: str, arg: object) -> Any:
        if not self._tracer.on:
            return None
        if event == "opcode":
            last, self._last = self._last, self._code[frame.f_lasti]
            if last in _CHECKED_AFTER:
                self._tracer.instruction(frame)
        return self.step


class _Recorder(Tracer):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.places: list[Place] = []

    def reached(self, place: Place) -> None:
        self.places.append(place)


def moments_of(work: Callable[[], object], kind: str = LINES) -> list[Place]:
    """The moments of the current thread while it does some work, in order."""
    with _Recorder(kind) as recorder:
        work()
    return list(recorder.places)


def places_of(work: Callable[[], object], kind: str = LINES) -> list[Place]:
    """The same without repetition."""
    return list(dict.fromkeys(moments_of(work, kind)))


class AtMoment(Tracer):
    """`with AtMoment(n, action):` the action happens at the n-th moment of the current thread, counted from 0."""

    def __init__(self, n: int, action: Action, kind: str = LINES) -> None:
        super().__init__(kind)
        self.place: Place | None = None  # where it struck
        self._left = n
        self._action = action

    def reached(self, place: Place) -> None:
        self._left -= 1
        if self._left == -1:
            self.place = place
            self._action(place)


class AtPlace(Tracer):
    """`with AtPlace(place, action):` the action happens when the current thread comes to a place for the `turn`-th
    time."""

    def __init__(self, place: Place, action: Action, kind: str = LINES, turn: int = 1) -> None:
        super().__init__(kind)
        self.place: Place | None = None  # where it struck
        self._wanted = place
        self._left = turn
        self._action = action

    def reached(self, place: Place) -> None:
        if place == self._wanted:
            self._left -= 1
            if not self._left:
                self.place = place
                self._action(place)


class AtEachPlace(Tracer):
    """`with AtEachPlace(action):` the action happens the first `turns` times that a thread comes to a place, in files
    whose names begin with one of `where`. Never within itself: what it does on other threads is no occasion for it
    either."""

    def __init__(
        self,
        action: Action,
        kind: str = LINES,
        threads: bool = False,
        turns: int = 1,
        where: tuple[str, ...] = ("",),
    ) -> None:
        super().__init__(kind, threads)
        self._where = where
        self.struck: dict[Place, int] = {}
        self.now: Place | None = None  # where it is happening: for who finds that it does not end
        self._action = action
        self._turns = turns
        self._busy = threading.Lock()

    def reached(self, place: Place) -> None:
        if not place.file.startswith(self._where):
            return
        if self.struck.get(place, 0) < self._turns and self._busy.acquire(False):
            try:
                self.struck[place] = self.struck.get(place, 0) + 1
                self.now = place
                self._action(place)
            finally:
                self.now = None
                self._busy.release()
