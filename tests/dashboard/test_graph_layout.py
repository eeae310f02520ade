"""Boxes do not overlap, what is waited for stands at the right, cycles are rings, and the same graph looks the same."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.dashboard.graph_layout import HEIGHT, WIDTH, lay_out, strong_components

graphs = st.integers(1, 14).flatmap(
    lambda n: st.tuples(
        st.just(list(range(n))), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=30)
    )
)


@given(graphs)
def test_all_boxes_have_a_place_of_their_own(graph: tuple[list[int], list[tuple[int, int]]]) -> None:
    nodes, edges = graph
    made = lay_out(nodes, edges)
    assert made.places.keys() == set(nodes)
    for (x1, y1), (x2, y2) in itertools.combinations(made.places.values(), 2):
        assert abs(x1 - x2) >= WIDTH - 0.01 or abs(y1 - y2) >= HEIGHT - 0.01
    for x, y in made.places.values():
        assert WIDTH / 2 - 0.01 <= x <= made.width - WIDTH / 2 + 0.01
        assert HEIGHT / 2 - 0.01 <= y <= made.height - HEIGHT / 2 + 0.01
    assert lay_out(nodes, edges) == made


@pytest.mark.parametrize("count", range(2, 12))
def test_in_a_ring_there_is_room_for_arrows_and_their_ages(count: int) -> None:
    nodes = list(range(count))
    made = lay_out(nodes, [(node, (node + 1) % count) for node in nodes])
    for (x1, y1), (x2, y2) in itertools.combinations(made.places.values(), 2):
        assert abs(x1 - x2) >= WIDTH + 80 or abs(y1 - y2) >= HEIGHT + 50


@given(graphs)
def test_outside_of_cycles_arrows_lead_to_the_right(graph: tuple[list[int], list[tuple[int, int]]]) -> None:
    nodes, edges = graph
    after = {node: [to for one, to in edges if one == node] for node in nodes}
    home = {node: place for place, part in enumerate(strong_components(nodes, after)) for node in part}
    made = lay_out(nodes, edges)
    for one, other in edges:
        if home[one] != home[other]:
            assert made.places[one][0] < made.places[other][0]


@given(graphs)
def test_strong_components_are_those_that_reach_each_other(graph: tuple[list[int], list[tuple[int, int]]]) -> None:
    nodes, edges = graph
    reach = {(node, node) for node in nodes} | set(edges)
    for middle, one, other in itertools.product(nodes, nodes, nodes):
        if (one, middle) in reach and (middle, other) in reach:
            reach.add((one, other))
    after = {node: [to for one, to in edges if one == node] for node in nodes}
    found = {frozenset(part) for part in strong_components(nodes, after)}
    assert found == {frozenset(o for o in nodes if (n, o) in reach and (o, n) in reach) for n in nodes}


def test_a_long_chain_needs_no_recursion() -> None:
    nodes = list(range(3000))
    assert len(strong_components(nodes, {node: [node + 1] if node < 2999 else [] for node in nodes})) == 3000
