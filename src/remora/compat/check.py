"""Checks, without running a program, that Remora has what the program uses of torch's RPC. For people, and for scripts."""

from __future__ import annotations

import pkgutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from remora.compat import replacements
from remora.compat.usage import uses


def main(arguments: list[str]) -> int:
    """Check files, and all files below folders. Return 0 if all is there, 1 if something is not, 2 if a file is
    unreadable."""
    status = 0
    for path in _files(arguments):
        try:
            status = max(status, report(path))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            print(f"{path} cannot be read: {error}", file=sys.stderr)
            status = 2
    return status


def _files(arguments: list[str]) -> Iterator[Path]:
    for path in map(Path, arguments):
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def report(path: Path) -> int:
    """Print what one file uses. Return 1 if Remora lacks any of it."""
    lines: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for use in uses(path.read_text(), str(path)):
        lines[use.name, use.in_script].append(use.line)
    verdicts = {key: what_is_wrong(*key) for key in lines}
    width = max((len(name) for name, _ in lines), default=0)
    print(f"{path}: {_summary(list(verdicts.values()))}")
    for (name, in_script), wrong in verdicts.items():
        where = ", ".join(map(str, sorted(set(lines[name, in_script]))))
        print(f"  {name:<{width}}  {'no: ' + wrong if wrong else 'yes'}  (line {where})")
    return int(any(verdicts.values()))


def _summary(verdicts: list[str]) -> str:
    missing = sum(map(bool, verdicts))
    if not verdicts:
        return "uses nothing of torch's RPC"
    return f"{missing} of {len(verdicts)} names are missing" if missing else f"all {len(verdicts)} names are there"


def what_is_wrong(name: str, in_script: bool) -> str:
    """Return why a name of torch cannot be used on Remora; empty if it can."""
    if in_script:
        return "inside TorchScript, which is compiled to calls of torch's own C++ agent"
    try:
        replacements.find(name)
    except LookupError:
        return "Remora has no such name" if _is_in_torch(name) else "neither Remora nor this torch has such a name"
    return ""


def _is_in_torch(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
