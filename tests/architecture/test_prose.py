"""A file is found by its name, and what is written says what a thing is or does."""

from __future__ import annotations

import ast
import re
from collections import Counter

from tests.architecture.source import read_source

# `python -m` wants the one name in two folders; torch has the module `rpc.options`.
TWICE = {"__main__", "options"}
QUESTION = re.compile(r"(who|whom|whose|what|where|when|how|whether|why|which)\b", re.IGNORECASE)
NO_ROLE = re.compile(r"\b(whoever|somebody|nobody|head of this file)\b", re.IGNORECASE)


def test_no_two_files_have_one_name() -> None:
    counts = Counter(name.rpartition(".")[2] for name, module in read_source().items() if not module.is_package)
    assert [name for name, count in counts.items() if count > 1 and name not in TWICE] == []


def test_a_docstring_begins_with_no_question_word() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{module.name}: {text.splitlines()[0]}"
        for module in read_source().values()
        for node in ast.walk(module.tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and QUESTION.match(text)
    ]
    assert found == []


def test_a_role_has_a_name() -> None:
    assert [name for name, module in read_source().items() if NO_ROLE.search(module.text)] == []
