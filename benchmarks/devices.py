"""Tensors on a GPU, beside torch.distributed.rpc: `python -m benchmarks.devices [--over-host] [--rounds N] [--json FILE]`.

With `--over-host` nothing is lent: they go by TCP, by a Unix socket or by shared memory. Beside it stands what tensors of
the host take by the same road, and what the two copies take by themselves, from the device to pinned memory and back.

Two processes on one device, started afresh for each turn, and never those of both at once: threads of torch's that wait for
messages keep cores busy. Apart from the other benchmarks, because it needs a GPU and nothing else of theirs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

CONTESTANTS = {
    "remora": ("remora.rpc", "RemoraRpcBackendOptions"),
    "torch": ("torch.distributed.rpc", "TensorPipeRpcBackendOptions"),
}
# How to have tensors go over the host. TensorPipe has no Unix sockets; its transport by shared memory is the nearest to it.
LENT = ""
ROADS: dict[str, dict[str, dict[str, Any]]] = {
    LENT: {"remora": {}, "torch": {}},
    "TCP": {
        "remora": {"device_memory": 0, "shared_memory": 0, "transports": ["tcp"]},
        "torch": {"_transports": ["uv"], "_channels": ["basic", "cuda_basic"]},
    },
    "Unix socket": {
        "remora": {"device_memory": 0, "shared_memory": 0, "transports": ["unix"]},
        "torch": {"_transports": ["shm", "uv"], "_channels": ["basic", "cuda_basic"]},
    },
    "shared memory": {
        "remora": {"device_memory": 0},
        "torch": {"_transports": ["shm", "uv"], "_channels": ["cma", "basic", "cuda_basic"]},
    },
}
TIMEOUT = 90.0  # of one turn of one of them
# What we want: how many times as fast. A call that has returned has delivered nothing yet, so that alone is no goal.
GOALS = {"no-op": 8.0, "1 MB, tensor there": 2.0, "256 MB, tensor there": 5.0, "1000 MB, tensor there": 5.0}

_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(["torch", "torch.distributed.rpc", "remora.rpc"])


@dataclass(frozen=True)
class Place:
    """What a worker process is told."""

    contestant: str
    road: str
    rank: int
    init_method: str


class Pair:
    """Two workers of one contestant; worker0 measures when asked to."""

    def __init__(self, contestant: str, road: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="remora-devices-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(2):
            ours, theirs = _fork.Pipe()
            place = Place(contestant, road, rank, f"file://{self._folder.name}/store")
            process = _fork.Process(target=_live, args=(place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def measure(self) -> list[tuple[str, float]]:
        self._pipes[0].send("measure")
        if not self._pipes[0].poll(TIMEOUT):
            raise RuntimeError(f"no answer within {TIMEOUT:g} s")
        answer: list[tuple[str, float]] | str = self._pipes[0].recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def end(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send("end")
            except OSError:  # it has ended by itself
                pass
        for process in self._processes:
            process.join(30.0)
            process.kill()
            process.join()
        self._folder.cleanup()


def _live(place: Place, pipe: Connection) -> None:
    """The life of a worker."""
    warnings.simplefilter("ignore")
    module, options_class = CONTESTANTS[place.contestant]
    rpc = importlib.import_module(module)
    options = getattr(rpc, options_class)(
        init_method=place.init_method,
        device_maps={f"worker{1 - place.rank}": {0: 0}},
        **ROADS[place.road][place.contestant],
    )
    rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=2, rpc_backend_options=options)
    while pipe.recv() == "measure":
        pipe.send(_attempt(rpc, place.road))
    rpc.shutdown()


def _attempt(rpc: Any, road: str) -> list[tuple[str, float]] | str:
    from benchmarks.suite import device

    try:
        return list(device.measure(rpc, "worker1") if road == LENT else device.over_host(rpc, "worker1", road))
    except Exception:
        return traceback.format_exc()


def run(rounds: int, roads: list[str]) -> dict[str, dict[str, list[float]]]:
    """Seconds, by metric and contestant: one of each for each round."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name in list(CONTESTANTS) if number % 2 == 0 else list(CONTESTANTS)[::-1]:
            for road in roads:
                print(f"round {number + 1} of {rounds}: {name} {road}", file=sys.stderr, flush=True)
                for metric, seconds in _turn(name, road):
                    found.setdefault(metric, {}).setdefault(name, []).append(seconds)
    return found


def _turn(name: str, road: str) -> list[tuple[str, float]]:
    pair = Pair(name, road)
    try:
        return pair.measure()
    except (RuntimeError, EOFError, OSError) as error:
        if name == "remora" or road == LENT:
            raise
        print(f"{name} cannot do this by {road}: {error}", file=sys.stderr)  # its channels are not on every machine
        return []
    finally:
        pair.end()


def show(found: dict[str, dict[str, list[float]]]) -> None:
    """The medians of the rounds, and how many times as fast."""
    print(f"{'':<32}{'remora':>12}{'torch':>12}{'ratio':>8}   goal")
    for metric, by_name in found.items():
        ours = statistics.median(by_name["remora"])
        if "torch" not in by_name:
            print(f"{metric:<32}{_words(ours):>12}")
            continue
        theirs = statistics.median(by_name["torch"])
        ratio = theirs / ours
        print(f"{metric:<32}{_words(ours):>12}{_words(theirs):>12}{ratio:>7.1f}x   {_verdict(metric, ratio)}")


def _verdict(metric: str, ratio: float) -> str:
    goal = GOALS.get(metric)
    return "" if goal is None else f"{goal:g}x {'met' if ratio >= goal else 'MISSED'}"


def _words(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each has its turn (default: 3)")
    parser.add_argument("--over-host", action="store_true", help="lend nothing: by sockets, and by shared memory")
    parser.add_argument("--json", metavar="FILE", help="write every number there")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.device_count():
        print("There is no CUDA device here.")
        return 1
    found = run(arguments.rounds, [road for road in ROADS if road != LENT] if arguments.over_host else [LENT])
    show(found)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"torch": torch.__version__, "seconds": found}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
