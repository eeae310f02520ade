"""The language of random programs: it prints so that it can be pasted, and what is drawn has everything in it."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.autograd import language
from tests.autograd.corpus import CORPUS
from tests.autograd.language import Backward, Body, Call, Calls, Hook, Leaf, Op, Program, calls_in, steps_in
from tests.autograd.one_process import run_in_one_process
from tests.autograd.operations import OPERATIONS
from tests.autograd.outcome import Outcome, differences
from tests.autograd.strategies import programs

DRAWN = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def draw() -> list[Program]:
    drawn: list[Program] = []

    @DRAWN
    @given(programs())
    def keep(program: Program) -> None:
        drawn.append(program)

    keep()
    return drawn


def test_what_is_drawn_has_everything_in_it() -> None:
    drawn = draw()
    steps = [step for program in drawn for step in steps_in(program.body)]
    calls = [call for program in drawn for call in calls_in(program.body)]
    assert {step.name for step in steps if isinstance(step, Op)} == OPERATIONS.keys() - {"mine"}
    assert {step.kind for step in steps if isinstance(step, Hook)} == set(language.HOOK_KINDS)
    assert {kind for program in drawn for _, _, kind in program.leaf_hooks} == set(language.LEAF_HOOK_KINDS)
    assert {call.style for call in calls} == set(language.STYLES)
    assert {call.target for call in calls} == set(language.TARGETS)
    assert {call.shape for call in calls} == set(language.SHAPES)
    assert any(call.no_grad for call in calls)
    assert any(call.baggage for call in calls)
    assert any(call.to == nested.to for call in calls for nested in calls_in(call.body)), "back to where one was"
    assert any(sum(isinstance(step, Backward) for step in program.body.steps) > 2 for program in drawn)
    assert any(step.at is not None for step in steps if isinstance(step, Backward))


def test_a_program_prints_what_builds_it_again() -> None:
    for program in [*draw(), *CORPUS.values()]:
        assert eval(repr(program), vars(language)) == program


X_TIMES_X = Program(2, 1, Body(0, (Leaf(0), Op("mul", (0, 0)), Backward((1,), retain=True), Backward((1,)))))


def test_a_program_means_what_it_says() -> None:
    outcome, _ = run_in_one_process(X_TIMES_X)
    x = torch.linspace(1, 3, 4, dtype=torch.float64).sin().view(2, 2)
    for number, gradients in enumerate(outcome.passes, 1):
        torch.testing.assert_close(gradients["worker0 parameter 0"], 2 * number * x)
        assert gradients["worker1 parameter 0"] is None


def test_a_message_that_no_gradient_reaches_is_noticed() -> None:
    call = Calls((Call(1, (0,), Body(1, (Leaf(0), Op("mul", (0, 1))), (2,))),))
    for root, reached in [(0, False), (1, True)]:
        assert run_in_one_process(Program(2, 1, Body(0, (Leaf(0), call, Backward((root,))))))[1] == reached


def test_differences_are_found() -> None:
    one, two = torch.ones(1), torch.full((1,), 2.0)
    outcome = Outcome([one], [{"p": one, "q": None}], {"hook": [one, two]})
    assert not list(differences(outcome, outcome))
    for other in (
        Outcome([two], outcome.passes, outcome.seen),
        Outcome([one], [{"p": two, "q": None}], outcome.seen),
        Outcome([one], [{"p": one, "q": torch.zeros(1)}], outcome.seen),
        Outcome([one], [{"p": None, "q": None}], outcome.seen),
        Outcome([one], [], outcome.seen),
        Outcome([one], outcome.passes, {"hook": [one]}),
        Outcome([one], outcome.passes, {"hook": [one, one]}),
        Outcome([one], outcome.passes, {}),
        Outcome([one], [{"p": one.double(), "q": None}], outcome.seen),
    ):
        assert len(list(differences(outcome, other))) == 1
