"""Reads a program and finds what it uses of torch's RPC: names and lines. Runs and imports nothing.

It sees names: imports, and attributes of what was imported, under whatever name. What a program does with the objects it
gets (`rref.to_here()`) it does not see.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from remora.compat import replacements


class Use(NamedTuple):
    """One use of a name of torch: the full name, the line, and True if TorchScript compiles that line."""

    name: str
    line: int
    in_script: bool


def uses(text: str, filename: str = "<program>") -> list[Use]:
    """Return the names that the program uses and Remora replaces, in the order of the lines."""
    tree = ast.parse(text, filename)
    bindings = _Bindings()
    bindings.visit(tree)
    references = _References(bindings.names)
    references.visit(tree)
    found = bindings.imported + references.found
    return sorted({use for use in found if replacements.is_replaced(use.name)}, key=lambda use: (use.line, use.name))


class _Bindings(ast.NodeVisitor):
    """Maps names of the program to names of torch. One scope for the whole file: imports hide nothing here."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.imported: list[Use] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imported.append(Use(alias.name, node.lineno, False))
            if alias.asname is not None:
                self.names[alias.asname] = alias.name
            else:
                top = alias.name.partition(".")[0]
                self.names[top] = top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names if node.module is not None and not node.level else ():
            is_everything = alias.name == "*"
            name = str(node.module) if is_everything else f"{node.module}.{alias.name}"
            self.imported.append(Use(name, node.lineno, False))
            if not is_everything:
                self.names[alias.asname or alias.name] = name

    def visit_Assign(self, node: ast.Assign) -> None:
        """Bind one more name, as in `rpc = torch.distributed.rpc`."""
        value = _dotted(node.value, self.names)
        target = node.targets[0]
        if value is not None and isinstance(target, ast.Name):
            self.names[target.id] = value
        self.generic_visit(node)


class _References(ast.NodeVisitor):
    """Collects the lines where the program mentions a bound name."""

    def __init__(self, bound: dict[str, str]) -> None:
        self._bound = bound
        self.found: list[Use] = []
        self._in_script = False

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._note(node):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._note(node)

    def _note(self, node: ast.expr) -> bool:
        dotted = _dotted(node, self._bound)
        if dotted is None:
            return False
        self.found.append(Use(dotted, node.lineno, self._in_script))
        return True

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit a function. The decorators of a scripted one are Python's; all else, annotations too, is TorchScript's."""
        before = self._in_script
        for each in node.decorator_list:
            self.visit(each)
        self._in_script = before or any(self._is_script(each) for each in node.decorator_list)
        for part in (node.args, *([node.returns] if node.returns else []), *node.body):
            self.visit(part)
        self._in_script = before

    def _is_script(self, decorator: ast.expr) -> bool:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        return _dotted(called, self._bound) in ("torch.jit.script", "torch.jit.script_method")


def _dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    """Return the full name, `rpc.RRef` as torch.distributed.rpc.RRef; None if it does not begin with a bound name."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, bound)
        return None if base is None else f"{base}.{node.attr}"
    return None
