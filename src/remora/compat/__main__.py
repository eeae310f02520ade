"""Runs a program that was written for torch.distributed.rpc on Remora, as Python would run it.

    python -m remora.compat script.py args…
    python -m remora.compat -m module args…
    python -m remora.compat --check script.py…

The program gets an interpreter of its own, so that it is __main__ and finds everything as if Python had started it
directly. With --check it is read and not run: the report lists the names of torch's RPC that it uses, and those that Remora
lacks (exit code 1 if there are any).
"""

from __future__ import annotations

import os
import subprocess
import sys

from remora.compat import children


def main(arguments: list[str]) -> int:
    """Run the command line. Does not return if that is a program."""
    if arguments[:1] == ["--check"] and len(arguments) > 1:
        from remora.compat import check

        return check.main(arguments[1:])
    if not arguments or arguments[0] in ("-h", "--help", "--check"):
        print(__doc__)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    if sys.flags.ignore_environment or sys.flags.no_site:
        print("remora.compat sets environment variables for the program: start it without -E, -I and -S", file=sys.stderr)
        return 2
    return _run([sys.executable, *_interpreter_options(), *arguments])


def _run(command: list[str]) -> int:
    environment = dict(os.environ)
    children.mark(environment)
    if sys.platform == "win32":  # what it calls exec returns to the shell at once
        return subprocess.call(command, env=environment)
    sys.stdout.flush()
    return os.execve(command[0], command, environment)


def _interpreter_options() -> list[str]:
    """Return the options between `python` and `-m remora.compat`."""
    before = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return before[1:-2] if before[-2:] == ["-m", "remora.compat"] else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
