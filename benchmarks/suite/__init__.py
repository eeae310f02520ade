"""All benchmarks, in the order of the table. To add one: a file beside this one, and a line here."""

from __future__ import annotations

from benchmarks.measure import Benchmark
from benchmarks.suite import add, callers, echo, flight, floor, noop, reference, startup, training

SUITE = [
    Benchmark("ping-pong", "floor: ping-pong", floor.ping_pong, workers=0, contestants=False),
    Benchmark("memcpy", "floor: memory copy", floor.memcpy, workers=0, contestants=False),
    Benchmark("noop", "rpc_sync no-op", noop.measure),
    Benchmark("noop-tcp", "rpc_sync no-op, TCP", noop.measure, transport="tcp"),
    Benchmark("add", "rpc_sync torch.add", add.measure),
    Benchmark("flight", "5,000 rpc_async at once", flight.measure),
    Benchmark("callers", "8 callers, one callee", callers.measure, workers=9),
    Benchmark("echo", "echo of a tensor", echo.measure),
    Benchmark("reference", "remote() + to_here()", reference.measure),
    Benchmark("training", "one training step", training.measure),
    Benchmark("startup", "start-up", startup.measure, workers=0),
]
