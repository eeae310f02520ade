"""Destructors run anywhere: inside our own locks, while the interpreter goes down. They import, lock and await nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from remora import rpc
from remora.testing.world import World
from tests.architecture.source import Module, read_source
from tests.systematic.tracing import moments_of

MAY_IMPORT_LATE = ("command", "compat", "launch", "observer", "testing")  # which run before the program, or beside it
OF_CONTAINERS = {name for kind in (list, dict, set, bytes, str) for name in dir(kind)}
WAITING = {"acquire", "wait", "join", "sleep", "block", "wait_for", "select", "poll"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return list(read_source().values())


def functions(module: Module) -> Iterator[Function]:
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            yield node


def called(function: ast.AST) -> set[str]:
    """The names of what it calls, but for methods of containers."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    return (names | {call.id for call in calls if isinstance(call, ast.Name)}) - OF_CONTAINERS


def test_nothing_is_imported_late(modules: list[Module]) -> None:
    """A thread may be stopped in the midst of it, when the interpreter goes down, and has the lock of all imports then."""
    for module in modules:
        for function in functions(module) if module.layer not in MAY_IMPORT_LATE else ():
            late = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not late, f"{module.name}:{late[0]} {function.name} imports something when it is called"


def test_destructors_look_whether_the_interpreter_goes_down(modules: list[Module]) -> None:
    """Those that do more than to put something on a list. Their module may be empty by then: they have what tells them as a
    default."""
    found = [(module, each) for module in modules for each in functions(module) if each.name == "__del__"]
    assert len(found) >= 5
    for module, destructor in found:
        given = {argument.arg for argument in destructor.args.args}
        body = ast.Module(destructor.body, [])
        assert "is_finalizing" in given or called(body) <= given, f"{module.name}:{destructor.lineno}"


def make_list(n: int) -> list[int]:
    return [0] * n


def make_large() -> torch.Tensor:
    return torch.ones(1 << 18)


def proxy_of(rref: rpc.RRef[Any]) -> Any:
    return rref.rpc_async().count


MAKERS: dict[str, Callable[[], Any]] = {
    "reference": lambda: rpc.remote("worker1", make_list, args=(3,)),
    "references": lambda: [rpc.remote("worker1", make_list, args=(3,)) for _ in range(20)],
    "own value": lambda: rpc.RRef([1]),
    "proxy": lambda: proxy_of(rpc.remote("worker1", make_list, args=(3,))),
    "future": lambda: rpc.rpc_async("worker1", make_list, args=(3,)),
    "large": lambda: rpc.rpc_sync("worker1", make_large),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_destructors_come_to_takes_no_lock_and_does_not_wait(modules: list[Module], name: str) -> None:
    """All lines of Remora that a thread comes to when it drops something: none belongs to a function that locks or waits."""
    by_file = {f"{module.name.removeprefix('remora.').replace('.', '/')}.py": module for module in modules}
    with World(2) as world, world.acting(0):
        held = [MAKERS[name]()]
        rpc.rpc_sync("worker1", make_list, args=(1,))
        came_to = {(place.file, place.function) for place in moments_of(held.clear)}
    if name in ("reference", "references", "proxy"):
        assert ("rref/handle.py", "Handle.__del__") in came_to
    for file, qualified in came_to:
        for function in functions(by_file[file]):
            if function.name == qualified.rpartition(".")[2]:
                for node in ast.walk(function):
                    for item in node.items if isinstance(node, ast.With) else ():
                        assert "lock" not in ast.unparse(item).lower(), f"{file}: {qualified} takes a lock"
                assert not called(function) & WAITING, f"{file}: {qualified} waits"
