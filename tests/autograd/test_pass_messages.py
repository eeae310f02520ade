"""Messages of distributed autograd that make no sense: an error that names sender and type, and nothing else is harmed."""

from __future__ import annotations

import pytest
import torch

from remora import autograd, rpc
from remora.errors import ProtocolError
from remora.testing.world import World
from remora.vocabulary import messages
from remora.vocabulary.messages import Message
from remora.wire.packed import Packed

TIMEOUT = 20.0
REQUESTS: list[type[Message]] = [
    messages.BackwardAutogradReq,
    messages.BackwardPartReq,
    messages.BackwardEndReq,
    messages.RRefBackwardReq,
    messages.AutogradContextHeldReq,
]


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.type.name)
def test_a_payload_of_another_form_is_refused(kind: type[Message]) -> None:
    nonsense = Packed(b"\x80\5X\3\0\0\0abc.", [], [], [])
    with World(2, watch=0) as world:
        agent = world[0].agent
        sent = agent.caller.call_async(agent.peers.find("worker1"), int(kind.type), nonsense, 0, TIMEOUT, "a backward pass")
        with pytest.raises(ProtocolError, match=f"a {kind.type.name} from worker0 makes no sense"):
            sent.wait(TIMEOUT)
        with world.acting(0), autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.add, (x, x)).sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 2.0))


def test_an_answer_of_another_form_is_an_error_that_names_its_type() -> None:
    with World(2, watch=0) as world:
        answer = int(messages.BackwardPartResp.type)
        world[1].agent.dispatch.on(messages.BackwardPartReq.type, lambda request: request.reply(answer, "abc"), service=True)
        with world.acting(0), autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            total = rpc.rpc_sync("worker1", torch.add, (x, x)).sum()
            with pytest.raises(RuntimeError, match="BACKWARD_PART_RESP from worker1 makes no sense: 'abc'"):
                autograd.backward(context_id, [total])
