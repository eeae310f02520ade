"""Random programs: whatever is computed, many workers find the gradients that one process finds.

REMORA_THOROUGH=1 draws many more, and other ones each time. REMORA_SHRINK=1 makes a failing one small, which takes minutes.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from remora import autograd
from remora.testing.world import World
from tests.autograd.belongings import STARTING, run_a_first_pass
from tests.autograd.corpus import CORPUS
from tests.autograd.language import Program, refuses
from tests.autograd.many_workers import Mode, conduct, conduct_once, settle_all
from tests.autograd.one_process import run_in_one_process
from tests.autograd.outcome import Outcome, differences, without_zeros
from tests.autograd.strategies import programs
from tests.thorough import THOROUGH
from tests.workers import Workers

SHRINK = THOROUGH or bool(os.environ.get("REMORA_SHRINK"))
TIMEOUT = 10.0
PATIENCE = 60.0  # of calls to processes of their own, which have more to do the first time


def examples(number: int) -> settings:
    """The same ones every time, unless the long run was asked for."""
    return settings(
        max_examples=30 * number if THOROUGH else number,
        derandomize=not THOROUGH,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if SHRINK else [Phase.generate],
    )


def assert_same(program: Program, expected: Outcome, actual: Outcome) -> None:
    if refuses(program):
        expected, actual = without_zeros(expected), without_zeros(actual)
    found = list(differences(expected, actual))
    assert not found, "\n".join(found)


def run_in_a_world(program: Program, mode: Mode) -> Outcome:
    """Run it, and see that nothing of it is left."""
    with World(program.workers, timeout=TIMEOUT) as world:
        outcome = world.run(0, conduct, program, mode)
        world.wait_until(lambda: not any(_left(world)), 5)
    return outcome


def _left(world: World) -> list[int]:
    return [int(count) for i in range(len(world)) for count in world.run(i, autograd._get_debug_info).values()]


def check(program: Program) -> None:
    expected, every_message_reached = run_in_one_process(program)
    assert_same(program, expected, run_in_a_world(program, "smart"))
    if every_message_reached:
        assert_same(program, expected, run_in_a_world(program, "fast"))


@pytest.mark.timeout(7200 if THOROUGH else 600)
@examples(40)
@given(programs())
def test_any_program_yields_the_gradients_of_one_process(program: Program) -> None:
    check(program)


@pytest.mark.timeout(7200 if THOROUGH else 600)
@examples(20)
@given(programs(tidy=True))
def test_so_does_one_that_leaves_nothing_unused(program: Program) -> None:
    check(program)


@pytest.mark.timeout(7200 if THOROUGH else 600)
@examples(20)
@given(programs(tidy=True, mined=True))
def test_a_function_that_raises_ends_the_program_everywhere(program: Program) -> None:
    try:
        expected, _ = run_in_one_process(program)
    except ArithmeticError as error:
        with World(program.workers, timeout=TIMEOUT) as world:
            with pytest.raises(ArithmeticError, match=str(error)):
                world.run(0, conduct, program)
            world.wait_until(lambda: not any(_left(world)), 5)
    else:
        assert_same(program, expected, run_in_a_world(program, "smart"))


@pytest.mark.timeout(7200 if THOROUGH else 600)
@examples(10)
@given(programs())
def test_contexts_at_the_same_time_do_not_mix(program: Program) -> None:
    """Three threads run one program with the same parameters; what the hooks see is not told apart."""
    expected, _ = run_in_one_process(program)
    with World(program.workers, timeout=TIMEOUT) as world, ThreadPoolExecutor(3) as pool:
        world.run(0, settle_all, program)
        for each in [pool.submit(world.run, 0, conduct_once, program) for _ in range(3)]:
            results, passes = each.result()
            assert_same(program, replace(expected, seen={}), Outcome.of(results, passes, []))
        world.wait_until(lambda: not any(_left(world)), 5)


@pytest.mark.parametrize("name", CORPUS)
def test_programs_that_found_bugs(name: str) -> None:
    for _ in range(5):  # some were a matter of luck
        check(CORPUS[name])


@pytest.mark.timeout(7200 if THOROUGH else 600)
def test_so_do_workers_in_processes_of_their_own() -> None:
    with Workers(4, options={"rpc_timeout": PATIENCE}, timeout=STARTING) as workers:
        workers.run_all(run_a_first_pass)

        @examples(15)
        @given(programs())
        def run(program: Program) -> None:
            expected, _ = run_in_one_process(program)
            assert_same(program, expected, workers.run(0, conduct, program))

        run()
