"""Tensors in calls are values: what arrives is what was there when the call was made, in shape, kind and sharing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from remora import rpc


def echo(value: Any) -> Any:
    return value


def describe(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.requires_grad, t.is_conj(), t.is_neg()


def storage_size(t: torch.Tensor) -> int:
    return t.untyped_storage().nbytes()


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    a.fill_(9.0)
    return bool((b == 9.0).any())


def change(t: torch.Tensor) -> torch.Tensor:
    return t.add_(1.0)


def sum_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([t.sum() for t in tensors]).sum())


def make(n: int) -> list[torch.Tensor]:
    return [torch.full((3,), float(i)) for i in range(n)]


TENSORS = {
    "empty": torch.empty(0),
    "empty with a shape": torch.empty(0, 3),
    "0-d": torch.tensor(3.5),
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "int64": torch.arange(5),
    "float64": torch.rand(3, dtype=torch.float64),
    "bfloat16": torch.rand(3).bfloat16(),
    "complex": torch.rand(3, dtype=torch.complex64),
    "conjugated": torch.rand(3, dtype=torch.complex64).conj(),
    "negated": torch.rand(3, dtype=torch.complex64).conj().imag,
    "transposed": torch.rand(3, 4).t(),
    "strided": torch.rand(10)[::3],
    "expanded": torch.rand(1, 3).expand(4, 3),
    "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "requires grad": torch.rand(3, requires_grad=True),
    "large": torch.rand(300, 300),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_arrives_as_it_is(me: str, tensor: torch.Tensor) -> None:
    back = rpc.rpc_sync(me, echo, args=(tensor,))
    assert torch.equal(back.detach(), tensor.detach())
    assert describe(back)[3:] == describe(tensor)[3:]
    assert describe(back)[0] == describe(tensor)[0]
    assert back.stride() == tensor.stride()
    assert rpc.rpc_sync(me, describe, args=(tensor,))[3:] == describe(tensor)[3:]
    assert rpc.rpc_async(me, echo, args=(tensor,)).wait().shape == tensor.shape


def test_sparse_tensors(me: str) -> None:
    coo = torch.eye(3).to_sparse()
    csr = torch.eye(3).to_sparse_csr()
    for sparse in (coo, csr):
        back = rpc.rpc_sync(me, echo, args=(sparse,))
        assert back.layout == sparse.layout
        assert torch.equal(back.to_dense(), torch.eye(3))


def test_a_quantized_tensor(me: str) -> None:
    quantized = torch.quantize_per_tensor(torch.rand(5), 0.1, 3, torch.quint8)
    back = rpc.rpc_sync(me, echo, args=(quantized,))
    assert torch.equal(back.dequantize(), quantized.dequantize())
    assert back.q_scale() == quantized.q_scale()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_never_ends_the_process(me: str, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=layout)
    back = rpc.rpc_sync(me, echo, args=(nested,))
    assert [part.shape for part in back.unbind()] == [(2, 3), (4, 3)]
    assert all(torch.equal(a, b) for a, b in zip(back.unbind(), nested.unbind(), strict=True))


def test_parameters_and_modules_keep_their_type(me: str) -> None:
    parameter = torch.nn.Parameter(torch.rand(3))
    back = rpc.rpc_sync(me, echo, args=(parameter,))
    assert type(back) is torch.nn.Parameter
    assert back.requires_grad
    layer = rpc.rpc_sync(me, echo, args=(torch.nn.Linear(2, 2),))
    assert isinstance(layer.weight, torch.nn.Parameter)


def test_a_meta_tensor_arrives_or_is_refused_in_words(me: str) -> None:
    words = ""
    try:
        back = rpc.rpc_sync(me, echo, args=(torch.empty(3, device="meta"),))
    except RuntimeError as error:
        words = str(error)
    assert "meta" in words or (back.device.type, back.shape) == ("meta", (3,))


def test_tensors_that_share_memory_still_share_it(me: str) -> None:
    base = torch.zeros(10)
    assert rpc.rpc_sync(me, share, args=(base[:6], base[4:]))
    assert rpc.rpc_sync(me, share, args=(base, base))
    assert not rpc.rpc_sync(me, share, args=(base, base.clone()))
    assert not base.any(), "and not with the sender"


def test_large_tensors_that_share_memory_still_share_it(me: str) -> None:
    base = torch.zeros(1 << 17)
    assert rpc.rpc_sync(me, share, args=(base, base[:5]))
    assert rpc.rpc_sync(me, share, args=(base[: 3 << 15], base[1 << 15 :]))
    first, second = rpc.rpc_sync(me, echo, args=((base, base.view(2, -1)),))
    first.fill_(3.0)
    assert second[1, 5] == 3.0


def test_a_small_view_does_not_drag_its_huge_storage_along(me: str) -> None:
    huge = torch.zeros(1 << 22)
    assert rpc.rpc_sync(me, storage_size, args=(huge[5:9],)) < 1000
    assert storage_size(rpc.rpc_sync(me, lambda: torch.zeros(1 << 20)[:3])) < 1000


@pytest.mark.parametrize("n", [3, 1 << 20], ids=["small", "large"])
def test_neither_end_sees_what_the_other_does(me: str, n: int) -> None:
    mine = torch.zeros(n)
    theirs = rpc.rpc_sync(me, change, args=(mine,))
    assert not mine.any()
    assert theirs.sum() == n
    theirs.fill_(5.0)
    assert not mine.any()


@pytest.mark.parametrize("nbytes", [1 << 10, 200 << 10, 50 << 20], ids=["1K", "200K", "50M"])
@pytest.mark.parametrize("first", [True, False], ids=["first call", "connected"])
def test_changes_after_an_asynchronous_call_returned_are_not_seen(me: str, nbytes: int, first: bool) -> None:
    if not first:
        rpc.rpc_sync(me, echo, args=(1,))
    tensor = torch.zeros(nbytes // 4)
    future = rpc.rpc_async(me, torch.sum, args=(tensor,))
    tensor.fill_(1.0)
    assert future.wait().item() == 0.0


@pytest.mark.parametrize("nbytes", [1 << 10, 200 << 10, 8 << 20], ids=["1K", "200K", "8M"])
def test_changes_through_numpy_after_the_call_returned_are_not_seen(me: str, nbytes: int) -> None:
    """Memory that torch does not keep an eye on."""
    array = np.zeros(nbytes // 4, dtype=np.float32)
    future = rpc.rpc_async(me, np.sum, args=(array,))
    array[:] = 1.0
    assert future.wait() == 0.0
    tensor = torch.zeros(nbytes // 4)
    view = tensor.numpy()
    total = rpc.rpc_async(me, torch.sum, args=(tensor,))
    view[:] = 1.0
    assert total.wait().item() == 0.0


_parameters = torch.zeros(2 << 20)


def pull() -> torch.Tensor:
    return _parameters


def push() -> None:
    _parameters.add_(1.0)


def test_a_reply_that_is_changed_right_after_is_seen_as_it_was(me: str) -> None:
    """A parameter server: what it sends is what it goes on working on. Each pull is all of one step, never a mixture."""
    _parameters.zero_()
    for _ in range(10):
        pulled = rpc.rpc_async(me, pull)
        pushed = rpc.rpc_async(me, push)
        values = pulled.wait().unique()
        assert len(values) <= 2  # pull and push may run at the same time; what is read while it is written is a mixture
        pushed.wait()


def test_a_reply_changed_by_a_later_call_is_seen_as_it_was(me: str) -> None:
    _parameters.zero_()
    for step in range(10):
        pulled = rpc.rpc_async(me, pull).wait()
        rpc.rpc_sync(me, push)
        assert pulled.unique().tolist() == [float(step)]


def test_two_hundred_megabytes_there_and_back(me: str) -> None:
    tensor = torch.arange(50 << 20, dtype=torch.int32)
    back = rpc.rpc_sync(me, echo, args=(tensor,))
    assert torch.equal(back, tensor)


def test_twenty_thousand_tensors_in_one_call(me: str) -> None:
    tensors = [torch.full((4,), 0.5) for _ in range(20_000)]
    assert rpc.rpc_sync(me, sum_of, args=(tensors,)) == 40_000.0
    back = rpc.rpc_sync(me, make, args=(20_000,))
    assert len(back) == 20_000
    assert back[19_999].tolist() == [19_999.0] * 3


def test_thousands_of_larger_tensors_in_one_call(me: str) -> None:
    """Too large to be part of the pickle, more than one system call takes."""
    tensors = [torch.full((2048,), float(i % 7)) for i in range(3_000)]
    back = rpc.rpc_sync(me, echo, args=(tensors,))
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


@pytest.mark.parametrize("size", [0, 1, 1 << 15, (1 << 15) + 1, 1 << 17, 1 << 18, (1 << 18) + 1, 1 << 20])
def test_bytes_and_arrays_of_all_sizes(me: str, size: int) -> None:
    """Sizes around the limits of what travels inside the pickle, in one buffer, and in several reads."""
    data = bytes(i % 251 for i in range(min(size, 1000))) * (size // 1000 + 1)
    assert rpc.rpc_sync(me, echo, args=(data[:size],)) == data[:size]
    array = np.frombuffer(data[:size], dtype=np.uint8)
    assert np.array_equal(rpc.rpc_sync(me, echo, args=(array,)), array)
    tensor = torch.frombuffer(bytearray(data[:size]), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    assert torch.equal(rpc.rpc_sync(me, echo, args=(tensor,)), tensor)


def test_what_arrives_can_be_written_to(me: str) -> None:
    for n in (4, 1 << 12, 1 << 18):
        rpc.rpc_sync(me, echo, args=(torch.zeros(n),)).add_(1.0)
        rpc.rpc_sync(me, echo, args=(np.zeros(n),))[:] = 1.0
