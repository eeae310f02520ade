"""The two ends of a cut in the graph: a call sends tensors, `Send` stays with the sender, `Recv` with the receiver.

A `Send` stands at the root of the sender's graph: the gradients of the tensors it sent arrive there. A `Recv` is behind
the node of the receiver's graph that the received tensors come from: their gradients end there, and go to the sender.
The two belong together by the number of the message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from remora.devices import streams

if TYPE_CHECKING:
    from remora.agent.peers.manager import Peer

Gradients = dict[int, torch.Tensor]  # by the number of the tensor in its message; one without a gradient is not there
Start = GradientEdge | torch.Tensor  # where a gradient comes into the local graph: an edge, or a leaf
Incoming = list[tuple[Start, torch.Tensor]]  # gradients, and where they come in
_PREFIX = "torch::distributed::autograd::"  # the names are those that programs see in PyTorch's graphs

SEND_NAME = f"{_PREFIX}SendRpcBackward"


class _Look(torch.autograd.Function):
    """A node in front of any tensor, whatever its layout, to see what is behind it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(())


def in_front_of(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor that comes from a leaf, which wants a gradient: its node has an edge to the leaf's accumulator."""
    with torch.enable_grad():
        if leaf.layout is torch.strided:
            return leaf.view_as(leaf)
        look: torch.Tensor = _Look.apply(leaf)  # type: ignore[no-untyped-call]
        return look


def start_of(tensor: torch.Tensor) -> Start:
    """The place at which the gradient of a tensor comes in: the edge to its history, or the tensor itself if it is a leaf.
    (Not the edge to its accumulator: `graph.py` looks whether the program has that one.)"""
    node: Any = tensor.grad_fn
    if node is None:
        return tensor
    if not isinstance(node, torch._C._FunctionBase):
        return GradientEdge(node, tensor.output_nr)
    if tensor.layout is torch.strided:  # a node written in Python needs something that keeps what is behind it
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        keeper: Any = _Look.apply(tensor)  # type: ignore[no-untyped-call]
    return GradientEdge(node, tensor.output_nr, keeper)  # type: ignore[arg-type]


def _accumulator_edge(leaf: torch.Tensor) -> tuple[Any, int]:
    return in_front_of(leaf).grad_fn.next_functions[0]  # type: ignore[union-attr]


class Send:
    """Tensors that were sent. Their gradients come back and go on from here."""

    __slots__ = ("_devices", "message", "peer", "starts")

    def __init__(self, message: int, peer: Peer, tensors: Sequence[torch.Tensor]) -> None:
        self.message = message
        self.peer = peer
        self.starts: list[Start] = []
        self._devices: list[torch.device] = []
        for tensor in tensors:
            self.starts.append(start_of(tensor))
            self._devices.append(tensor.device)

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The nodes behind the tensors, as nodes of torch show theirs."""
        return tuple(
            _accumulator_edge(start) if isinstance(start, torch.Tensor) else (start.node, start.output_nr)
            for start in self.starts
        )

    def name(self) -> str:
        return SEND_NAME

    def __call__(self, *inputs: object) -> NoReturn:
        raise RuntimeError(
            f"{self!r} is the beginning of a graph and takes no inputs ({len(inputs)} were given): its gradients come from "
            f"{self.peer.name} in a backward pass"
        )

    def incoming(self, gradients: Gradients, part: Container[int]) -> Incoming:
        """Gradients of what was sent, where they go on: those of the tensors that take part, each on the device of its
        tensor. If the maps led it there, nothing is copied."""
        incoming: Incoming = []
        for number, gradient in gradients.items():
            if not 0 <= number < len(self.starts):
                raise RuntimeError(f"{self!r} sent {len(self.starts)} tensors; there is none of number {number}")
            if not isinstance(gradient, torch.Tensor):
                raise RuntimeError(f"{self!r} got an undefined gradient for its tensor {number}")
            if number in part:
                device = self._devices[number]
                there = gradient.device == device or gradient.is_meta
                incoming.append((self.starts[number], gradient if there else gradient.to(device)))
        return incoming

    def __repr__(self) -> str:
        return f"<SendRpcBackward of message {self.message} to {self.peer.name}>"


class Recv:
    """Tensors that were received. Their gradients end here and are sent to the peer."""

    __slots__ = ("collecting", "hooked", "message", "peer", "point")

    def __init__(self, message: int, peer: Peer) -> None:
        self.message = message
        self.peer = peer
        self.hooked = False  # the program has hung a hook on the node: it has to be run
        # Takes the gradients while a pass runs the node, and the thread that runs that pass. A local pass may come here
        # on another thread at the same time: it is refused, and its gradients must not go there.
        self.collecting: tuple[int, Callable[[Gradients], object]] | None = None
        self.point: streams.StreamPoint | None = None  # when they are there, on devices

    def __repr__(self) -> str:
        return f"<RecvRpcBackward of message {self.message} from {self.peer.name}>"


def _forward(ctx: Any, anchor: torch.Tensor, recv: Recv, tensors: Iterator[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    ctx.materialize_grads = False
    ctx.recv = recv
    return tuple(tensors)


def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
    """The graph has come to the received tensors. In a distributed pass the engine takes their gradients before it comes
    here, unless there are hooks to be run, or the gradients are to be sent before the run ends."""
    recv: Recv = ctx.recv
    collecting = recv.collecting
    if collecting is None or (collecting[0] != threading.get_ident() and not streams.watched):
        raise RuntimeError(
            f"a backward pass of this process alone came to tensors that were received from {recv.peer.name}: only a "
            f"distributed one, remora.autograd.backward(context_id, [loss]), can go on there"
        )
    if streams.watched:
        recv.point = streams.stream_point()
    collecting[1]({number: gradient for number, gradient in enumerate(gradients) if gradient is not None})
    return None, None, None


# Made by hand for its name: torch calls the node what the function is called, with "Backward" behind it.
_function_type: Any = type(torch.autograd.Function)
_RecvRpc: Any = _function_type(
    f"{_PREFIX}RecvRpc",
    (torch.autograd.Function,),
    {"forward": staticmethod(_forward), "backward": staticmethod(_backward), "__module__": __name__},
)
RecvNode: Any = _RecvRpc._backward_cls


def _noting(register: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a node that hangs a hook on it, which takes note that there is one."""

    @wraps(register)
    def noted(node: Any, *args: Any, **kwargs: Any) -> Any:
        node.recv.hooked = True
        return register(node, *args, **kwargs)

    return noted


RecvNode.register_hook = _noting(RecvNode.register_hook)
RecvNode.register_prehook = _noting(RecvNode.register_prehook)

# What `apply` comes down to when no transform of `torch.func` is active; to find out about arguments takes it longer.
_apply: Any = super(torch.autograd.Function, _RecvRpc).apply
# torch makes a node only if some argument needs a gradient. So an edge leads from each node of received tensors to this one.
anchor = torch.empty(0, requires_grad=True)


def receive(recv: Recv, tensors: Iterable[torch.Tensor]) -> Any:
    """Put a node behind tensors that were received; the tensors stay the objects they are. Returns the node."""
    apply = _RecvRpc.apply if torch._C._are_functorch_transforms_active() else _apply
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        outputs = apply(anchor, recv, iter(tensors))  # not the tensors themselves: torch takes what comes out for new
    finally:
        torch._C._set_grad_enabled(before)
    return outputs[0].grad_fn
