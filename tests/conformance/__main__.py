"""Runs PyTorch's RPC tests against Remora by hand, or for pytest: this process loads torch once, and forks the rest."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conformance.expectations import Expectations
    from tests.conformance.suites import UpstreamTest
    from tests.conformance.trial import Outcome

# Beyond PyTorch's own timeout, at which it has every process say where it stands.
_GRACE = 20.0


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    _prepare(options.timeout)
    import torch

    from tests.conformance import expectations, report

    gpus = torch.cuda.device_count()
    if options.cuda and not gpus:
        print("There is no CUDA device here.")
        return 1
    expected = expectations.load(gpus=gpus)
    tests, problems = _load_tests(expected)
    chosen = [test for test in tests if test.suite.gpu == options.cuda and re.search(options.k, str(test))] * options.repeat
    started = time.monotonic()
    outcomes = _run(chosen, expected, options)
    problems += [expected.complaint(outcome) for outcome in outcomes if not expected.is_met(outcome)]
    print(report.table(outcomes, expected, time.monotonic() - started))
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems or not chosen else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("-k", metavar="REGEX", default="", help="run the tests in whose Suite.name this is found")
    parser.add_argument("--cuda", action="store_true", help="run the tests for machines with a GPU, in place of the others")
    parser.add_argument("--jobs", type=int, default=3, metavar="N", help="tests at a time (default: 3)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run everything so many times")
    parser.add_argument("--timeout", type=int, default=60, metavar="SECONDS", help="for each test (default: 60)")
    parser.add_argument("--quiet", action="store_true", help="no line for a test that does what is expected")
    return parser.parse_args(arguments)


def _prepare(timeout: int) -> None:
    """Load torch as the tests want it, with Remora in it."""
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(timeout)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # what it prints is a command that does not exist here
    # Ask the management library, not the driver, whether there is CUDA: a process that has the driver cannot fork others.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if importlib.util.find_spec("expecttest") is None:
        sys.path.append(str(Path(__file__).with_name("stand_in")))
    import remora.compat

    remora.compat.install(children=False)  # the processes of the tests are forked


def _load_tests(expected: Expectations) -> tuple[list[UpstreamTest], list[str]]:
    """The tests of every suite that is not listed as absent, and what is wrong with the list."""
    from tests.conformance.suites import SUITES

    tests: list[UpstreamTest] = []
    problems: list[str] = []
    for suite in SUITES:
        try:
            tests += suite.tests() if suite.name not in expected.absent else []
        except ImportError as error:
            problems.append(f"{suite.name} cannot be imported, and is not listed as absent: {error}")
    return tests, problems + expected.stale([suite.name for suite in SUITES], map(str, tests))


def _run(tests: list[UpstreamTest], expected: Expectations, options: argparse.Namespace) -> list[Outcome]:
    from tests.conformance import report
    from tests.conformance.trial import run_all

    assert threading.active_count() == 1, f"forking with threads about: {threading.enumerate()}"
    gc.freeze()  # or each of five processes for a test looks at all of torch once more, and so has a copy of it
    outcomes: list[Outcome] = []
    for outcome in run_all([(str(test), test.case) for test in tests], options.jobs, options.timeout + _GRACE):
        outcomes.append(outcome)
        if not (options.quiet and expected.is_met(outcome)):
            print(report.line(len(outcomes), len(tests), outcome, expected), flush=True)
        if not expected.is_met(outcome):
            print(report.story(outcome), flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
