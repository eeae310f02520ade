"""From nothing to the first answer: two fresh processes import the module, form a group, and call each other."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from benchmarks.measure import Reading, Setting, Unit

TIMEOUT = 120.0


def measure(setting: Setting) -> list[Reading]:
    with tempfile.TemporaryDirectory() as folder:
        workers = [_launch(setting.module, f"file://{folder}/store", rank) for rank in (0, 1)]
        try:
            output, *_ = [worker.communicate(timeout=TIMEOUT)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a worker ended with {[worker.returncode for worker in workers]}")
    return [Reading(step, seconds, Unit.SECONDS) for step, seconds in json.loads(output).items()]


def _launch(module: str, init_method: str, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_call", module, init_method, str(rank)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
