"""The entry of the command: finds the verb, runs it, turns errors into one line and an exit code."""

from __future__ import annotations

import difflib
import io
import os
import sys
from collections.abc import Sequence

from remora import __version__
from remora.command.text import clean
from remora.command.usage_errors import UsageError
from remora.command.verbs import VERBS, load, parser_of
from remora.errors import RemoraError

FINE, WRONG, USAGE = 0, 1, 2
INTERRUPTED = 130  # as a shell says of a command that SIGINT ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # it was closed by the one who started us: there is no reader
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack letters that names have
    try:
        return _run(words)
    except (UsageError, RemoraError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_has_gone()
        _complain(str(error))
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return FINE if words else USAGE
    if words[0] == "--version":
        print(f"remora {__version__}")
        return FINE
    if words[0] not in VERBS:
        close = difflib.get_close_matches(words[0], VERBS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "`remora --help` lists them."
        raise UsageError(f"there is no verb {words[0]!r}. {hint}")
    verb = load(words[0])
    code = verb.run(parser_of(verb).parse_args(words[1:]))
    sys.stdout.flush()  # here, where a reader that has gone is no error
    return code


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {load(name).HELP}" for name in VERBS]
    return "\n".join(
        [
            "usage: remora VERB [options]",
            "",
            "Shows what the workers of a group do, starts them, and checks hosts.",
            "",
            *lines,
            "",
            "`remora VERB --help` says more, with an example. Without --at, the groups of this user on this host are meant.",
            "Exit codes: 0 fine, 1 something is wrong, 2 wrong usage or nothing found.",
        ]
    )


def _complain(text: str) -> None:
    try:
        print(f"remora: {clean(text)}", file=sys.stderr)
    except OSError:
        pass


def _reader_has_gone() -> int:
    """`remora calls | head` ended reading. What is left in the buffer goes nowhere, or the interpreter would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FINE
