"""From nothing to the first answer: two fresh processes import the module, form a group, and one calls the other."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile

from benchmarks.measure import Reading, Setting, Unit, time_all

TIMEOUT = 120.0


def measure(setting: Setting) -> list[Reading]:
    with tempfile.TemporaryDirectory() as folder:
        workers = [_launch(setting.contestant.module, f"file://{folder}/store", rank) for rank in (0, 1)]
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
    code = f"from benchmarks.suite.startup import start; start({module!r}, {init_method!r}, {rank})"
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True)


def start(module: str, init_method: str, rank: int) -> None:
    """Runs in each of the two processes, and prints what each step took."""
    importing = time_all(lambda: importlib.import_module(module))
    rpc = importlib.import_module(module)
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)

    def join() -> None:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    joining = time_all(join)
    calling = time_all(lambda: rpc.rpc_sync(f"worker{1 - rank}", abs, args=(-1,)))
    rpc.shutdown()
    print(json.dumps({"import": importing, "init_rpc": joining, "first call": calling}))
