"""The functions at which messages cut the graph: how they look, what they refuse, what they leave behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from remora import autograd, rpc
from remora.testing.world import World
from tests.autograd.belongings import gradient, leaf, my_weight, passes, wait_for_no_contexts, weight_of


def weigh(x: Tensor) -> Tensor:
    return x * my_weight()


def test_they_look_as_in_pytorch(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", weigh, args=(x,))
        mine, theirs = (world.run(i, autograd._retrieve_context, context_id) for i in (0, 1))
        assert mine._known_worker_ids() == {1}
        assert theirs._known_worker_ids() == {0}
        (sent,) = mine._send_functions().values()
        (replied,) = theirs._send_functions().values()
        assert sent.name() == "torch::distributed::autograd::SendRpcBackward"
        assert sent.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"
        assert result.grad_fn is not None
        assert result.grad_fn.name() == "torch::distributed::autograd::RecvRpcBackward"
        assert replied.next_functions[0][0].name() == "MulBackward0"
        received, _ = replied.next_functions[0][0].next_functions[0]
        assert received.name() == "torch::distributed::autograd::RecvRpcBackward"
        assert mine._send_functions().keys() == theirs._recv_functions().keys()
        assert mine._recv_functions().keys() == theirs._send_functions().keys()


def test_a_send_function_takes_no_inputs(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", weigh, args=(x,))
        (sent,) = autograd._retrieve_context(context_id)._send_functions().values()
        with pytest.raises(RuntimeError, match="no inputs"):
            sent(torch.ones(3, 3))


def test_a_send_function_takes_no_undefined_gradient(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", weigh, args=(x,))
        (sent,) = autograd._retrieve_context(context_id)._send_functions().values()
        with pytest.raises(RuntimeError, match="undefined"):
            sent.incoming({0: None}, {0})
        with pytest.raises(RuntimeError, match="none of number 1"):
            sent.incoming({1: torch.ones(3, 3)}, {0})


def test_nothing_is_left_of_a_local_pass(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [(x * x).sum()])
        assert passes(world) == [0, 0, 0]
        assert autograd._is_valid_context(context_id)
    assert not autograd._is_valid_context(context_id)
    wait_for_no_contexts(world)


def test_nothing_is_left_of_a_pass_through_a_send_function(world: World) -> None:
    x = leaf(0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", weigh, args=(x,)).sum()])
        assert passes(world) == [0, 0, 0], "when `backward` returns, the pass is over everywhere"
        assert gradient(world, 1, context_id, weight_of(world, 1)) is not None
    wait_for_no_contexts(world)


def test_a_plain_backward_does_not_go_through_a_call_in_silence(world: World) -> None:
    x = leaf(0)
    with autograd.context():
        result = rpc.rpc_sync("worker1", weigh, args=(x,))
        with pytest.raises(RuntimeError, match="distributed"):
            result.sum().backward()
    assert x.grad is None


def test_outside_a_context_calls_carry_no_history(world: World) -> None:
    result = rpc.rpc_sync("worker1", weigh, args=(leaf(0),))
    assert result.grad_fn is None
