"""Many workers in one process: they act for themselves, rest, end together, and follow one plan and one seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remora import rpc
from remora.devices.maps import Wishes
from remora.errors import CallNotSent, WorkerLost
from remora.testing import faults
from remora.testing.world import World


def my_name() -> str:
    return rpc.get_worker_info().name


def name_of(to: str) -> str:
    return rpc.rpc_sync(to, my_name)


def keep(reference: Any) -> Any:
    return reference


def test_each_worker_acts_for_itself() -> None:
    with World(3) as world:
        assert [world.run(i, name_of, f"worker{(i + 1) % 3}") for i in range(3)] == ["worker1", "worker2", "worker0"]
        assert world.run_all(my_name) == ["worker0", "worker1", "worker2"]
        assert len(world) == 3


def test_options_of_workers_are_given_by_name() -> None:
    maps = {"worker0": {"cpu": "cpu"}}
    with World(1, rpc_timeout=7.0, num_worker_threads=3, heartbeat=0.5, device_maps=maps) as world:
        assert (world.timeout, world[0].agent.caller.timeout, world[0].agent.pool.limit) == (7.0, 7.0, 3)
        assert world[0].get_device_map("worker0") == {torch.device("cpu"): torch.device("cpu")}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"threads": 0}, "num_worker_threads must be positive, got 0"),
        ({"timeout": -1.0}, "rpc_timeout must not be negative, got -1"),
        ({"heartbeatt": 1.0}, "unknown option 'heartbeatt'"),
        ({"devices": lambda rank: {0: Wishes()}[rank]}, "^1$"),
    ],
)
def test_those_that_make_no_sense_are_refused_at_once(options: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError), match=problem):
        World(2, **{"timeout": 1.0, **options}).close()


def test_what_is_under_way_is_told_in_words() -> None:
    with World(2) as world:
        reference = world.run(0, rpc.remote, "worker1", my_name)
        assert reference.to_here() == "worker1"
        assert "worker0: references held 1" in world.unrest()
        del reference
        world.wait_until(lambda: not world.unrest())


def test_all_workers_can_shut_down_together() -> None:
    with World(3) as world:
        world.run(0, name_of, "worker1")
        world.shutdown(timeout=10)
        assert not any(worker.agent.running for worker in world.workers)


def test_a_worker_that_was_killed_is_gone_for_the_others() -> None:
    with World(2) as world:
        world.run(0, name_of, "worker1")
        world.kill(1)
        world.kill(1)  # once is enough
        with pytest.raises((WorkerLost, CallNotSent), match="worker1"):
            world.run(0, name_of, "worker1")
        assert world.run_all(my_name) == ["worker0"]


def test_a_plan_may_kill_at_once() -> None:
    with World(2, faults="kill worker1") as world:
        world.wait_until(lambda: not world[1].agent.running)


def test_a_plan_may_kill_at_a_time_though_nobody_speaks() -> None:
    with World(2, faults="kill worker1 at 50ms") as world:
        assert world[1].agent.running
        world.wait_until(lambda: not world[1].agent.running)


def test_the_seed_decides_what_is_left_to_chance() -> None:
    def unlucky(seed: int) -> list[int]:
        with World(2, faults="fail PYTHON_CALL * p=0.5", seed=seed) as world:
            return [i for i in range(20) if fails(world)] + [world.random.randrange(1000)]

    def fails(world: World) -> bool:
        try:
            world.run(0, name_of, "worker1")
        except CallNotSent:
            return True
        return False

    assert unlucky(1) == unlucky(1)
    assert unlucky(1) != unlucky(2)


def test_it_does_so_for_plans_that_are_set_later_as_well() -> None:
    with World(1, seed=7) as world:
        world.faults.set("fail PYTHON_CALL * p=0.5; seed 3")
        assert world.faults.plan.seed == 7
        world.run(0, faults.set, "fail PYTHON_CALL * p=0.5")
        assert world.faults.plan.seed == 7


def test_the_functions_of_faults_act_for_the_worker_they_are_called_on() -> None:
    with World(2, faults="") as world:
        world.run(0, faults.set, "fail PYTHON_CALL worker0->worker1 1")
        with pytest.raises(CallNotSent):
            world.run(0, name_of, "worker1")
        assert [record.deed for record in world.run(1, faults.report).records] == ["fail"]
        assert world.run(0, name_of, "worker1") == "worker1"
        assert sum(world.run(0, faults.messages).values()) == 3  # the name of the function, the request, the answer
        world.run(0, faults.set, "cut *")
        world.run(0, faults.heal)
        assert world.run(0, name_of, "worker1") == "worker1"
        world.run(0, faults.clear)
        assert not world.faults.plan


def test_they_give_the_world_a_plan_if_it_has_none() -> None:
    with World(2) as world:
        world.run(1, faults.set, "fail PYTHON_CALL * 1; kill worker1 after 1 PYTHON_RET")  # (of this process nobody dies)
        with pytest.raises(CallNotSent):
            world.run(0, name_of, "worker1")
        assert world.run(0, name_of, "worker1") == "worker1"
        world.wait_until(lambda: not world[1].agent.running)
        assert [record.deed for record in world.faults.report().records] == ["fail", "kill"]


def test_of_a_worker_that_ended_nothing_is_kept_by_a_plan_that_comes_later() -> None:
    with World(2) as world:
        world.kill(1)
        world.faults.set("drop PYTHON_CALL * 1")
        assert world[0].agent.faults is not None
        assert world[1].agent.faults is None


def test_a_world_without_a_plan_has_nothing_in_the_way() -> None:
    with World(2) as world:
        world.run(0, name_of, "worker1")
        assert not world.has_faults
        assert all(worker.agent.faults is None for worker in world.workers)
