"""Where a call cuts the graph of a program: what the sender of tensors keeps, and what their receiver puts in its graph.

A `Send` stands at the root of the sender's graph: the gradients of the tensors it sent arrive there. A `Recv` is behind
the node of the receiver's graph that the received tensors come from: their gradients end there, and go to the sender.
The two belong together by the number of the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from remora.devices import streams

if TYPE_CHECKING:
    from remora.agent.peers import Peer
    from remora.autograd.graph import Reach

Gradients = dict[int, torch.Tensor]  # by the number of the tensor in its message; one without a gradient is not there
_PREFIX = "torch::distributed::autograd::"  # the names are those that programs see in PyTorch's graphs

SEND_NAME = f"{_PREFIX}SendRpcBackward"


class _Look(torch.autograd.Function):
    """A node in front of any tensor, whatever its layout, to see what is behind it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(())


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """The edge that leads to a tensor's history, or to the node that gathers the gradient of a leaf."""
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        look: Any = _Look.apply(tensor)  # type: ignore[no-untyped-call]
    return GradientEdge(*look.grad_fn.next_functions[0])


class Send:
    """Tensors that were sent: where their gradients, which come back, go on."""

    __slots__ = ("_ahead", "_devices", "edges", "message", "peer")

    def __init__(self, message: int, peer: Peer, tensors: Sequence[torch.Tensor]) -> None:
        self.message = message
        self.peer = peer
        self._devices = [tensor.device for tensor in tensors]
        self.edges: list[GradientEdge] = [edge_of(tensor) for tensor in tensors]
        self._ahead: Reach | None = None

    def see(self, reach: Reach) -> None:
        """This is what a pass will come to behind all its tensors."""
        self._ahead = reach

    def seen_ahead(self) -> Reach | None:
        """What was seen, for one pass to use."""
        ahead, self._ahead = self._ahead, None
        return ahead

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The nodes behind the tensors, as nodes of torch show theirs."""
        return tuple((edge.node, edge.output_nr) for edge in self.edges)

    def name(self) -> str:
        return SEND_NAME

    def __call__(self, *inputs: object) -> NoReturn:
        raise RuntimeError(
            f"{self!r} is the beginning of a graph and takes no inputs ({len(inputs)} were given): its gradients come from "
            f"{self.peer.name} in a backward pass"
        )

    def check(self, gradients: Gradients) -> None:
        """Raise if these cannot be the gradients of what was sent."""
        for number, gradient in gradients.items():
            if not 0 <= number < len(self.edges):
                raise RuntimeError(f"{self!r} sent {len(self.edges)} tensors; there is none of number {number}")
            if not isinstance(gradient, torch.Tensor):
                raise RuntimeError(f"{self!r} got an undefined gradient for its tensor {number}")

    def placed(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient on the device of its tensor. If the maps led it there, nothing is copied."""
        device = self._devices[number]
        return gradient if gradient.device == device or gradient.is_meta else gradient.to(device)

    def __repr__(self) -> str:
        return f"<SendRpcBackward of message {self.message} to {self.peer.name}>"


class Recv:
    """Tensors that were received: where their gradients have to be sent."""

    __slots__ = ("_open", "gradients", "message", "moment", "peer")

    def __init__(self, message: int, peer: Peer) -> None:
        self.message = message
        self.peer = peer
        self.gradients: Gradients = {}
        self._open = False  # a pass collects gradients here
        self.moment: streams.Moment | None = None  # when they are there, on devices

    def expect(self, gradients: bool) -> None:
        """Whether a pass is about to collect gradients here."""
        self._open = gradients
        self.gradients = {}

    def collect(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The graph has come to the received tensors."""
        if not self._open:
            raise RuntimeError(
                f"a backward pass of this process alone came to tensors that were received from {self.peer.name}: only a "
                f"distributed one, remora.autograd.backward(context_id, [loss]), can go on there"
            )
        if streams.watched:
            self.moment = streams.moment()
        self.gradients = {number: gradient for number, gradient in enumerate(gradients) if gradient is not None}

    def __repr__(self) -> str:
        return f"<RecvRpcBackward of message {self.message} from {self.peer.name}>"


class _Receiving:
    """The one argument of the function below: not a tensor, so that torch takes what comes out for new."""

    __slots__ = ("recv", "tensors")

    def __init__(self, recv: Recv, tensors: list[torch.Tensor]) -> None:
        self.recv = recv
        self.tensors = tensors


def _forward(ctx: Any, anchor: torch.Tensor, receiving: _Receiving) -> tuple[torch.Tensor, ...]:
    ctx.materialize_grads = False
    ctx.recv = receiving.recv
    return tuple(receiving.tensors)


def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
    ctx.recv.collect(gradients)
    return None, None


# Made by hand for its name: torch calls the node what the function is called, with "Backward" behind it.
_function_type: Any = type(torch.autograd.Function)
_RecvRpc: Any = _function_type(
    f"{_PREFIX}RecvRpc",
    (torch.autograd.Function,),
    {"forward": staticmethod(_forward), "backward": staticmethod(_backward), "__module__": __name__},
)
RecvNode: type = _RecvRpc._backward_cls
# What `apply` comes down to when no transform of `torch.func` is active; to find out about arguments takes it longer.
_apply: Any = super(torch.autograd.Function, _RecvRpc).apply
_anchor = torch.empty(0, requires_grad=True)  # torch makes a node only if some argument needs a gradient


def receive(recv: Recv, tensors: list[torch.Tensor]) -> Any:
    """Put a node behind tensors that were received; the tensors stay the objects they are. Returns the node."""
    apply = _RecvRpc.apply if torch._C._are_functorch_transforms_active() else _apply
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        outputs = apply(_anchor, _Receiving(recv, tensors))
    finally:
        torch._C._set_grad_enabled(before)
    return outputs[0].grad_fn
