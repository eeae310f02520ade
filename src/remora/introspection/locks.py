"""Finds the lock that a thread of the program waits for, and the thread that holds it. Runs no code of the program.

A thread that waits for a lock is in `lock.acquire()` or at the beginning of a `with`. Which object that is follows from the
source at that place: names and attributes are looked up in the frame as they are, without properties or `__getattr__`. A
reentrant lock knows its owner. A plain one does not: then the holder is a thread that is inside a `with` on the same lock.
What is written in another way (`locks[key].acquire()`) is not found.
"""

from __future__ import annotations

import _thread
import ast
import builtins
import dis
import inspect
import linecache
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any

from remora.introspection.threads import Thread
from remora.names import is_ours

LARGEST = 1 << 20  # characters of a source file that is looked into
_MISSING = object()
_OWNER = re.compile(r"owner=(\d+) ")
_ENTER = threading.Condition.__enter__.__code__
_LOCKS = (_thread.LockType, _thread.RLock)


@dataclass(frozen=True)
class Blocked:
    """A thread that waits for a lock."""

    expression: str  # as the source has it
    place: str  # "file:line"
    holder: int | None  # the thread that holds it
    limited: bool = False  # the thread waits for a time only


def blocked_at(thread: Thread, others: list[Thread]) -> Blocked | None:
    """Return the lock that a thread waits for; None if it waits for none, or that cannot be told."""
    frame = thread.frames[0]
    if frame.f_code is _ENTER and len(thread.frames) > 1:
        frame = thread.frames[1]  # it enters a condition, which is its lock
    elif frame.f_code.co_filename == threading.__file__:
        return None  # it waits for an event or a condition, which no thread holds
    if is_ours(frame.f_code):
        return None
    found = _waited_for(frame)
    if found is None:
        return None
    expression, lock, limited = found
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return Blocked(expression, place, _holder(lock, [each for each in others if each.id != thread.id]), limited)


def _waited_for(frame: FrameType) -> tuple[str, Any, bool] | None:
    """The lock at which a frame stands, if it is held; and whether it waits for a time only."""
    node = _expression_at(frame)
    limited = isinstance(node, ast.Call) and bool(node.args[1:] or [each for each in node.keywords if each.arg == "timeout"])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "acquire":
        node = node.func.value
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    lock = _as_lock(_look_up(node, frame))
    return (ast.unparse(node), lock, limited) if lock is not None and _is_held(lock) else None


def _expression_at(frame: FrameType) -> ast.expr | None:
    """The expression whose instruction a frame is at: a call, or what a `with` is entered with."""
    positions = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    place = positions[at] if at < len(positions) else (None,) * 4
    line, last_line, start, end = place
    if line is None or last_line is None or start is None or end is None:
        return None
    for each in _withs(frame.f_code):
        if (each.lineno, each.end_lineno, each.col_offset, each.end_col_offset) == place:
            # Entering any of its items has the place of the whole statement.
            before = [n for n in _entries(frame.f_code) if positions[n // 2] == place and n < frame.f_lasti]
            return each.items[len(before)].context_expr if len(before) < len(each.items) else None
    if line != last_line:
        return None
    text = linecache.getline(frame.f_code.co_filename, line).encode()[start:end].decode(errors="replace")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=512)
def _entries(code: CodeType) -> list[int]:
    """Find the instructions of a function that enter something by `with`."""
    return [each.offset for each in dis.get_instructions(code) if each.opname == "BEFORE_WITH"]


def _look_up(node: ast.expr, frame: FrameType) -> Any:
    """The object that a name, or attributes of one, mean in a frame."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in names:
                return names[node.id]
    elif isinstance(node, ast.Attribute):
        owner = _look_up(node.value, frame)
        if owner is not _MISSING:
            return _attribute(owner, node.attr)
    return _MISSING


def _attribute(owner: Any, name: str) -> Any:
    try:
        found = inspect.getattr_static(owner, name, _MISSING)
    except Exception:
        return _MISSING
    if type(found) is MemberDescriptorType:  # a slot: C code fetches what is in it
        try:
            return found.__get__(owner)
        except AttributeError:
            return _MISSING
    return found


def _as_lock(found: Any) -> Any:
    """The lock itself, of what guards something."""
    if type(found) is threading.Condition:
        found = vars(found).get("_lock")
    return found if type(found) in _LOCKS else None


def _is_held(lock: Any) -> bool:
    return bool(lock.locked()) if type(lock) is _thread.LockType else _owner(lock) is not None


def _owner(lock: Any) -> int | None:
    """The thread that holds a reentrant lock: its `repr`, made in C, says it."""
    match = _OWNER.search(repr(lock))
    return int(match[1]) if match is not None and match[1] != "0" else None


def _holder(lock: Any, others: list[Thread]) -> int | None:
    if type(lock) is not _thread.LockType:
        return _owner(lock)
    for thread in others:
        for frame in thread.frames:
            if any(_as_lock(_look_up(node, frame)) is lock for node in _held_at(frame)):
                return thread.id
    return None


def held_in(frame: FrameType, lock: Any) -> bool:
    """Return True if a frame of a coroutine is inside an `async with` on a lock of asyncio."""
    return any(_look_up(node, frame) is lock for node in _held_at(frame, ast.AsyncWith))


def name_of_awaited(frame: FrameType) -> str:
    """Return what a coroutine that waits for a lock of asyncio calls it, as the source has it; may be empty."""
    for each in _withs(frame.f_code):
        last = each.items[-1].context_expr.end_lineno or each.lineno
        if isinstance(each, ast.AsyncWith) and each.lineno <= frame.f_lineno <= last:
            return ast.unparse(each.items[0].context_expr)
    return "of a coroutine"


def _held_at(frame: FrameType, kind: type[ast.With] | type[ast.AsyncWith] = ast.With) -> Iterator[ast.expr]:
    """Yield the objects of the `with` statements that a frame is inside of."""
    withs = [each for each in _withs(frame.f_code) if isinstance(each, kind)]
    if not withs:
        return
    line, column = _place(frame)
    for each in withs:
        first, last = each.body[0], each.body[-1]
        # (by columns: the body may be on the line at which others wait)
        if (first.lineno, first.col_offset) <= (line, column) and line <= (last.end_lineno or last.lineno):
            yield from (item.context_expr for item in each.items)


def _place(frame: FrameType) -> tuple[int, int]:
    """The line and column that a frame is at."""
    at = frame.f_lasti // 2
    line, _, column, _ = next(islice(frame.f_code.co_positions(), at, None), (None,) * 4)
    return (frame.f_lineno or 0, 0) if line is None or column is None else (line, column)


@lru_cache(maxsize=512)
def _withs(code: CodeType) -> list[ast.With | ast.AsyncWith]:
    """The `with` statements of a function: from its source, which is parsed once."""
    return [
        node
        for function in _functions(code.co_filename)
        if _first_line(function) == code.co_firstlineno and getattr(function, "name", "<module>") == code.co_name
        for node in _own_nodes(function)
        if isinstance(node, (ast.With, ast.AsyncWith))
    ]


@lru_cache(maxsize=32)
def _functions(filename: str) -> list[Any]:
    """The functions of a file, and the module itself."""
    text = "".join(linecache.getlines(filename))
    if not text or len(text) > LARGEST:
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [tree, *(each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))]


def _first_line(function: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if isinstance(function, ast.Module):
        return 1
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The statements of a function, without those of functions and classes inside it."""
    ahead = list(ast.iter_child_nodes(function))
    while ahead:
        node = ahead.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            ahead += ast.iter_child_nodes(node)
