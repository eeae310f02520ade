"""Tensors that are not plain strided ones: they arrive as they were, or are refused by name. None ends the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from remora.errors import SerializationError
from remora.wire.pickler import pack, unpack
from remora.wire.raw_memory import fingerprint, from_bytes, unchanged

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def there(value: Any) -> Any:
    packed = pack(value)
    return unpack(packed.body, [from_bytes(buffer) for buffer in packed.buffers])


@pytest.mark.parametrize("size", [3, 2000])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_sparse_coo(size: int, requires_grad: bool) -> None:
    indices = torch.stack([torch.arange(size), torch.arange(size)])
    for values in (torch.randn(size), torch.randn(size, 3)):  # the second is hybrid
        shape = (size, size, *values.shape[1:])
        loose = torch.sparse_coo_tensor(indices.flip(1), values, shape, requires_grad=requires_grad)
        for sent in (loose, loose.detach().coalesce().requires_grad_(requires_grad)):
            arrived = there(sent)
            assert arrived.layout is torch.sparse_coo
            assert (arrived.is_coalesced(), arrived.requires_grad) == (sent.is_coalesced(), requires_grad)
            assert (arrived.dense_dim(), arrived.shape) == (sent.dense_dim(), sent.shape)
            assert torch.equal(arrived.to_dense(), sent.to_dense())


def test_sparse_coo_with_duplicates_and_empty() -> None:
    sent = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2))
    arrived = there(sent)
    assert arrived._nnz() == 2
    assert torch.equal(arrived.to_dense(), sent.to_dense())
    assert there(torch.sparse_coo_tensor(size=(2, 3)))._nnz() == 0


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_compressed_sparse(name: str, requires_grad: bool) -> None:
    layout = getattr(torch, name)
    blocks = {"blocksize": (2, 2)} if "bs" in name else {}
    for dense in (torch.eye(4), torch.eye(300)):
        sent = dense.to_sparse(layout=layout, **blocks).requires_grad_(requires_grad)
        arrived = there(sent)
        assert arrived.layout is layout
        assert arrived.requires_grad == requires_grad
        assert torch.equal(arrived.values(), sent.values())
        assert torch.equal(arrived.to_dense(), dense)


def test_writes_to_the_whole_are_seen_in_its_parts() -> None:
    dense = torch.eye(200).repeat(1, 100)
    for sent in (dense.to_sparse(), dense.to_sparse_csr(), torch.nested.nested_tensor([dense[0], dense[1, 1:]])):
        packed = pack(sent)
        before = fingerprint(packed)
        assert unchanged(packed, before)
        sent.mul_(2)
        assert not unchanged(packed, before)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantized_per_tensor(dtype: torch.dtype) -> None:
    for size in (6, 100_000):
        base = torch.quantize_per_tensor(torch.randn(size), 0.1, 3, dtype)
        for sent in (base, base.view(2, -1), base.view(2, -1).t(), base[::3], base[: size // 10]):
            arrived = there(sent)
            assert (arrived.q_scale(), arrived.q_zero_point()) == (0.1, 3)
            assert arrived.dtype is dtype
            assert torch.equal(arrived.int_repr(), sent.int_repr())


@pytest.mark.parametrize("zero_points", [torch.tensor([1, 2, 3]), torch.tensor([0.5, 0.25, 0.0])])
def test_quantized_per_channel(zero_points: torch.Tensor) -> None:
    sent = torch.quantize_per_channel(torch.randn(4, 3), torch.tensor([0.1, 0.2, 0.3]), zero_points, 1, torch.quint8)
    arrived = there(sent)
    assert arrived.qscheme() == sent.qscheme()
    assert arrived.q_per_channel_axis() == 1
    assert torch.equal(arrived.q_per_channel_zero_points(), sent.q_per_channel_zero_points())
    assert torch.equal(arrived.int_repr(), sent.int_repr())


def test_quantized_with_several_elements_in_a_byte() -> None:
    scales, zero_points = torch.tensor([0.1, 0.2]), torch.tensor([0.0, 0.0])
    sent = torch.quantize_per_channel(torch.rand(2, 4), scales, zero_points, 0, torch.quint4x2)
    assert torch.equal(there(sent).dequantize(), sent.dequantize())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_nested(requires_grad: bool) -> None:
    for sizes in ((2, 3), (2, 5000), (0, 1)):
        parts = [torch.randn(size, 2) for size in sizes]
        sent = torch.nested.nested_tensor(parts, requires_grad=requires_grad)
        arrived = there(sent)
        assert arrived.is_nested
        assert arrived.requires_grad == requires_grad
        for a, s in zip(arrived.unbind(), parts, strict=True):
            assert torch.equal(a, s)


def test_jagged() -> None:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    arrived = there(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert arrived.layout is torch.jagged
    for a, s in zip(arrived.unbind(), parts, strict=True):
        assert torch.equal(a, s)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no mkldnn")
def test_mkldnn() -> None:
    sent = torch.randn(3, 4)
    arrived = there(sent.to_mkldnn())
    assert arrived.is_mkldnn
    assert torch.equal(arrived.to_dense(), sent)


def test_meta() -> None:
    sent = torch.empty(3, 4, dtype=torch.half, device="meta").t()
    for arrived in (there(sent), there(torch.nn.Parameter(sent))):
        assert arrived.is_meta
        assert (arrived.shape, arrived.stride(), arrived.dtype) == ((4, 3), (1, 4), torch.half)
    assert there(torch.nn.Parameter(sent)).requires_grad
    assert there(sent.untyped_storage()).device.type == "meta"


def test_zero_tensor_without_memory() -> None:
    sent = torch._efficientzerotensor(3, dtype=torch.int16)
    arrived = there(sent)
    assert arrived.dtype is torch.int16
    assert arrived.tolist() == [0, 0, 0]


def test_attributes_of_an_unusual_tensor_travel() -> None:
    sent = torch.eye(2).to_sparse()
    sent.label = "x"  # type: ignore[attr-defined]
    assert there(sent).label == "x"


# Refused, with what it was.


def refused(value: object, text: str) -> None:
    with pytest.raises(SerializationError, match=text):
        pack(value)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    refused(fake, "FakeTensor .* has no data")
    refused(torch.nn.Parameter(fake), "FakeTensor .* has no data")


def inside_vmap(probe: Callable[[torch.Tensor], None]) -> None:
    torch.vmap(lambda x: (probe(x), x)[1])(torch.ones(2, 3))


def inside_grad(probe: Callable[[torch.Tensor], None]) -> None:
    torch.func.grad(lambda x: (probe(x), x.sum())[1])(torch.ones(2, 3))


def inside_functionalize(probe: Callable[[torch.Tensor], None]) -> None:
    probe(torch._to_functional_tensor(torch.ones(3)))


@pytest.mark.parametrize("inside", [inside_vmap, inside_grad, inside_functionalize])
def test_wrappers_of_tensors(inside: Callable[[Callable[[torch.Tensor], None]], None]) -> None:
    probed = []

    def probe(tensor: torch.Tensor) -> None:
        refused(tensor, "Cannot send a torch.Tensor")
        probed.append(tensor)

    inside(probe)
    assert probed
