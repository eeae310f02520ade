"""`python -m remora.launch`: start the worker processes of a program on this host, and supervise them until they end.

    python -m remora.launch -n 4 train.py --lr 0.1
    python -m remora.launch -n 4 --restart on-failure --restarts 10 -m package.module

`remora run` is the same.

Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and REMORA_RESTARTS (how often it
was restarted). The launcher hosts the store and outlives all processes, so that any of them may end and be restarted. It
passes on what several processes print line by line, with the rank before each line.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from remora.supervision import Outcome, RestartPolicy, Supervisor
from remora.supervision.prefixed_output import prefixed
from remora.transport.addresses import WILDCARDS, host_and_port, is_own_address


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0, or that of the first process that failed by itself."""
    parser = argparse.ArgumentParser(
        prog="python -m remora.launch",
        description="Start the worker processes of a program on this host, and supervise them until they end.",
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, and the program."""
    add = parser.add_argument
    names = ("-n", "--nproc-per-node", "--nproc_per_node")  # the longer ones as torchrun has them
    add(*names, dest="n", metavar="N", type=_count, default=1, help="how many processes (1)")
    add("--restart", choices=("never", "on-failure", "always"), default="never", help="when to restart a process (never)")
    add("--restarts", type=int, default=3, help="the most restarts in a row (3)")
    add("--delay", type=float, default=0.5, help="seconds before the first restart; doubled each time (0.5)")
    add("--scope", choices=("one", "all"), default="one", help="restart only the process that ended, or all of them (one)")
    add("--apart", action="store_true", help="when a process has failed for good, let the others run on")
    add("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL (10)")
    add("--host", default="127.0.0.1", help="where the store listens (127.0.0.1)")
    add("--port", type=_port, default=0, help="its port (any that is free)")
    add("-m", dest="module", action="store_true", help="the program is a module")
    add("program", help="a Python file, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER, help="for the program")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"give a number of processes, at least 1, not {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"give a number from 1 to 65535, or 0 for any port that is free, not {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Start the processes and wait for them. Return the exit code. On Ctrl-C they end, and then this process by SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _supervise(options)
    except KeyboardInterrupt:  # the processes have ended, and said so: ours is no news
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        raise


def _host_store(host: str, port: int) -> Any:
    """Host the store where the processes meet. If it cannot be, end with one line that says why."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here: `remora --help` needs none of it

    if host not in WILDCARDS and not is_own_address(host):  # torch would look for itself there for a minute
        raise SystemExit(f"cannot host the store at --host {host}: it is no address or name of this host")
    try:
        return TCPStore(host, port, None, True, timedelta(seconds=60), wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if "EADDRINUSE" in reason:
            reason = "another program has that port. Choose another, or leave --port out"
        raise SystemExit(f"cannot host the store at {host_and_port(host, port)}: {reason}") from None


def _supervise(options: argparse.Namespace) -> int:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    store = _host_store(options.host, options.port)
    policy = RestartPolicy(options.restart, options.restarts, options.delay)
    with ExitStack() as stack:
        out, err = sys.stdout.buffer, sys.stderr.buffer
        several = options.n > 1
        prints = [stack.enter_context(prefixed(f"[{rank}] ", out, err)) if several else None for rank in range(options.n)]
        supervisor = Supervisor(policy, restart=options.scope, together=not options.apart, grace=options.grace)
        stack.enter_context(supervisor)
        for rank, streams in enumerate(prints):
            env = _environment(rank, options.n, options.host, store.port)
            supervisor.start(f"rank {rank}", _command(options), env=env, streams=streams)
        outcomes = supervisor.wait()
    return _exit_code(list(outcomes.values()))


def _command(options: argparse.Namespace) -> list[str]:
    return [sys.executable, "-u", *(["-m"] if options.module else []), options.program, *options.arguments]


def _environment(rank: int, size: int, host: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # PyTorch's word for: rank 0 does not host the store
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as its launcher does
    }


def _exit_code(outcomes: list[Outcome]) -> int:
    failed = [outcome.code for outcome in outcomes if outcome.code != 0]
    by_itself = [outcome.code for outcome in outcomes if outcome.code != 0 and not outcome.ended]
    code = (by_itself or failed or [0])[0]
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
