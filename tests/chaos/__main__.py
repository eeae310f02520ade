"""`python -m tests.chaos --seconds 60`: run the story, print the account, fail if it does not add up."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys

from tests import hosts
from tests.chaos import fate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--without-hosts", action="store_true", help="all workers on this host: no cables to cut")
    options = parser.parse_args()
    if hosts.why_not():
        print(f"no cables are cut: {hosts.why_not()}")
    said = io.StringIO()  # by the workers: long, and of interest only if something is wrong
    with contextlib.redirect_stdout(said):
        account = fate.run(options.seconds, options.seed, False if options.without_hosts else None)
    complaints = account.complaints()
    print(said.getvalue() if complaints else "", account, *complaints[:20], sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
