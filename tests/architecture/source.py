"""The source of Remora as the architecture tests read it: modules, what they import and use. Runs none of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import remora

PACKAGE = "remora"
ROOT = Path(remora.__path__[0])


@dataclass(frozen=True)
class Import:
    """One import: the module it reaches, the line, and whether only type checkers follow it."""

    target: str
    line: int
    for_types_only: bool


@dataclass(frozen=True)
class Module:
    """One file, by its dotted name."""

    name: str
    text: str
    is_package: bool = False

    @property
    def layer(self) -> str:
        """The first name below the package: `remora.wire.frames` is of the layer `wire`, `remora` itself of ``."""
        return layer_of(self.name)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def imports(self, modules: set[str]) -> Iterator[Import]:
        """Everything imported anywhere in the file. Names of `modules` are told from names inside them."""
        typing_only = {id(node) for block in self._type_checking_blocks() for node in ast.walk(block)}
        for node in ast.walk(self.tree):
            for target in self._targets(node, modules):
                yield Import(target, node.lineno, id(node) in typing_only)  # type: ignore[attr-defined]

    def _targets(self, node: ast.AST, modules: set[str]) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = self._absolute(node)
            return [full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names]
        return []

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        up = node.level - 1 if self.is_package else node.level
        parts = self.name.split(".")[: len(self.name.split(".")) - up]
        return ".".join(parts + ([node.module] if node.module else []))

    def _type_checking_blocks(self) -> Iterator[ast.If]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield node

    def uses(self, module: str, names: set[str]) -> Iterator[tuple[str, int]]:
        """Where it says `module.name` other than as a type, or imports `name` from `module`, for any of the names."""
        types = {id(part) for annotation in self._annotations() for part in ast.walk(annotation)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and id(node) not in types:
                if node.attr in names and ast.unparse(node.value) == module:
                    yield f"{module}.{node.attr}", node.lineno
            elif isinstance(node, ast.ImportFrom) and node.module == module:
                for alias in node.names:
                    if alias.name in names:
                        yield f"{module}.{alias.name}", node.lineno

    def _annotations(self) -> Iterator[ast.AST]:
        for node in ast.walk(self.tree):
            for found in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                if found is not None:
                    yield found


def layer_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def read_source(root: Path = ROOT) -> dict[str, Module]:
    """Every module of the package, by name."""
    return {module.name: module for module in map(_read, sorted(root.rglob("*.py")))}


def _read(path: Path) -> Module:
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    return Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package)
