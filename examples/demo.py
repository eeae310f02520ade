"""Four workers on this machine call each other in every way there is, check the answers, and show what it took.

    python examples/demo.py                                # or: make demo
    python examples/demo.py --rpc torch.distributed.rpc    # the same program on PyTorch's RPC
    python examples/demo.py --watch                        # again and again, with the dashboard to look at them
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType

from demo_acts import ACTS, WORKERS, Ledger, Stage
from demo_screen import MovingLine, Screen, Tally

START_TIMEOUT = 60.0
PATIENCE = 30.0  # how long after its time an act may still be busy
REPORT_EVERY = 0.1

_fork = multiprocessing.get_context("forkserver")


class Stop(Exception):
    """The demo cannot go on."""


class Company:
    """The worker processes, and the pipes by which they are told what to do."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._folder = tempfile.TemporaryDirectory(prefix="remora-demo-")
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Company:
        _fork.set_forkserver_preload(["torch", self._module, "demo_acts"])
        try:
            for rank in range(WORKERS):
                self._start(rank)
        except BaseException:
            self._end()
            raise
        return self

    def _start(self, rank: int) -> None:
        ours, theirs = _fork.Pipe()
        process = _fork.Process(target=serve, args=(self._module, rank, self._folder.name, theirs), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def wait_until_joined(self, line: MovingLine) -> None:
        self._ledgers(START_TIMEOUT, line)

    def perform(self, name: str, line: MovingLine) -> Tally:
        """Have all workers play one act."""
        for pipe in self._pipes:
            pipe.send(name)
        return Tally(ACTS[name], self._ledgers(ACTS[name].seconds, line))

    def _ledgers(self, seconds: float, line: MovingLine) -> list[Ledger]:
        """What each worker reports when it is done; until then the line moves."""
        begun, calls = time.monotonic(), dict.fromkeys(self._pipes, 0)
        ledgers: dict[Connection, Ledger] = {}
        while len(ledgers) < WORKERS:
            elapsed = time.monotonic() - begun
            if elapsed > seconds + PATIENCE:
                raise Stop(f"no answer for {elapsed:.0f} s")
            line.update(elapsed / seconds if seconds else 1.0, sum(calls.values()))
            for pipe in wait([pipe for pipe in self._pipes if pipe not in ledgers], REPORT_EVERY):
                assert isinstance(pipe, Connection)
                report = _receive(pipe)
                if isinstance(report, Ledger):
                    ledgers[pipe] = report
                else:
                    calls[pipe] = report
        return [ledgers[pipe] for pipe in self._pipes]

    def watch(self) -> tuple[subprocess.Popen[str], str]:
        """Start the dashboard of this group. Return its process and its address."""
        command = [sys.executable, "-m", "remora", "dashboard", "--at", f"file://{self._folder.name}/meeting"]
        dashboard = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert dashboard.stdout is not None
        address = dashboard.stdout.readline().strip()
        if not address:
            dashboard.wait()
            raise Stop("the dashboard did not start; is it installed? pip install 'remora[dashboard]'")
        return dashboard, address

    def leave(self) -> None:
        """All workers shut down together."""
        for pipe in self._pipes:
            pipe.send(None)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(PATIENCE)
            if process.exitcode != 0:
                _receive(pipe)  # its last words
                raise Stop(f"a worker ended with {process.exitcode}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Stop):
            for log in sorted(Path(self._folder.name).glob("*.log")):
                sys.stderr.write(log.read_text())
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _receive(pipe: Connection) -> Ledger | int:
    try:
        report: Ledger | int | str = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise Stop("a worker died") from None
    if isinstance(report, str):
        raise Stop(report)
    return report


def serve(module: str, rank: int, folder: str, pipe: Connection) -> None:
    """The life of one worker process."""
    # A worker tells its stderr of every exception it sends away; here that would run through the picture.
    os.dup2(os.open(f"{folder}/worker{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    warnings.simplefilter("ignore")  # torch.distributed.rpc warns of its own use of deprecated things
    try:
        rpc = importlib.import_module(module)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meeting")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
        pipe.send(Ledger())
        while (name := pipe.recv()) is not None:
            pipe.send(play(name, module, rank, pipe))
        rpc.shutdown()
    except Exception:
        pipe.send(f"worker{rank}: {traceback.format_exc()}")
        sys.exit(1)


def play(name: str, module: str, rank: int, pipe: Connection) -> Ledger:
    """One act on one worker, with a word to the parent every now and then."""
    ledger, done = Ledger(), threading.Event()

    def report() -> None:
        while not done.wait(REPORT_EVERY):
            pipe.send(len(ledger.latencies))

    reporter = threading.Thread(target=report)
    reporter.start()
    try:
        ACTS[name].run(Stage(module, rank, time.monotonic() + ACTS[name].seconds), ledger)
    finally:
        done.set()
        reporter.join()
    return ledger


def show(screen: Screen, module: str) -> bool:
    """The whole demo; True if every answer was right."""
    begun, tallies = time.monotonic(), []
    screen.title("Remora", f"four workers on this machine, calling by {module}")
    with Company(module) as company:
        with screen.moving_line("starting") as line:
            company.wait_until_joined(line)
        screen.done("four workers found each other", f"{time.monotonic() - begun:.1f} s")
        for name, act in ACTS.items():
            with screen.moving_line(act.title) as line:
                tally = company.perform(name, line)
            tallies.append(tally)
            tell(screen, tally)
        company.leave()
    screen.done("all four left together", f"{time.monotonic() - begun:.1f} s in all")
    screen.table([tally for tally in tallies if not tally.shown])
    return not any(tally.wrong for tally in tallies)


def show_in_dashboard(screen: Screen, module: str) -> bool:
    """Play all acts again and again until Ctrl-C; True if every answer was right."""
    screen.title("Remora", f"four workers on this machine, calling by {module}")
    wrong = 0
    with Company(module) as company:
        with screen.moving_line("starting") as line:
            company.wait_until_joined(line)
        dashboard, address = company.watch()
        with dashboard:
            try:
                screen.done("see them in a browser", address)
                while True:
                    for name, act in ACTS.items():
                        with screen.moving_line(act.title) as line:
                            wrong += len(company.perform(name, line).wrong)
            except KeyboardInterrupt:
                return not wrong
            finally:
                dashboard.terminate()


def tell(screen: Screen, tally: Tally) -> None:
    calls = len(tally.latencies)
    if tally.wrong:
        screen.done(tally.act.title, f"{len(tally.wrong)} wrong, the first: {tally.wrong[0][:200]}", well=False)
    elif tally.shown:
        screen.done(tally.act.title, "worker0 called average([]) on worker2 and got:")
    else:
        screen.done(tally.act.title, f"{calls:,} calls, every answer checked")
    if tally.shown:
        screen.traceback("what worker0 sees", tally.shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rpc", default="remora.rpc", metavar="MODULE", help="the module that makes the calls")
    parser.add_argument("--watch", action="store_true", help="show them in the dashboard, and go on until Ctrl-C")
    options, screen = parser.parse_args(), Screen()
    try:
        well = (show_in_dashboard if options.watch else show)(screen, options.rpc)
    except KeyboardInterrupt:
        screen.verdict("Interrupted; the workers have been ended.", well=False)
        return 130
    except Stop as error:
        screen.verdict(f"It went wrong: {error}", well=False)
        return 1
    screen.verdict("Every answer was right." if well else "Some answers were wrong.", well)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
