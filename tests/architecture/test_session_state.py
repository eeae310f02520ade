"""Only the methods of `Session` change a session: each has one point at which the change is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import remora
from remora.protocol.session import Session

ROOT = Path(remora.__file__).parent
FIELDS = frozenset(Session.__slots__)
CHANGING = {"append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "remove"}


def changes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines in which a field of a session is assigned, deleted or, if it is a list, changed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in CHANGING and _is_field(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            field = node.value if isinstance(node, ast.Subscript) else node
            if _is_field(field):
                yield node.lineno, ast.unparse(node)


def _is_field(node: ast.AST) -> bool:
    """True for `session.field`, `self.session.field` and the like."""
    if not isinstance(node, ast.Attribute) or node.attr not in FIELDS:
        return False
    owner = node.value
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return name in {"session", "_session"}


def test_no_other_module_changes_a_session() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, what in changes(ast.parse(path.read_text()))
    ]
    assert not found


@pytest.mark.parametrize(
    "code", ["session.sent += 1", "self.session.kept.append(x)", "del self._session.kept[0]", "channel.session.acked = 3"]
)
def test_a_change_is_found(code: str) -> None:
    assert len(list(changes(ast.parse(code)))) == 1
