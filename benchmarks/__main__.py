"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks import report, runner
from benchmarks.contestants import CONTESTANTS, Contestant
from benchmarks.measure import Benchmark
from benchmarks.suite import SUITE

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    arguments = parse()
    console = Console()
    contestants = present(console)
    with console.status("starting") as status:
        results = runner.run(
            arguments.only or SUITE,
            contestants,
            rounds=arguments.rounds or (2 if arguments.quick else 5),
            quick=arguments.quick,
            say=status.update if console.is_terminal else lambda text: print(text, file=sys.stderr),
        )
    report.show(results, SUITE, console)
    console.print(f"Written to {report.write(results, RESULTS)}", style="dim", soft_wrap=True)
    return 1 if results.failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and calls: a look, not a measurement")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often each contestant has its turn")
    names = ", ".join(benchmark.name for benchmark in SUITE)
    parser.add_argument("--only", type=find, action="append", metavar="NAME", help=f"may be given again; of {names}")
    return parser.parse_args()


def find(name: str) -> Benchmark:
    """The benchmark of that name."""
    for benchmark in SUITE:
        if benchmark.name == name:
            return benchmark
    raise argparse.ArgumentTypeError(f"no benchmark is called {name!r}")


def present(console: Console) -> list[Contestant]:
    """Those that can be measured here; the others are named."""
    absent = {each: reason for each in CONTESTANTS if (reason := each.why_absent()) is not None}
    for each, reason in absent.items():
        console.print(f"Without {each.name}: {reason}", style="yellow")
    return [each for each in CONTESTANTS if each not in absent]


if __name__ == "__main__":
    sys.exit(main())
