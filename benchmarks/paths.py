"""What each fast path alone is worth: `make bench ARGS=--paths`, and without the noise of times, `"--paths --instructions"`.

`"--paths recorder"` tells in the same way what the recorder costs, and `"--paths observer"` what it costs to be observed
(`benchmarks.observed`).

The working tree takes turns with itself, one side without the fast path (`benchmarks.against` has the statistics). The ratio
of a pair is the number with it by the number without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import observed
from benchmarks.against import BEFORE, NOW, Comparison, Say, alternate
from benchmarks.contestants import REMORA
from benchmarks.measure import Benchmark
from benchmarks.side import Side
from benchmarks.suite import add, echo, flight, noop, reference, training
from benchmarks.trees import ROOT, compile_all

SUITE = [
    Benchmark("noop", "rpc_sync no-op", noop.measure, contestants=(REMORA,)),
    Benchmark("add", "rpc_sync torch.add", add.measure, contestants=(REMORA,)),
    Benchmark("burst", "5,000 rpc_async at once", flight.measure, contestants=(REMORA,)),
    Benchmark("in-flight", "16 calls kept in flight", flight.sixteen, contestants=(REMORA,)),
    Benchmark("reference", "remote() + to_here()", reference.measure, contestants=(REMORA,)),
    Benchmark("echo-1-mb", "echo of 1 MB", echo.one_megabyte, contestants=(REMORA,)),
    Benchmark("training", "one training step", training.measure, contestants=(REMORA,)),
]


# These are no fast paths: they are measured only if they are named.
PRICES = {"recorder": ("REMORA_RECORDER", "0"), "observer": (observed.VARIABLE, "0")}


def names() -> list[str]:
    """Of all fast paths."""
    from remora.options import FastPaths

    return list(FastPaths.turned_off())


def run(
    path: str, benchmarks: Sequence[Benchmark], found: Comparison, *, rounds: int | None, quick: bool, say: Say
) -> None:
    """Measure everything with this fast path and without it, and enter it in `found`."""
    from remora.options import FastPaths

    packages = ROOT / "src"
    compile_all(packages)
    with Side(packages) as on, Side(packages, dict([(FastPaths.turned_off() | PRICES)[path]])) as off:
        sides = {NOW: on, BEFORE: off}
        alternate(benchmarks, sides, found, rounds=rounds, quick=quick, say=lambda text: say(f"{path} · {text}"))
