"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks import against, instructions, observed, paths, report, runner, trees
from benchmarks.contestants import CONTESTANTS, REMORA, Contestant
from benchmarks.measure import Benchmark
from benchmarks.results import Results
from benchmarks.suite import SUITE

WIDTH = 120  # of what is not printed to a terminal
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    arguments = parse()
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if arguments.instructions:
        os.environ.update(instructions.ENVIRONMENT)  # before any process is started
    if arguments.against:
        return compare(arguments, console)
    if arguments.paths is not None:
        return weigh(arguments, console)
    if arguments.redraw:
        results = report.read(arguments.redraw)
    else:
        results = measure(arguments, console)
        path = arguments.results / time.strftime("%Y%m%d-%H%M%S.json")
        report.write(results, path)
        written(path, console)
    report.show(results, arguments.suite, console)
    if not arguments.instructions:
        draw(results, arguments.results, console)
    return 1 if REMORA.name in results.failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and calls: a look, not a measurement")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often each contestant has its turn")
    names = ", ".join(benchmark.name for benchmark in SUITE)
    parser.add_argument("--only", action="append", metavar="NAME", help=f"may be given again; of {names}")
    who = [each.name for each in CONTESTANTS]
    parser.add_argument("--who", choices=who, action="append", metavar="NAME", help=f"the same; of {', '.join(who)}")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="for JSON and plots")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="tables and plots of an earlier run, from its JSON")
    words = "another revision beside the working tree, turn by turn, instead of the contestants"
    parser.add_argument("--against", metavar="REV", help=words)
    words = f"count what calls cost, in place of time; of {', '.join(each.name for each in instructions.SUITE)}"
    parser.add_argument("--instructions", action="store_true", help=words)
    words = "what each fast path alone is worth, turn by turn, instead of the contestants; or what these are worth"
    parser.add_argument("--paths", nargs="*", choices=[*paths.names(), *paths.PRICES], metavar="PATH", help=words)
    arguments = parser.parse_args()
    arguments.suite = SUITE if arguments.paths is None else paths.SUITE
    if arguments.instructions:
        arguments.suite = instructions.SUITE
    if "observer" in (arguments.paths or []):
        arguments.suite = observed.SUITE
        if len(arguments.paths) > 1 or arguments.instructions:
            parser.error("--paths observer has benchmarks of its own: name it alone, without --instructions")
    try:
        arguments.only = arguments.only and [find(name, arguments.suite) for name in arguments.only]
    except LookupError as error:
        parser.error(f"argument --only: {error}")
    if arguments.instructions and (arguments.who or arguments.redraw):
        parser.error("--instructions is of Remora alone: it goes with --against, --only, --rounds, --quick and --results")
    if arguments.against and (arguments.who or arguments.redraw):
        parser.error("--against compares two trees of Remora: it goes with --only, --rounds, --quick and --results")
    if arguments.paths is not None and (arguments.who or arguments.redraw or arguments.against):
        parser.error("--paths is of this tree alone: it goes with --instructions, --only, --rounds, --quick and --results")
    for benchmark in arguments.only or [] if arguments.against else []:
        if REMORA not in benchmark.contestants:
            parser.error(f"--against: {benchmark.name} measures the machine, which is the same for both trees")
    return arguments


def find(name: str, suite: Sequence[Benchmark]) -> Benchmark:
    """The benchmark of that name."""
    for benchmark in suite:
        if benchmark.name == name:
            return benchmark
    raise LookupError(f"no benchmark is called {name!r}")


def measure(arguments: argparse.Namespace, console: Console) -> Results:
    contestants, benchmarks = present(arguments.who, console), arguments.only or chosen(arguments, console)
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    with saying(console) as say:
        return runner.run(benchmarks, contestants, rounds=rounds, quick=arguments.quick, say=say)


def compare(arguments: argparse.Namespace, console: Console) -> int:
    """Two trees of Remora."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, unwind)
    benchmarks = [each for each in arguments.only or chosen(arguments, console) if REMORA in each.contestants]
    found = against.Comparison(arguments.against)
    try:
        with trees.checked_out(arguments.against) as packages, saying(console) as say:
            against.run(benchmarks, packages, found, rounds=arguments.rounds, quick=arguments.quick, say=say)
    except trees.NoSuchTree as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    finally:  # what was found before Ctrl-C is shown, too
        if found.changes or found.notes:
            path = arguments.results / time.strftime("%Y%m%d-%H%M%S-against.json")
            report.write_changes(found, path)
            written(path, console)
            report.show_changes(found, arguments.suite, console)
    return 1 if any(who == against.NOW for _, who in found.notes) else 0


def weigh(arguments: argparse.Namespace, console: Console) -> int:
    """Each fast path, with it and without it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, unwind)
    benchmarks = arguments.only or arguments.suite
    found: list[against.Comparison] = []
    try:
        with saying(console) as say:
            for path in arguments.paths or paths.names():
                found.append(against.Comparison(path))
                paths.run(path, benchmarks, found[-1], rounds=arguments.rounds, quick=arguments.quick, say=say)
    finally:  # what was found before Ctrl-C is shown, too
        if any(each.changes or each.notes for each in found):
            file = arguments.results / time.strftime("%Y%m%d-%H%M%S-paths.json")
            report.write_paths(found, file)
            written(file, console)
            report.show_paths(found, arguments.suite, console)
    return 1 if any(each.notes for each in found) else 0


def unwind(number: int, _: object) -> None:
    """Leave every context manager, so that processes and folders go."""
    sys.exit(128 + number)


@contextmanager
def saying(console: Console) -> Iterator[Callable[[str], None]]:
    """What tells the user how far it is."""
    with console.status("starting") as status:
        yield status.update if console.is_terminal else lambda text: print(text, file=sys.stderr)


def written(path: Path, console: Console) -> None:
    console.print(f"Written to {path}", style="dim", soft_wrap=True)


def present(names: list[str] | None, console: Console) -> list[Contestant]:
    """Those that are wanted and can be measured here; the others are named."""
    wanted = [each for each in CONTESTANTS if names is None or each.name in names]
    absent = {each: reason for each in wanted if (reason := each.why_absent()) is not None}
    for each, reason in absent.items():
        console.print(f"Without {each.name}: {reason}", style="yellow", markup=False)
    return [each for each in wanted if each not in absent]


def chosen(arguments: argparse.Namespace, console: Console) -> list[Benchmark]:
    """All of the suite, or all that are quick."""
    left_out = [each for each in arguments.suite if arguments.quick and each.slow]
    for each in left_out:
        console.print(f"Without {each.name}: too slow for a quick run", style="yellow")
    return [each for each in arguments.suite if each not in left_out]


def draw(results: Results, folder: Path, console: Console) -> None:
    try:
        from benchmarks import plots
    except ImportError as error:
        console.print(f"Without plots: {error} (pip install 'remora[bench]')", style="yellow", markup=False)
        return
    for path in plots.draw(results, folder):
        console.print(f"Drawn {path}", style="dim", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
