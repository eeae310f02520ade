"""The worlds that are explored: small ones in the tests, large ones by `python -m tests.model.reference_explorer`."""

from __future__ import annotations

from tests.model.reference_state import Made, Scenario, Share

A, B, C, D, E = range(5)
EVERYBODY = (A, B, C, D, E)

OWN = Made(owner=A, creator=A)
ASKED_FOR = Made(owner=A, creator=B)
NOT_ASKED_FOR = Made(owner=A, creator=B, unsent=True)
IMPATIENT = Made(owner=A, creator=B, impatient=True)
OTHERS = Made(owner=B, creator=C)


def call(source: int, target: int) -> Share:
    """A reference as an argument of a call."""
    return Share(source, target)


def reply(source: int, target: int) -> Share:
    """A reference as the result of a call."""
    return Share(source, target, reply=True)


def failing(source: int, target: int) -> Share:
    """A reference in a call that is not sent."""
    return Share(source, target, fails=True)


def scenario(
    name: str, workers: int, values: tuple[Made, ...], *shares: Share, losses: int = 0, fetches: tuple[int, ...] = ()
) -> Scenario:
    """Where there are losses, anybody may be lost."""
    return Scenario(name, workers, values, shares, fetches, EVERYBODY[:workers] if losses else (), losses)


SMALL = (
    scenario("owner-made: out, home, to itself", 2, (OWN,), call(A, B), call(B, A), reply(B, A), call(A, A)),
    scenario("user-made: home, to itself", 2, (ASKED_FOR,), call(B, A), reply(B, A), call(B, B)),
    scenario("chain of users in calls", 3, (ASKED_FOR,), call(B, C), call(C, A), call(C, B)),
    scenario("chain of users in replies", 3, (ASKED_FOR,), reply(B, C), reply(C, A), reply(C, B)),
    scenario("fetched before it is made", 3, (ASKED_FOR,), call(B, C), call(C, A), fetches=(B, C)),
    scenario("calls not sent", 3, (ASKED_FOR,), call(B, C), failing(B, C), failing(C, A), failing(C, B)),
    scenario("owner-made chain, 1 loss", 3, (OWN,), call(A, B), call(B, C), reply(B, C), losses=1),
    scenario("user-made chain, 1 loss", 3, (ASKED_FOR,), call(B, C), reply(B, C), losses=1),
    scenario("home and out again, 1 loss", 3, (ASKED_FOR,), call(B, C), call(C, A), call(A, C), losses=1),
    scenario("the same in replies, 1 loss", 3, (ASKED_FOR,), reply(B, A), reply(B, C), reply(A, C), losses=1),
    scenario("fetched by both, 1 loss", 3, (ASKED_FOR,), call(B, C), fetches=(B, C), losses=1),
    scenario("creation not sent, 1 loss", 3, (NOT_ASKED_FOR,), call(B, C), call(B, C), reply(B, A), losses=1),
    scenario("impatient creator, 1 loss", 3, (IMPATIENT,), call(B, C), reply(B, A), losses=1),
    scenario("two values, 1 loss", 3, (ASKED_FOR, OTHERS), call(B, C), losses=1),
    scenario("owner-made chain of 4, 2 losses", 4, (OWN,), call(A, B), call(B, C), call(C, D), losses=2),
    scenario("user-made chain of 4, 2 losses", 4, (ASKED_FOR,), call(B, C), call(C, D), losses=2),
)

LARGE = (
    scenario(
        "itself and not sent, 1 loss", 3, (ASKED_FOR,), call(B, C), call(C, C), reply(C, B), failing(B, C), losses=1
    ),
    scenario("creation not sent, fetched, 1 loss", 3, (NOT_ASKED_FOR,), call(B, C), call(B, C), fetches=(C,), losses=1),
    scenario("diamond, 1 loss", 4, (ASKED_FOR,), call(B, C), call(B, D), call(C, D), losses=1),
    scenario("two values travel, 1 loss", 3, (ASKED_FOR, OTHERS), call(B, C), call(C, A), losses=1),
    scenario("circle of 4, 2 losses", 4, (OWN,), call(A, B), reply(B, C), call(C, D), call(D, A), losses=2),
    scenario("both ways, 2 losses", 4, (ASKED_FOR,), call(B, C), reply(C, D), call(D, B), reply(D, A), losses=2),
    scenario("owner-made chain of 5, 2 losses", 5, (OWN,), call(A, B), call(B, C), call(C, D), call(D, E), losses=2),
)
