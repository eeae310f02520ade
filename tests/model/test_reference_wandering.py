"""Long random walks through worlds of the reference protocol that are too large to be explored."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remora.testing.explorer import wander
from remora.testing.model_state import Made, Scenario, Share

WALK = 400


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """4 to 6 workers, some values, many shares between any two, up to three crashes."""
    size = draw(st.integers(4, 6))
    worker = st.integers(0, size - 1)
    values = draw(st.lists(st.builds(Made, worker, worker, unsent=st.just(False), impatient=st.booleans()),
                           min_size=1, max_size=3))  # fmt: skip
    unsent = draw(st.lists(st.builds(Made, st.just(0), st.just(1), unsent=st.just(True)), max_size=1))
    rarely = st.sampled_from((False, False, False, True))
    shares = draw(st.lists(st.builds(Share, worker, worker, st.booleans(), rarely), min_size=5, max_size=40))
    fetches = draw(st.lists(worker, max_size=6))
    losses = draw(st.integers(0, 3))
    return Scenario("random", size, (*values, *unsent), tuple(shares), tuple(fetches), tuple(range(size)), losses)


walks = st.lists(st.integers(0, 255), min_size=WALK // 2, max_size=WALK)
thoroughly = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    derandomize=True,
)  # fmt: skip


@thoroughly
@given(scenarios(), walks)
def test_promises_are_kept_on_long_walks_and_in_the_end_nothing_is_left(scenario: Scenario, picks: list[int]) -> None:
    world = wander(scenario, picks)
    for worker in world.alive:
        site = world.sites[worker]
        assert not site.owner.values
        assert not site.owner.mourning
        assert not site.holder.forks
        assert not site.holder.parents
        assert not site.table
