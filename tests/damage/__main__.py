"""`python -m tests.damage`: damage after damage for half an hour; or with a file of an earlier search, that damage again."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.damage import trials
from tests.damage.hunt import Finding, Hunt
from tests.damage.subject import Subject


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.replay:
        return _replay(options.replay)
    hunt = Hunt(options.seed, options.seconds, options.folder, lambda text: print(text, flush=True))
    begun = time.monotonic()
    well = hunt.run(tuple(options.only))
    print(f"seed {options.seed}, {time.monotonic() - begun:.0f} s: {dict(hunt.tried)}")
    for outcome, n in hunt.outcomes.most_common():
        print(f"{n:>9}  {outcome}")
    for name, finding in hunt.found.items():
        last = finding.problem.strip().splitlines()[-1][:200]
        print(f"WRONG {hunt.again[name]:>6} times: {options.folder / name}.json: {last}")
    print("nothing was found" if well else f"{len(hunt.found)} findings; again with --replay FILE")
    return 0 if well else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.damage", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, metavar="N", help="how long (default: 1800)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides what is tried (default: 0)")
    parser.add_argument("--folder", type=Path, default=Path("build/damage"), help="where findings go")
    parser.add_argument("--only", nargs="+", choices=["receivers", "workers"], default=["receivers", "workers"])
    parser.add_argument("--replay", nargs="+", type=Path, metavar="FILE", help="findings to try again")
    return parser.parse_args(arguments)


def _replay(paths: list[Path]) -> int:
    wrong = 0
    with Subject(trials.PATIENCE) as subject:
        for path in paths:
            verdict = Finding.read(path).again(subject)
            wrong += bool(verdict.problem)
            print(f"{path}: {verdict}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
