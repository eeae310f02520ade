"""Fault plans for programs under test: set one, change it while the program runs, ask what it did.

    from remora.testing import faults

    faults.set("drop PYTHON_CALL worker0->worker1 1; cut worker0-worker2 after 10 for 2s")
    ...
    print(faults.report())

These act for the current worker of this process, which injects faults into what it sends. To have all workers follow a
plan from the start, set REMORA_FAULTS for all of them, or pass `faults=` in `RemoraRpcBackendOptions`. A `World` has its
own (`world.faults`), for all its workers. docs/testing.md has the notation and a worked example.
"""

from __future__ import annotations

from collections import Counter

from remora.faults.injector import Message, Report, Stage
from remora.faults.kinds import Cut, Freeze, Heal, Kill, MessageFault, Pair, Partition, When, Which
from remora.faults.plan import Plan
from remora.faults.plan_runner import Record
from remora.rpc.current_worker import _get_current_rpc_agent
from remora.testing.world import world_of
from remora.worker import Worker


def stage(worker: Worker | None = None) -> Stage:
    """Return the stage of a worker's fault plan; of the current worker by default. From now on its links pass through it."""
    chosen = worker or _get_current_rpc_agent()
    world = world_of(chosen)
    if world is not None:  # its plan is for all its workers: to kill one is not to kill this process
        return world.faults
    agent = chosen.agent
    if agent.faults is None:
        agent.follow_plan("")
    assert agent.faults is not None
    return agent.faults.stage


def set(plan: Plan | str, worker: Worker | None = None) -> None:
    """Follow a plan from now on, in the place of the earlier one."""
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan  # an invalid plan changes nothing
    stage(worker).set(parsed)


def clear(worker: Worker | None = None) -> None:
    """Remove the plan. What was cut or frozen works again."""
    stage(worker).set("")


def heal(worker: Worker | None = None) -> None:
    """Restore what is cut or frozen now; the plan stays."""
    stage(worker).heal()


def report(worker: Worker | None = None) -> Report:
    """Return what the plan did so far, to which message. Print it."""
    return stage(worker).report()


def messages(worker: Worker | None = None) -> Counter[Message]:
    """Return how many messages of each type were sent: a plan can name these. In a `World`, by all workers."""
    return stage(worker).messages()


__all__ = [
    "Cut",
    "Freeze",
    "Heal",
    "Kill",
    "Message",
    "MessageFault",
    "Pair",
    "Partition",
    "Plan",
    "Record",
    "Report",
    "Stage",
    "When",
    "Which",
    "clear",
    "heal",
    "messages",
    "report",
    "set",
    "stage",
]
