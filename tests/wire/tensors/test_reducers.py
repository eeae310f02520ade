"""Plain tensors, parameters and storages: what arrives is what was sent, and nothing was copied or dragged along."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.errors import SerializationError
from remora.wire.pickler import pack, unpack
from remora.wire.raw_memory import fingerprint, from_bytes, unchanged
from remora.wire.tensors.rebuild import DTYPES, QUANTIZED
from remora.wire.tensors.reducers import reduce_tensor
from remora.wire.tensors.storages import INLINE_BYTES, LARGE_STORAGE, ROOM, Outgoing

PLAIN = sorted(set(DTYPES) - QUANTIZED)
LARGE = ROOM + 8  # bytes of a storage that goes beside the pickle


def there(value: Any) -> Any:
    """`value` as it arrives, in memory of its own."""
    packed = pack(value)
    return unpack(packed.body, [from_bytes(buffer) for buffer in packed.buffers])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as bytes, for dtypes that cannot even be compared."""
    size = tensor.itemsize
    stride = (*(step * size for step in tensor.stride()), 1)
    blank = torch.empty(0, dtype=torch.uint8)
    return blank.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (*tensor.shape, size), stride)


def assert_same(arrived: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(arrived) is type(sent)
    assert arrived.dtype is sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.requires_grad == sent.requires_grad
    assert arrived.is_leaf
    assert torch.equal(raw(arrived.detach().resolve_conj()), raw(sent.detach().resolve_conj()))


def assert_apart(arrived: torch.Tensor, sent: torch.Tensor) -> None:
    assert arrived.untyped_storage().data_ptr() != sent.untyped_storage().data_ptr()


def filled(nbytes: int) -> torch.UntypedStorage:
    return from_bytes(bytes(i % 251 for i in range(nbytes)))


def over(storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("nbytes", [96, LARGE])
@pytest.mark.parametrize("name", PLAIN)
def test_every_dtype(name: str, nbytes: int) -> None:
    dtype = DTYPES[name]
    count = nbytes // dtype.itemsize
    sent = over(filled(nbytes), dtype, 0, (count // 2, 2), (2, 1))
    arrived = there(sent)
    assert_same(arrived, sent)
    assert_apart(arrived, sent)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1), (4,), (2, 3, 4), (100, 100)])
def test_shapes(shape: tuple[int, ...]) -> None:
    sent = torch.randn(shape)
    arrived = there(sent)
    assert_same(arrived, sent)
    assert arrived.stride() == sent.stride()


@pytest.mark.parametrize("size", [5, 100])
def test_strides_are_kept(size: int) -> None:
    base = torch.randn(size, size + 1)
    for sent in (base.t(), base[1:, 1:], base[:, ::2], base.as_strided((size, size), (1, size)), base.unsqueeze(1)):
        arrived = there(sent)
        assert_same(arrived, sent)
        assert arrived.stride() == sent.stride()


def test_strides_that_do_not_matter_are_kept_too() -> None:
    for shape in ((1,), (1, 3), (3, 1), (1, 1, 2, 1)):
        plain = torch.ones(shape)
        for sent in (plain, plain.as_strided(shape, [0 if size == 1 else 1 for size in shape])):
            assert there(sent).stride() == sent.stride()
    image = torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last)
    assert there(image).is_contiguous(memory_format=torch.channels_last)


def test_what_arrives_is_ordinary_memory() -> None:
    for sent in (torch.ones(4), torch.ones(4, 4)[1:], torch.ones(LARGE)):
        arrived = there(sent)
        arrived += 1
        assert arrived.resize_(2 * LARGE).shape == (2 * LARGE,)
        assert sent.eq(1).all()


def test_a_large_tensor_is_sent_from_its_own_memory() -> None:
    sent = torch.randn(LARGE)
    packed = pack((sent, "x"))
    (buffer,) = packed.buffers
    assert len(packed.body) < 200
    assert packed.tensors == [sent]
    sent.fill_(7.0)  # visible through the buffer: nothing was copied
    assert bytes(buffer) == bytes(sent.untyped_storage())


def test_a_large_tensor_is_received_into_its_final_memory() -> None:
    sent = torch.randn(LARGE)
    packed = pack(sent)
    storage = from_bytes(packed.buffers[0])
    assert unpack(packed.body, [storage]).data_ptr() == storage.data_ptr()


def test_there_is_room_in_the_pickle_for_a_few_that_are_not_small() -> None:
    for size, inside in ((INLINE_BYTES, 20), (ROOM // 2, 2), (ROOM // 2 + 1, 1), (ROOM, 1), (ROOM + 1, 0)):
        sent = [torch.full((size,), value, dtype=torch.uint8) for value in range(20)]
        for message in (sent, [each.numpy() for each in sent], [each.untyped_storage() for each in sent]):
            assert len(pack(message).buffers) == 20 - inside, (size, type(message[0]))
        assert all(map(torch.equal, there(sent), sent))


def test_what_is_copied_into_the_pickle_may_change_and_what_is_not_may_not() -> None:
    inside, beside = torch.zeros(ROOM, dtype=torch.uint8), torch.zeros(ROOM, dtype=torch.uint8)
    packed = pack((inside, beside, inside[1:], beside.data))
    before = fingerprint(packed)
    inside.fill_(1)
    assert unchanged(packed, before)
    beside.fill_(1)
    assert not unchanged(packed, before)


def test_the_message_keeps_its_memory_alive() -> None:
    packed = pack(torch.full((LARGE,), 3.0))
    torch.full((LARGE,), 4.0)  # would take the place of the first one
    arrived = unpack(packed.body, [from_bytes(buffer) for buffer in packed.buffers])
    assert arrived.eq(3).all()


# Bits beside the data.


@pytest.mark.parametrize("size", [3, LARGE])
def test_conj_and_neg_bits(size: int) -> None:
    base = torch.randn(size, dtype=torch.complex64)
    for sent in (base.conj(), base.conj().imag, base.conj().conj(), base.conj()[1:], torch._neg_view(base).conj()):
        arrived = there(sent)
        assert (arrived.is_conj(), arrived.is_neg()) == (sent.is_conj(), sent.is_neg())
        assert torch.equal(arrived, sent)
        assert arrived._is_view() is False


@pytest.mark.parametrize("size", [3, LARGE])
def test_requires_grad_arrives_as_a_leaf(size: int) -> None:
    leaf = torch.randn(size, requires_grad=True)
    for sent in (leaf, leaf * 2, leaf[:2], leaf.to(torch.cfloat).conj()):
        with torch.no_grad():
            arrived = there(sent)
        assert_same(arrived, sent)
        assert arrived.requires_grad
        assert arrived.grad_fn is None
        arrived.abs().sum().backward()
        assert arrived.grad is not None
    assert not there(leaf.detach()).requires_grad


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.ones(3),
        lambda: torch.ones(1 << 16),
        lambda: torch.ones(9)[::2],
        lambda: [torch.ones(3)] * 2,
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.ones(2, 2).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
    ],
)
def test_what_arrives_is_no_inference_tensor(made: Callable[[], Any]) -> None:
    """Neither because its sender was under inference mode, nor because the thread that unpickles it is."""
    with torch.inference_mode():
        sent, arrived_there = made(), there(made())
    for arrived in (there(sent), there(made()), arrived_there):
        for tensor in arrived if isinstance(arrived, list) else [arrived]:
            assert not tensor.is_inference()


def test_modes_of_the_receiving_thread_do_not_matter() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    sent = [torch.arange(3.0), torch.arange(9.0).view(3, 3)[1:], torch.tensor(1.0)]
    body = pack(sent).body
    for mode in (FakeTensorMode(), torch.device("meta")):
        with mode:
            arrived = unpack(body)
        for a, s in zip(arrived, sent, strict=True):
            assert_same(a, s)


def test_attributes_set_on_a_tensor_travel() -> None:
    sent = torch.ones(2)
    sent.label = "x"  # type: ignore[attr-defined]
    sent.me = sent  # type: ignore[attr-defined]
    arrived = there(sent)
    assert arrived.label == "x"
    assert arrived.me is arrived
    assert there(torch.nn.Buffer(torch.ones(2))).persistent


# PeerSharedMemory.


@pytest.mark.parametrize("size", [8, LARGE])
def test_shared_storage_is_shared_on_arrival(size: int) -> None:
    base = torch.arange(float(size))
    a, whole, half, ints, again = there((base, base.view(2, -1), base[: size // 2 + 1], base.view(torch.int32), base))
    assert again is a
    a[0] = 42
    assert whole[0, 0] == half[0] == 42
    assert ints[0] == torch.tensor(42.0).view(torch.int32)
    assert len(pack((base, base.view(2, -1))).buffers) == (size == LARGE)


def test_a_parameter_shares_with_a_view_of_itself() -> None:
    parameter = torch.nn.Parameter(torch.zeros(LARGE))
    arrived, view = there((parameter, parameter.data.view(2, -1)))
    with torch.no_grad():
        arrived[0] = 1
    assert view[0, 0] == 1


def test_tied_weights_stay_tied() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    arrived = there(module)
    assert arrived[0].weight is arrived[1].weight


def test_temporary_storages_are_not_taken_for_each_other() -> None:
    class Temporary:  # its reduce makes a tensor that nobody else holds, again and again at the same address
        def __init__(self, number: int) -> None:
            self.number = number

        def __reduce__(self) -> Any:
            return torch.Tensor.tolist, (torch.full((2,), float(self.number)),)

    assert there([Temporary(i) for i in range(50)]) == [[i, i] for i in range(50)]


# Views of large storages.


def sent_bytes(value: object) -> int:
    packed = pack(value)
    return len(packed.body) + sum(buffer.nbytes for buffer in packed.buffers)


def test_a_view_does_not_drag_its_storage_along() -> None:
    base = torch.randn(1000, 1000)
    for sent in (base[3], base[10:20], base[:, 5], base[10:20, ::2], base.t()[5], base[0, 0], base[5:5]):
        arrived = there(sent)
        assert_same(arrived, sent)
        assert sent_bytes(sent) <= 2 * sent.numel() * 4 + 300
        assert arrived.untyped_storage().nbytes() <= 2 * sent.numel() * 4


def test_a_dense_view_is_sent_in_place_with_its_strides() -> None:
    base = torch.randn(100, 100, 100)
    for sent in (base[3:13], base[3:13].transpose(0, 2), base[3:13, 10:]):
        packed = pack(sent)
        assert packed.tensors == [sent]
        (buffer,) = packed.buffers
        assert buffer.nbytes < 2 * sent.nbytes
        arrived = there(sent)
        assert_same(arrived, sent)
        assert arrived.stride() == sent.stride()


def test_a_view_with_wide_gaps_is_compacted() -> None:
    base = torch.randn(1000, 1000)
    packed = pack(base[:, ::20])
    (buffer,) = packed.buffers
    assert buffer.nbytes == 1000 * 50 * 4
    base.fill_(0)
    assert any(bytes(buffer)), "the copy followed its original"


def test_a_gapped_conjugate_view_is_compacted() -> None:
    sent = torch.randn(4000, dtype=torch.complex64, requires_grad=True).conj()[::100]
    arrived = there(sent)
    assert torch.equal(arrived, sent)
    assert arrived.requires_grad


def test_views_of_the_same_rows_share_them() -> None:
    base = torch.zeros(1000, 1000)
    a, b = there((base[10:20], base[10:20].view(-1)))
    a[0, 0] = 1
    assert b[0] == 1


def test_a_view_shares_with_a_base_that_travels_anyway() -> None:
    base = torch.zeros(1000, 1000)
    packed = pack((base, base[3], base[:, 5]))
    assert len(packed.buffers) == 1
    whole, row, column = there((base, base[3], base[:, 5]))
    whole[3, 5] = 1
    assert row[5] == column[3] == 1


def test_expanded_tensors_stay_expanded() -> None:
    small, large = torch.randn(3, 1), torch.randn(100_000)
    for sent in (small.expand(3, 1_000_000), large[7].expand(1000, 1000), large[::1000].expand(500, 100)):
        arrived = there(sent)
        assert arrived.stride()[-2:].count(0) == sent.stride()[-2:].count(0)
        assert torch.equal(arrived, sent)
        assert sent_bytes(sent) < 2000


def test_overlapping_tensors() -> None:
    base = torch.arange(100_000.0)
    for sent in (base[:6].unfold(0, 3, 1), base.unfold(0, 50_000, 25_000), base[10:30].unfold(0, 3, 1)):
        arrived = there(sent)
        assert_same(arrived, sent)
        assert arrived.stride() == sent.stride()


def test_freed_storage_is_refused() -> None:
    freed, shifted = torch.ones(LARGE), torch.ones(8)[4:]
    freed.untyped_storage().resize_(0)
    shifted.untyped_storage().resize_(16)
    for sent in (freed, shifted):
        with pytest.raises(SerializationError, match="of its storage"):
            pack(sent)


# Other devices, parameters, subclasses, storages.


def test_other_devices_need_a_map() -> None:
    elsewhere: Any = SimpleNamespace(dtype=torch.float32, is_cpu=False, is_meta=False, device="cuda:0")
    with pytest.raises(RuntimeError, match=r"only supports CPU tensors by default, got one on cuda:0.*set_device_map"):
        reduce_tensor(Outgoing(), elsewhere)


def test_parameters() -> None:
    for size in (3, LARGE):
        for requires_grad in (True, False):
            sent = torch.nn.Parameter(torch.randn(size), requires_grad)
            sent.tag = "mine"  # type: ignore[attr-defined]
            arrived = there(sent)
            assert_same(arrived, sent)
            assert arrived.tag == "mine"


def test_a_parameter_is_tracked_by_its_own_writes() -> None:
    parameter = torch.nn.Parameter(torch.zeros(LARGE))
    packed = pack(parameter)
    before = packed.tensors[0]._version
    with torch.no_grad():
        parameter.add_(1)
    assert packed.tensors[0]._version > before


class Labelled(torch.Tensor):
    """A tensor subclass with state of its own."""


class Tied(torch.nn.Parameter):
    """A parameter subclass."""


@pytest.mark.parametrize("size", [3, LARGE])
def test_subclasses(size: int) -> None:
    sent = torch.randn(size).as_subclass(Labelled)
    sent.label = "x"  # type: ignore[attr-defined]
    packed = pack(sent)
    assert len(packed.body) < 4 * size + 1000
    assert packed.untracked == (size == LARGE)
    arrived = there(sent)
    assert type(arrived) is Labelled
    assert arrived.label == "x"
    assert torch.equal(arrived, sent)
    assert torch.equal(there(Tied(torch.ones(size))), torch.ones(size))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("size", [3, LARGE])
def test_storages(size: int) -> None:
    tensor = torch.arange(float(size))
    untyped, typed, arrived = there((tensor.untyped_storage(), tensor.storage(), tensor))
    assert type(untyped) is torch.UntypedStorage
    assert bytes(untyped) == bytes(tensor.untyped_storage())
    assert typed.dtype is torch.float32
    assert len({untyped.data_ptr(), typed.data_ptr(), arrived.data_ptr()}) == 1


def test_the_message_keeps_a_bare_storage_alive() -> None:
    storage = filled(LARGE)
    alive, content = weakref.ref(storage), bytes(storage)
    packed = pack(storage)
    del storage
    assert alive() is not None
    assert bytes(packed.buffers[0]) == content


def test_a_storage_after_its_tensor_shares_with_it() -> None:
    tensor = torch.arange(float(LARGE))
    arrived, storage = there((tensor, tensor.untyped_storage()))
    assert storage.data_ptr() == arrived.data_ptr()


def test_modules_and_optimizers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    arrived, state = there((module, optimizer.state_dict()))
    for name, value in module.state_dict().items():
        assert torch.equal(arrived.state_dict()[name], value)
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_bytes_that_do_not_fit_are_refused() -> None:
    body = pack(torch.ones(4)).body
    with pytest.raises(SerializationError, match=r"16 bytes came for a tensor of torch\.float32"):
        unpack(body.replace(b"K\x04\x85", b"K\x05\x85"))


def test_an_unknown_dtype_is_named() -> None:
    body = pack(torch.ones(4)).body
    with pytest.raises(SerializationError, match="has no dtype float3l"):
        unpack(body.replace(b"float32", b"float3l"))


def test_without_numpy() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch\n"
        "from remora.wire.pickler import pack, unpack\n"
        "from remora.wire.raw_memory import from_bytes\n"
        "sent = [torch.arange(4), torch.arange(10_000.).view(100, 100).t(), torch.nn.Linear(2, 2)]\n"
        "sent.append(torch.eye(3).to_sparse())\n"
        "packed = pack(sent)\n"
        "arrived = unpack(packed.body, [from_bytes(b) for b in packed.buffers])\n"
        "assert torch.equal(arrived[1], sent[1]) and torch.equal(arrived[3].to_dense(), torch.eye(3))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# Anything strided.


View = tuple[int, str, int, tuple[int, ...], tuple[int, ...]]  # storage, dtype, offset, shape, strides


@st.composite
def messages(draw: st.DrawFn) -> tuple[list[int], list[View]]:
    """Sizes of a few storages, small and large, and tensors of random dtypes, shapes and strides over them."""
    some = st.sampled_from([0, 16, 240, LARGE_STORAGE - 8, LARGE_STORAGE, INLINE_BYTES + 8, ROOM // 2, ROOM, LARGE])
    sizes = draw(st.lists(some, min_size=1, max_size=3))
    return sizes, draw(st.lists(views(sizes), min_size=1, max_size=4))


@st.composite
def views(draw: st.DrawFn, sizes: list[int]) -> View:
    number, name = draw(st.integers(0, len(sizes) - 1)), draw(st.sampled_from(PLAIN))
    room = sizes[number] // DTYPES[name].itemsize
    shape, stride, last = [], [], 0
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.sampled_from([0, 1, 2, 3, 64, 1000]))
        most = (room - 1 - last) // step + 1 if step else 5
        shape.append(draw(st.integers(0, max(0, min(most, 300)))))
        stride.append(step)
        last += max(0, shape[-1] - 1) * step
    if not room:
        shape, stride, last = [0, *shape], [1, *stride], 0
    return number, name, draw(st.integers(0, max(0, room - 1 - last))), tuple(shape), tuple(stride)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=300, deadline=None)
@given(messages())
def test_any_message_of_tensors(message: tuple[list[int], list[View]]) -> None:
    sizes, specs = message
    storages = [filled(size) for size in sizes]
    sent = [over(storages[n], DTYPES[name], offset, shape, stride) for n, name, offset, shape, stride in specs]
    arrived = there(sent)
    for a, s in zip(arrived, sent, strict=True):
        assert_same(a, s)
        assert a.untyped_storage().nbytes() <= s.untyped_storage().nbytes()
        if s.untyped_storage().nbytes():
            assert_apart(a, s)
    assert_shared_alike(sizes, [spec[0] for spec in specs], arrived, sent)


def assert_shared_alike(
    sizes: list[int], numbers: list[int], arrived: list[torch.Tensor], sent: list[torch.Tensor]
) -> None:
    """Two that shared a storage too small to be cut up share it still; two that did not, do not."""
    for number, a, s in zip(numbers, arrived, sent, strict=True):
        for other, b in zip(numbers, arrived, strict=True):
            shared = a.untyped_storage()._cdata == b.untyped_storage()._cdata
            if number != other:
                assert not shared
            elif sizes[number] < LARGE_STORAGE:
                assert shared
                assert (a.storage_offset(), a.stride()) == (s.storage_offset(), s.stride())


@settings(max_examples=100, deadline=None)
@given(messages())
def test_no_message_is_much_larger_than_its_tensors(message: tuple[list[int], list[View]]) -> None:
    sizes, specs = message
    storages = [filled(size) for size in sizes]
    sent = [over(storages[n], DTYPES[name], offset, shape, stride) for n, name, offset, shape, stride in specs]
    used = sum(max(LARGE_STORAGE, 2 * tensor.nbytes) for tensor in sent)
    assert sent_bytes(sent) <= min(used, sum(sizes) + sum(2 * tensor.nbytes for tensor in sent)) + 200 * len(sent)
