"""Lists in the documentation that are made from the source: layers, locks, errors, settings, environment variables.

    make docs       writes them anew (python -m tests.docs_lists)

Each stands between two marks, `<!-- layers -->` and `<!-- end of layers -->`. `tests/test_docs.py` fails if one is stale.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from remora import errors
from remora.options import Settings
from tests.architecture.source import ROOT as SOURCE
from tests.architecture.source import Module, read_source
from tests.architecture.test_layers import LAYERS

DOCS = Path(__file__).parents[1] / "docs"
LOCKS = {"TryLock", "Lock", "RLock", "Condition"}
VARIABLE = re.compile(r"REMORA_[A-Z_]+[A-Z]")


def first_sentence(text: str | None) -> str:
    """Of a docstring: without the full stop."""
    words = " ".join((text or "").split())
    return re.split(r"(?<=[a-z)`'\"0-9])[.:;](?: |$)", words, maxsplit=1)[0].rstrip(".")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# Layers.


def layers() -> str:
    """From the top: what each is for. A layer imports those of lower lines."""
    source = read_source()
    rows = []
    for names in reversed(LAYERS):
        for name in sorted(names):
            module = source[f"remora.{name}" if name else "remora"]
            rows.append((f"`{path_of(module)}`", first_sentence(ast.get_docstring(module.tree))))
    return table(("layer", "what it is"), rows)


def path_of(module: Module) -> str:
    """As the documentation names it: `wire/`, or `clock.py`."""
    below = module.name.split(".")[1:]
    if not below:
        return "__init__.py"
    return "/".join(below) + ("/" if module.is_package else ".py")


# Locks.


def locks() -> str:
    """Every lock that is a field or a name of a module, and what its comment says that it guards."""
    rows = []
    for module in read_source().values():
        if module.layer != "testing":
            rows += [(f"`{where}`", f"`{path_of(module)}`", kind, guarded) for where, kind, guarded in locks_of(module)]
    return table(("lock", "in", "kind", "guards"), rows)


def locks_of(module: Module) -> Iterator[tuple[str, str, str]]:
    lines = module.text.splitlines()
    for holder, nodes in scopes(module.tree):
        for node in nodes:
            if isinstance(node, ast.Assign) and (kind := lock_kind(node.value)):
                name = ast.unparse(node.targets[0])
                if isinstance(holder, ast.ClassDef) and name.startswith("self."):
                    yield f"{holder.name}.{name[5:]}", kind, guarded(lines, node.lineno, holder)
                elif isinstance(holder, ast.Module):
                    yield name, kind, guarded(lines, node.lineno, holder)


def scopes(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """The module with its own lines, and each class with those of `__init__`."""
    yield tree, list(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            yield node, [part for each in made for part in ast.walk(each)]


def lock_kind(value: ast.expr) -> str:
    name = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
    return {"TryLock": "try-lock", "RLock": "reentrant lock", "Lock": "lock", "Condition": "condition"}.get(name, "")


def guarded(lines: list[str], number: int, holder: ast.AST) -> str:
    """The comment at the lock, or above it; else what its class is."""
    _, found, comment = lines[number - 1].partition("  # ")
    above = lines[number - 2].strip()
    if not found and above.startswith("# "):
        comment = above[2:]
    if not comment and isinstance(holder, ast.ClassDef):
        comment = f"the state of: {first_sentence(ast.get_docstring(holder))}"
    return re.sub(r"^guards:? ", "", comment)


# Errors.


def error_tree() -> str:
    """Every exception, below what it is derived from."""
    lines = [f"{errors.RemoraError.__name__} (RuntimeError)"]
    described = [""]
    grow(errors.RemoraError, "", lines, described)
    described[0] = "programs written for torch.distributed.rpc catch RuntimeError"
    width = max(map(len, lines)) + 2
    rows = [f"{line:<{width}}{words}".rstrip() for line, words in zip(lines, described, strict=True)]
    return "```\n" + "\n".join(rows) + "\n```\n"


def grow(kind: type[Exception], indent: str, lines: list[str], described: list[str]) -> None:
    below = [each for each in vars(errors).values() if inspect.isclass(each) and kind in each.__bases__]
    for each in below:
        last = each is below[-1]
        others = [base.__name__ for base in each.__bases__ if base is not kind]
        lines.append(f"{indent}{'└── ' if last else '├── '}{each.__name__}" + (f" ({', '.join(others)})" if others else ""))
        described.append(first_sentence(each.__doc__))
        grow(each, indent + ("    " if last else "│   "), lines, described)


# Settings.


def settings() -> str:
    """The fields of `Settings`, with what its docstring says of each."""
    said = dict(re.findall(r"^ {8}(\w+): (.+)$", Settings.__doc__ or "", re.MULTILINE))
    rows = [(f"`{each.name}`", default(each), said[each.name]) for each in dataclasses.fields(Settings)]
    return table(("setting", "by default", "what it is"), rows)


def default(field: dataclasses.Field[object]) -> str:
    value = field.default
    return f"`{value!r}`" if value is None or isinstance(value, int | float | str) else "the system's"


def variables() -> str:
    """Every environment variable that the source names, and where."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                found.setdefault(node.value, set()).add(str(path.relative_to(SOURCE)))
    rows = [(f"`{name}`", ", ".join(f"`{place}`" for place in sorted(found[name]))) for name in sorted(found)]
    return table(("variable", "read or set in"), rows)


LISTS: dict[str, tuple[str, Callable[[], str]]] = {  # name -> (page, what makes it)
    "layers": ("architecture.md", layers),
    "locks": ("threads.md", locks),
    "errors": ("errors.md", error_tree),
    "settings": ("settings.md", settings),
    "variables": ("settings.md", variables),
}


def written(name: str) -> str | None:
    """The list as its page has it; None if there are no marks."""
    page, _ = LISTS[name]
    found = re.search(f"<!-- {name} -->\n(.*?)<!-- end of {name} -->", (DOCS / page).read_text(), re.DOTALL)
    return found and found[1]


def write(name: str) -> None:
    page, make = LISTS[name]
    text = (DOCS / page).read_text()
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    _, _, after = rest.partition(f"<!-- end of {name} -->")
    (DOCS / page).write_text(f"{before}<!-- {name} -->\n{make()}<!-- end of {name} -->{after}")


if __name__ == "__main__":
    for name in LISTS:
        if written(name) is None:
            raise SystemExit(f"docs/{LISTS[name][0]} has no marks for the list of {name}")
        write(name)
