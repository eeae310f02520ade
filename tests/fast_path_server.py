"""Runs `tests.fast_path_scenario` again and again, each time with other variables in the environment.

Remora reads them when it is imported, and to import torch takes seconds. So this process imports torch and not Remora, and
forks a process for each line of its standard input: a folder, and variables. It answers each with one line.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import torch.distributed.rpc
import torch.nn  # noqa: F401


def main() -> None:
    assert "remora" not in sys.modules
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(*json.loads(line))
        os.waitpid(child, 0)


def run(folder: str, variables: dict[str, str]) -> None:
    """In a process of its own."""
    os.environ.update(variables)
    answer: dict[str, object] = {}
    try:
        from tests import fast_path_scenario

        answer["off"] = fast_path_scenario.run(folder)
    except BaseException:
        answer["error"] = traceback.format_exc()
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
