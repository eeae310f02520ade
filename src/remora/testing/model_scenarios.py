"""The worlds that are explored: small ones in the tests, large ones by `python -m remora.testing.explorer`."""

from __future__ import annotations

from remora.testing.model_state import Made, Scenario, Share

A, B, C, D, E = range(5)
EVERYBODY = (A, B, C, D, E)

OWN = Made(owner=A, creator=A)
ASKED_FOR = Made(owner=A, creator=B)


def call(source: int, target: int) -> Share:
    """A reference as an argument of a call."""
    return Share(source, target)


def reply(source: int, target: int) -> Share:
    """A reference as the result of a call."""
    return Share(source, target, reply=True)


def failing(source: int, target: int) -> Share:
    """A reference in a call that is not sent."""
    return Share(source, target, fails=True)


def _scenario(
    name: str, workers: int, values: Made | tuple[Made, ...], *shares: Share, losses: int = 0, fetches: tuple[int, ...] = ()
) -> Scenario:
    values = (values,) if isinstance(values, Made) else values
    return Scenario(name, workers, values, shares, fetches, EVERYBODY[:workers] if losses else (), losses)


SMALL = (
    # Without losses.
    _scenario("owner-made: out, home and to itself", 2, OWN, call(A, B), call(B, A), reply(B, A), call(A, A)),
    _scenario("user-made: home and to itself", 2, ASKED_FOR, call(B, A), reply(B, A), call(B, B)),
    _scenario("chain of users, in calls", 3, ASKED_FOR, call(B, C), call(C, A), call(C, B)),
    _scenario("chain of users, in replies", 3, ASKED_FOR, reply(B, C), reply(C, A), reply(C, B)),
    _scenario("fetched before it is made", 3, ASKED_FOR, call(B, C), call(C, A), fetches=(B, C)),
    _scenario("messages that are not sent", 3, ASKED_FOR, call(B, C), failing(B, C), failing(C, A), failing(C, B)),
    # With one or two.
    _scenario("owner-made chain, 1 loss", 3, OWN, call(A, B), call(B, C), reply(B, C), losses=1),
    _scenario("user-made chain, 1 loss", 3, ASKED_FOR, call(B, C), reply(B, C), losses=1),
    _scenario("home and out again, 1 loss", 3, ASKED_FOR, call(B, C), call(C, A), call(A, C), losses=1),
    _scenario("home in replies and out again, 1 loss", 3, ASKED_FOR, reply(B, A), reply(B, C), reply(A, C), losses=1),
    _scenario("fetched, 1 loss", 3, ASKED_FOR, call(B, C), reply(C, B), fetches=(B, C), losses=1),
    _scenario("the call that makes it is not sent, 1 loss", 3, Made(A, B, unsent=True), call(B, C), call(B, C),
              reply(B, A), fetches=(C,), losses=1),  # fmt: skip
    _scenario("its creator loses patience, 1 loss", 3, Made(A, B, impatient=True), call(B, C), reply(B, A), losses=1),
    _scenario("4 workers: chain, 2 losses", 4, OWN, call(A, B), call(B, C), call(C, D), losses=2),
    _scenario("4 workers: user-made chain, 2 losses", 4, ASKED_FOR, call(B, C), call(C, D), losses=2),
    _scenario("two values, each in the hands of the other's owner, 1 loss", 3, (ASKED_FOR, Made(B, C)), call(B, C),
              losses=1),  # fmt: skip
)

LARGE = (
    _scenario("users and themselves, 1 loss", 3, ASKED_FOR, call(B, C), call(C, C), reply(C, B), failing(B, C), losses=1),
    _scenario("diamond, 1 loss", 4, ASKED_FOR, call(B, C), call(B, D), call(C, D), losses=1),
    _scenario("4 workers: there and back, 2 losses", 4, OWN, call(A, B), reply(B, C), call(C, D), call(D, A), losses=2),
    _scenario("5 workers: chain, 2 losses", 5, OWN, call(A, B), call(B, C), call(C, D), call(D, E), losses=2),
    _scenario("two values travel, 1 loss", 3, (ASKED_FOR, Made(B, C)), call(B, C), call(C, A), losses=1),
)
