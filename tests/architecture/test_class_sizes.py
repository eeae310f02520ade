"""No class of ours is so large that it cannot be understood alone: its methods are counted, those of its bases with them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import Module, read_source

LIMIT = 25  # methods of a class and of its bases, properties among them, `__dunder__` ones not


class _Class:
    """One class, as it is written."""

    def __init__(self, node: ast.ClassDef, bases: list[str]) -> None:
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.methods = {each.name for each in functions if not each.name.startswith("__")}
        self.bases = bases


def classes_of(source: dict[str, Module]) -> dict[str, _Class]:
    """Every class at the top of a module, by its dotted name."""
    return {
        f"{module.name}.{node.name}": _Class(node, list(_bases(module, node)))
        for module in source.values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }


def _bases(module: Module, node: ast.ClassDef) -> Iterator[str]:
    """The dotted names of its bases: of the same module, or as they were imported."""
    imported = {
        alias.asname or alias.name: f"{each.module}.{alias.name}"
        for each in ast.walk(module.tree)
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    for base in node.bases:
        name = ast.unparse(base).split("[")[0]
        head, _, rest = name.partition(".")
        yield f"{imported[head]}.{rest}".rstrip(".") if head in imported else f"{module.name}.{name}"


def methods_of(name: str, classes: dict[str, _Class]) -> set[str]:
    """Its methods, and those that it inherits from classes of ours. What it overrides counts once."""
    found = classes.get(name)
    if found is None:
        return set()
    return found.methods.union(*(methods_of(base, classes) for base in found.bases))


def sizes(source: dict[str, Module]) -> dict[str, int]:
    """How many methods each class has."""
    classes = classes_of(source)
    return {name: len(methods_of(name, classes)) for name in classes}


def test_no_class_has_too_many_methods() -> None:
    large = {name: size for name, size in sizes(read_source()).items() if size > LIMIT}
    assert not large, f"more than {LIMIT} methods: compose them of smaller ones"


def made_of(**files: str) -> dict[str, Module]:
    return {name: Module(name, text) for key, text in files.items() for name in [key.replace("__", ".")]}


@pytest.mark.parametrize(
    "base",
    [
        "from remora.wire.a import A\nclass B(A):\n    def g(self): ...\n    def f(self): ...",
        "from remora.wire import a\nclass B(a.A):\n    def g(self): ...",
        "from remora.wire.a import A as Other\nclass B(Other[int]):\n    async def g(self): ...",
    ],
)
def test_methods_of_bases_count_once(base: str) -> None:
    source = made_of(
        remora__wire__a="class A:\n    def __init__(self): ...\n    def f(self): ...\n    @property\n    def h(self): ...",
        remora__wire__b=base,
    )
    assert sizes(source) == {"remora.wire.a.A": 2, "remora.wire.b.B": 3}
