"""The table of verbs. A verb's module is imported when the verb is used, or when help and completion speak of it."""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

VERBS = (
    "ps",
    "calls",
    "refs",
    "links",
    "events",
    "why",
    "stack",
    "top",
    "trace",
    "dump",
    "explain",
    "dashboard",
    "run",
    "doctor",
    "completion",
)


class Verb(Protocol):
    """The names in the module of a verb."""

    NAME: str
    HELP: str  # one line
    EXAMPLE: str  # a command line, or several, that `--help` shows

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int:
        """Do it. Return the exit code."""


def load(name: str) -> Verb:
    """The verb of that name."""
    return cast(Verb, importlib.import_module(f"remora.command.verbs.{name}_verb"))


def parser_of(verb: Verb) -> argparse.ArgumentParser:
    """The parser of the words after `remora VERB`."""
    parser = argparse.ArgumentParser(
        prog=f"remora {verb.NAME}",
        description=verb.HELP,
        epilog=f"example:\n  {verb.EXAMPLE.strip()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_arguments(parser)
    return parser
