"""All benchmarks, in the order of the table. To add one: a file beside this one, and a line here."""

from __future__ import annotations

from benchmarks.contestants import CONTESTANTS, MACHINE, REMORA
from benchmarks.measure import Benchmark
from benchmarks.suite import (
    add,
    bare_training,
    callers,
    echo,
    flight,
    floor,
    idle,
    memory,
    micro_batches,
    nested,
    noop,
    reference,
    startup,
    training,
)

SUITE = [
    Benchmark("ping-pong", "ping-pong of 64 bytes", floor.ping_pong, workers=0, contestants=(MACHINE,)),
    Benchmark("socket-copy", "there and back by socket", floor.socket_copy, workers=0, contestants=(MACHINE,)),
    Benchmark("memcpy", "warm memory copy", floor.memcpy, workers=0, contestants=(MACHINE,)),
    Benchmark(
        "training-floor", "one training step", bare_training.measure, workers=0, contestants=(MACHINE,), bouts=2
    ),
    Benchmark("noop", "rpc_sync no-op", noop.measure, contestants=CONTESTANTS, bouts=3),
    Benchmark("noop-tcp", "rpc_sync no-op, TCP", noop.measure, transport="tcp", bouts=3),
    Benchmark("add", "rpc_sync torch.add", add.measure, bouts=3),
    Benchmark("flight", "5,000 rpc_async at once", flight.measure, contestants=CONTESTANTS, bouts=3),
    Benchmark("concurrency", "calls kept in flight", flight.concurrency, contestants=CONTESTANTS),
    Benchmark("callers", "callers on one callee", callers.measure, workers=callers.MOST + 1, contestants=CONTESTANTS),
    Benchmark("nested", "calls within calls", nested.measure, workers=3),
    Benchmark("echo", "echo of a tensor", echo.measure, contestants=CONTESTANTS),
    Benchmark("echo-tcp", "echo of a tensor, TCP", echo.over_tcp, transport="tcp"),
    Benchmark("reference", "remote() + to_here()", reference.measure, bouts=3),
    Benchmark("references", "100,000 references", reference.many, rounds=2, fresh=True),
    Benchmark("training", "one training step", training.measure, bouts=2),
    Benchmark("micro-batches", "backward through many calls", micro_batches.measure, rounds=3, fresh=True),
    Benchmark("micro-batches-back", "the same, and back", micro_batches.measure_back, rounds=3, fresh=True),
    Benchmark("startup", "start-up", startup.measure, workers=0),
    Benchmark("memory", "memory held by echoes", memory.measure, rounds=2, fresh=True),
    Benchmark("idle", "a worker at rest", idle.measure, rounds=2),
    # Of torch.distributed.rpc, 51 workers do not start on a machine with two cores: each polls its shared memory.
    Benchmark(
        "idle-50", "the same, 50 peers", idle.measure, workers=51, contestants=(REMORA,), rounds=1, slow=True, fresh=True
    ),
]
