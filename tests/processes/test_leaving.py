"""Who leaves a dynamic group takes nobody with it."""

from __future__ import annotations

from typing import Any

import pytest

from remora import rpc
from tests.processes import targets, witness
from tests.workers import Workers

A_WHILE = 0.5  # seconds; to dial takes less

held: list[rpc.RRef[Any]] = []


def hold() -> None:
    held.append(rpc.remote("worker1", targets.process_id))
    held[0].to_here()


@pytest.mark.timeout(60)
def test_who_has_heard_a_farewell_is_not_taken_for_dead_while_others_have_not() -> None:
    """It hangs up. Who leaves did not lose it, and must not tell those who stay that it did."""
    with Workers(3, join=False) as workers:
        for rank in range(3):
            workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, workers.init_method)
        workers.run_all(witness.listen)
        workers.run(0, hold)  # so that worker1, if it lost worker0, would ask the others about it
        assert workers.run(1, targets.call, "worker2", targets.double, 2) == 4
        targets.freeze(workers, 2)
        leaving = workers.start(1, targets.leave)
        witness.wait_for(workers, 0, "Left", "worker1")
        targets.nap(A_WHILE)
        workers.cont(2)
        leaving.result(10.0)
        witness.wait_for(workers, 2, "Left", "worker1")
        assert workers.run(2, targets.call, "worker0", targets.double, 2) == 4
        assert workers.run(0, targets.call, "worker2", targets.double, 2) == 4
        for rank, other in ((0, "worker2"), (1, "worker0"), (2, "worker0")):
            assert "Died" not in workers.run(rank, witness.kinds, other)
        assert "lost" not in workers.output(1)
        for rank in (0, 2):
            workers.run(rank, targets.leave)
