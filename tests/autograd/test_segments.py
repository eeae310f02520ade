"""The local graph in segments: hooks run once, on whole gradients, whatever the order in which sources come."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from remora.autograd import segments
from remora.autograd.graph import Division, Reach
from remora.autograd.leaves import Gathered
from remora.autograd.nodes import Recv, receive
from remora.autograd.schedule import Divided, Whole


def edge(tensor: torch.Tensor) -> GradientEdge:
    found: GradientEdge = get_gradient_edge(tensor)
    return found


def run_in_order(
    sources: list[torch.Tensor], gradients: list[torch.Tensor], order: tuple[int, ...]
) -> tuple[dict[torch.Tensor, torch.Tensor], list[tuple[Recv, dict[int, torch.Tensor]]]]:
    """Feed the gradients of `sources` one after the other; the gradients of leaves and of received tensors."""
    starts = [edge(source) for source in sources]
    book = Divided({number: [start] for number, start in enumerate(starts)})
    received = feed(book, [(number, starts[number], gradients[number]) for number in order], gathered := Gathered())
    return dict(gathered.values()), received


def feed(
    book: Whole | Divided, sources: list[tuple[int, GradientEdge, torch.Tensor]], gathered: Gathered
) -> list[tuple[Recv, dict[int, torch.Tensor]]]:
    """Have the sources come one after the other, and run what can be run."""
    received: list[tuple[Recv, dict[int, torch.Tensor]]] = []
    for come, (number, start, gradient) in enumerate(sources):
        assert (book.arrived, book.done) == (come, False)
        assert set(book.owed) == {number for number, _, _ in sources[come:]}
        ready = book.arrive({number: [(start, gradient)]})
        while ready:
            label, segment, incoming = ready.pop()
            leaving, came = segments.run(segment, incoming, gathered, False)
            received += came
            ready += book.ran(label, leaving)
    assert book.done
    assert not book.owed
    return received


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def program(seen: list[tuple[str, torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three ends and two leaves, with nodes that one, two or all ends reach."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    v = torch.tensor([3.0, 5.0], requires_grad=True)

    def watch(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor.register_hook(lambda gradient: seen.append((name, gradient.clone())))
        return tensor

    watch("w", w)
    w.register_post_accumulate_grad_hook(lambda leaf: seen.append(("w gathered", leaf.grad.clone())))
    shared = watch("shared", Doubled.apply(w) * v)
    left = watch("left", shared * w)
    right = watch("right", (shared + v).tanh())
    both = watch("both", left * right)
    node = both.grad_fn
    node.register_hook(lambda out, into: seen.append(("node", into[0].clone())))
    return [left.sum(), both.sum(), right.exp().sum()], [w, v]


ONES = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(-1.5)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_segments_give_what_one_run_gives(order: tuple[int, ...]) -> None:
    expected_hooks: list[tuple[str, torch.Tensor]] = []
    ends, leaves = program(expected_hooks)
    torch.autograd.backward(ends, ONES)
    seen: list[tuple[str, torch.Tensor]] = []
    ends_again, leaves_again = program(seen)
    gathered, _ = run_in_order(ends_again, ONES, order)
    for before, after in zip(leaves, leaves_again, strict=True):
        torch.testing.assert_close(gathered[after], before.grad)
        assert after.grad is None
    assert sorted(name for name, _ in seen) == sorted(name for name, _ in expected_hooks)
    wanted = dict(expected_hooks)
    for name, gradient in seen:
        torch.testing.assert_close(gradient, wanted[name])


def test_one_source_is_one_segment() -> None:
    x = torch.ones(2, requires_grad=True)
    parts = Division([[edge((x * 2).sum())]]).segments
    assert list(parts) == [1]
    assert not parts[1].taps
    assert [leaf for leaf, _, _ in parts[1].leaves.values()] == [x]


def test_what_one_source_reaches_needs_no_dividing() -> None:
    """A pass with one source uses the reach itself: it gives what the one segment of the divided graph gives."""

    def graph() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Recv]:
        x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
        recv = Recv(7, None)  # type: ignore[arg-type]
        receive(recv, [y])
        shared = (x + y).exp()
        return (shared * x).sum(), x, y, recv

    end, x, _, recv = graph()
    found, expected = run_in_order([end], [torch.tensor(2.0)], (0,))
    end_again, x_again, y_again, recv_again = graph()
    reach = Reach()
    assert reach.follow([edge(end_again)]) == [(y_again.grad_fn, 0)]
    gathered = Gathered()
    received = feed(Whole(0, reach), [(0, edge(end_again), torch.tensor(2.0))], gathered)
    assert [leaf for leaf, _ in gathered.values()] == [x_again]
    torch.testing.assert_close(gathered[id(x_again)][1], found[x])
    [(ours, gradients)], [(theirs, wanted)] = received, expected
    assert (ours, theirs) == (recv_again, recv)
    torch.testing.assert_close(gradients, wanted)


def test_a_source_comes_once() -> None:
    book = Whole(3, Reach())
    book.arrive({3: []})
    with pytest.raises(ValueError, match="source 3 is not expected"):
        book.arrive({3: []})


def test_received_tensors_end_the_graph_and_give_their_gradients() -> None:
    recv = Recv(7, None)  # type: ignore[arg-type]
    first, second = torch.ones(2), torch.ones(2)
    receive(recv, [first, second])
    end = (first * 3).sum()
    _, received = run_in_order([end], [torch.tensor(1.0)], (0,))
    [(found, gradients)] = received
    assert found is recv
    assert list(gradients) == [0]
    torch.testing.assert_close(gradients[0], torch.full((2,), 3.0))


def test_received_tensors_stay_the_objects_they_are_and_may_be_changed_in_place() -> None:
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    kept = list(tensors)
    node = receive(Recv(1, None), tensors)  # type: ignore[arg-type]
    assert all(one is other for one, other in zip(kept, tensors, strict=True))
    assert kept[0].grad_fn is node
    assert node.name() == "torch::distributed::autograd::RecvRpcBackward"
    assert isinstance(kept[1], torch.nn.Parameter)
    assert kept[1].requires_grad
    kept[0].add_(1)
    assert kept[0].requires_grad


def test_a_local_pass_through_received_tensors_says_what_to_do() -> None:
    class Somebody:
        name = "worker7"

    tensor = torch.ones(2)
    receive(Recv(1, Somebody()), [tensor])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"worker7.*remora\.autograd\.backward"):
        tensor.sum().backward()


def test_the_graph_is_kept_or_freed_as_asked() -> None:
    x = torch.ones(2, requires_grad=True)
    end = (x * x).sum()
    run_in_order([end], [torch.tensor(1.0)], (0,))
    with pytest.raises(RuntimeError, match="second time"):
        run_in_order([end], [torch.tensor(1.0)], (0,))
