"""Programs between two workers whose outcome is known. Their traffic is captured, and damaged.

Each is run as worker0's, against worker1. What they call is benign whatever its arguments are: those may be damaged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from remora import autograd, rpc

warnings.filterwarnings("ignore", message=".*(Sparse|nested|quantiz|TypedStorage).*")  # torch says that they are in beta

THERE = "worker1"
MANY = 64  # functions of which each has a number of its own


def double(x: Any = 21) -> Any:
    return x * 2 if isinstance(x, int | float | torch.Tensor) else x


def same(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values


def fail(text: str) -> None:
    raise ValueError(text)


def scale(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by


def back(x: int) -> Any:
    """Call the caller."""
    return rpc.rpc_sync("worker0", double, args=(x,))


def keep(reference: rpc.RRef[Any]) -> Any:
    return reference.to_here()


def give(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


class Counter:
    """An object on another worker."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def plus(self, n: int) -> int:
        return self.value + n


def _numbered(i: int) -> Callable[[int], int]:
    def function(x: int = 0) -> int:
        return i

    function.__qualname__ = function.__name__ = f"function_{i}"
    return function


for _i in range(MANY):
    globals()[f"function_{_i}"] = _numbered(_i)

_turn = 0


def calls() -> bool:
    """Plain calls, several at a time, by number and by value, errors."""
    sync = rpc.rpc_sync
    right = sync(THERE, double, args=(4,)) == 8 and sync(THERE, double) == 42
    futures = [rpc.rpc_async(THERE, double, args=(i,)) for i in range(3)]
    right = right and [future.wait() for future in futures] == [0, 2, 4]
    text = "a text of some length, with words"
    right = right and sync(THERE, same, args=(text, b"bytes", 1.5, None, {"key": [1, 2]})) == (
        text, b"bytes", 1.5, None, {"key": [1, 2]}
    )  # fmt: skip
    right = right and sync(THERE, lambda x: x + 1, args=(1,)) == 2
    try:
        sync(THERE, fail, args=("on purpose",))
        right = False
    except ValueError as error:
        right = right and "on purpose" in str(error)
    return right and sync(THERE, back, args=(5,)) == 10


def functions() -> bool:
    """A function that the callee has not heard of: its number is announced."""
    global _turn
    _turn += 1
    function = globals()[f"function_{_turn % MANY}"]
    return rpc.rpc_sync(THERE, function) == rpc.rpc_sync(THERE, function, args=(1,)) == _turn % MANY


def tensors() -> bool:
    """Tensors on the CPU: tiny, inside the pickle, beside it, views of one another, of all types."""
    tiny, small, large = torch.arange(6.0), torch.arange(3000.0), torch.arange(60_000.0)
    base = torch.arange(64).reshape(8, 8)
    views = (base, base[2:4], base.t(), base[:, 1], base.expand(2, 8, 8))
    sync = rpc.rpc_sync
    right = torch.equal(sync(THERE, same, args=(tiny,)), tiny)
    right = right and all(map(torch.equal, sync(THERE, same, args=(tiny, small, large)), (tiny, small, large)))
    right = right and all(map(torch.equal, sync(THERE, same, args=views), views))
    kinds = [torch.ones(3, 2).to(kind) for kind in (torch.bool, torch.int8, torch.float16, torch.complex64, torch.float64)]
    right = right and all(map(torch.equal, sync(THERE, same, args=tuple(kinds)), kinds))
    conjugate = torch.tensor([1 + 2j, 3j]).conj()
    parameter = torch.nn.Parameter(torch.ones(3))
    found = sync(THERE, same, args=(conjugate, parameter, torch.empty(0, 3), torch.tensor(5)))
    return right and torch.equal(found[0].resolve_conj(), conjugate.resolve_conj()) and torch.equal(found[1], parameter)


def bulk() -> bool:
    """Tensors that go through shared memory, where there is some; and large bytes."""
    one, two, three = torch.arange(100_000.0), torch.arange(30_000), torch.zeros(400_000)
    found = rpc.rpc_sync(THERE, same, args=(one, two, three, one[10:20]))
    right = all(map(torch.equal, found, (one, two, three, one[10:20])))
    data = bytes(range(256)) * 2400
    return right and rpc.rpc_sync(THERE, same, args=(data, bytearray(data))) == (data, bytearray(data))


def layouts() -> bool:
    """Sparse, quantised, nested tensors."""
    dense = torch.tensor([[0.0, 1, 0], [2, 0, 3], [0, 0, 0]])
    sparse = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.repeat(2, 2).to_sparse_bsr((2, 3))]
    quantised = [
        torch.quantize_per_tensor(torch.arange(6.0), 0.5, 2, torch.qint8),
        torch.quantize_per_channel(dense[:2], torch.tensor([0.5, 0.1]), torch.tensor([0, 1]), 0, torch.quint8),
    ]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    found = rpc.rpc_sync(THERE, same, args=(*sparse, *quantised, nested))
    right = all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(found[:4], sparse, strict=True))
    right = right and all(torch.equal(a.dequantize(), b.dequantize()) for a, b in zip(found[4:6], quantised, strict=True))
    return right and all(map(torch.equal, found[6].unbind(), nested.unbind()))


class Marked(torch.Tensor):
    """A tensor of a class of the program: torch itself rebuilds it, in a storage that goes by itself."""


def unusual() -> bool:
    """Tensors that few programs send: of subclasses, several elements in a byte, nested views, without memory; storages."""
    dense = torch.arange(12.0).reshape(3, 4)
    nested = torch.nested.nested_tensor([dense, dense[:2]]).transpose(1, 2)
    packed = torch.quantize_per_tensor(dense, 0.5, 0, torch.quint4x2)
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), dense[:2], (3, 4)).coalesce()
    negative = torch.tensor([1 + 2j, 3j]).conj().imag
    plain = (dense.to_mkldnn(), negative, torch._efficientzerotensor(5), dense.as_subclass(Marked), dense[1:].to("meta"))
    found = rpc.rpc_sync(THERE, same, args=(nested, packed, hybrid, *plain))
    right = all(map(torch.equal, found[0].unbind(), nested.unbind())) and torch.equal(found[2].to_dense(), hybrid.to_dense())
    right = right and bytes(found[1].untyped_storage()) == bytes(packed.untyped_storage())
    right = right and torch.equal(found[3].to_dense(), dense) and torch.equal(found[4], negative)
    right = right and not found[5].any() and type(found[6]) is Marked and found[7].shape == (2, 4)
    empty, bare = rpc.rpc_sync(THERE, same, args=(torch.empty(0).as_subclass(Marked), dense.untyped_storage()))
    return right and type(empty) is Marked and not empty.numel() and bytes(bare) == bytes(dense.untyped_storage())


def references() -> bool:
    """References made, fetched, passed on, used and dropped."""
    reference = rpc.remote(THERE, double, args=(6,))
    right = reference.to_here() == 12 and rpc.rpc_sync(THERE, keep, args=(reference,)) == 12
    right = right and rpc.rpc_sync(THERE, keep, args=(rpc.RRef(13),)) == 13
    right = right and rpc.rpc_sync(THERE, give, args=(14,)).to_here() == 14
    counter = rpc.remote(THERE, Counter, args=(5,))
    return right and counter.rpc_sync().plus(1) == 6


def gradients() -> bool:
    """A backward pass through the other worker, and back."""
    x = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync(THERE, scale, args=(x, torch.tensor(2.0)))
        z = rpc.rpc_sync(THERE, scale, args=(y * 2, torch.tensor(3.0)))
        autograd.backward(context, [z.sum()])
        return torch.equal(autograd.get_gradients(context)[x], torch.full((4,), 12.0))


PROGRAMS: dict[str, Callable[[], bool]] = {
    "calls": calls, "functions": functions, "tensors": tensors, "bulk": bulk, "layouts": layouts, "unusual": unusual,
    "references": references, "gradients": gradients,
}  # fmt: skip


def well() -> bool:
    """A bit of everything: later calls are right."""
    return (
        rpc.rpc_sync(THERE, double, args=(2,)) == 4
        and rpc.rpc_sync(THERE, double) == 42
        and torch.equal(rpc.rpc_sync(THERE, same, args=(torch.arange(5.0),)), torch.arange(5.0))
        and rpc.rpc_sync(THERE, back, args=(3,)) == 6
        and rpc.remote(THERE, double, args=(6,)).to_here() == 12
    )
