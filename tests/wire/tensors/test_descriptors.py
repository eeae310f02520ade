"""What a message says of a tensor is checked against the bytes that came, before torch sees it.

Without that, torch makes the storage larger: the tensor shows what was in that memory before, and those that lay in the old
one lie in memory that was freed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from remora.errors import SerializationError
from remora.wire import large_bytes
from remora.wire.pack_scope import incoming
from remora.wire.pickler import pack, unpack
from remora.wire.raw_memory import from_bytes
from remora.wire.tensors import layouts, rebuild, reducers
from tests.thorough import THOROUGH

HUGE = 1 << 62
# (offset, shape, strides) over 64 bytes, for elements of 4.
BEYOND: list[tuple[Any, Any, Any]] = [
    (0, (17,), (1,)),
    (1, (16,), (1,)),
    (16, (), ()),
    (0, (4, 4), (5, 1)),
    (0, (2,), (16,)),
    (0, (HUGE,), (1,)),
    (0, (HUGE, HUGE), (0, 0)),
    (0, (1 << 32, 1 << 32), (0, 0)),
    (0, (2,), (1 << 63,)),
    (0, (2,), (-1,)),
    (0, (-1,), (1,)),
    (-1, (1,), (1,)),
    (1 << 61, (1,), (1,)),
    (1 << 61, (0,), (1,)),
    (0, (0,), (1 << 61,)),
    (0, (4,), (1, 1)),
    (0, (4, 4), (1,)),
    (0, (4.0,), (1,)),
    (0.5, (1,), (1,)),
    (0, ("4",), (1,)),
    (0, (True,), (None,)),
]
WITHIN: list[tuple[Any, Any, Any]] = [
    (0, (16,), (1,)),
    (15, (), ()),
    (0, (1 << 40,), (0,)),
    (3, (2, 2), (10, 2)),
    (16, (0,), (1,)),
    (100, (0, 7), (1, 1)),
    (0, (4, 4), (4, 1)),
]


@pytest.fixture
def buffers() -> Any:
    """One buffer of 64 bytes, in a message that is being unpacked."""
    outer = incoming.frame
    storage = from_bytes(bytes(range(64)))
    incoming.frame = ([storage], None)
    yield storage
    incoming.frame = outer


def sources(buffers: torch.UntypedStorage) -> list[Any]:
    over = torch.empty(0).set_(buffers)
    return [0, bytes(64), over, over.view(torch.int32), buffers]


@pytest.mark.parametrize(("offset", "shape", "stride"), BEYOND)
def test_a_tensor_larger_than_its_bytes_is_refused(
    buffers: torch.UntypedStorage, offset: Any, shape: Any, stride: Any
) -> None:
    pointer = buffers.data_ptr()
    for source in sources(buffers):
        builds: list[Callable[[], object]] = [
            lambda source=source: rebuild.strided(source, "float32", offset, shape, stride),
            lambda source=source: rebuild.strided_on("cpu", source, "float32", offset, shape, stride, 0),
            lambda source=source: layouts._quantized("qint32", (0.1, 0), source, offset, shape, stride, "cpu"),
        ]
        for build in builds:
            with pytest.raises(SerializationError):
                build()
        if isinstance(source, torch.Tensor):
            with pytest.raises(SerializationError):
                reducers.linked_tensor(0, rebuild.strided, (source, "float32", offset, shape, stride))
    assert (buffers.nbytes(), buffers.data_ptr()) == (64, pointer), "the storage is what it was"


@pytest.mark.parametrize(("offset", "shape", "stride"), WITHIN)
def test_and_whatever_lies_within_is_not(buffers: torch.UntypedStorage, offset: int, shape: Any, stride: Any) -> None:
    for source in sources(buffers):
        made = rebuild.strided(source, "float32", offset, shape, stride)
        assert (tuple(made.shape), made.stride(), made.storage_offset()) == (shape, stride, offset)


@pytest.mark.parametrize("shape", [(4,), (6,), (1 << 62,), (1 << 32, 1 << 32), (-5, -1), (5.0,), ("5",), ([5],), (1 << 70,)])
def test_a_small_tensor_has_just_the_bytes_that_came(shape: Any) -> None:
    with pytest.raises((SerializationError, TypeError, RuntimeError)):
        reducers._small(bytes(20), "float32", shape)


@pytest.mark.parametrize("number", [-1, 1, 1 << 40, 0.0, "0", None, True])
def test_a_buffer_that_did_not_come_is_refused(buffers: torch.UntypedStorage, number: Any) -> None:
    for build in (large_bytes._bytes, large_bytes._bytearray, rebuild.buffer_at):
        with pytest.raises(SerializationError, match="no buffer"):
            build(number)
    with pytest.raises(SerializationError):
        rebuild.strided(number, "float32", 0, (1,), (1,))


@pytest.mark.parametrize(("flags", "name"), [(8, "float32"), (-1, "float32"), (rebuild.CONJ, "float32"), ("1", "int8")])
def test_bits_that_a_tensor_cannot_have_are_refused(buffers: torch.UntypedStorage, flags: Any, name: str) -> None:
    with pytest.raises(SerializationError, match="flags"):
        rebuild.strided(0, name, 0, (1,), (1,), flags)


@pytest.mark.parametrize("name", ["float33", "", None, 3])
def test_types_that_do_not_exist_are_refused(buffers: torch.UntypedStorage, name: Any) -> None:
    with pytest.raises(SerializationError, match="no dtype"):
        rebuild.strided(0, name, 0, (1,), (1,))
    with pytest.raises(SerializationError, match="no dtype"):
        layouts._meta(name, (1,), (1,), 0)


def test_a_tensor_is_where_its_memory_is(buffers: torch.UntypedStorage) -> None:
    with pytest.raises(SerializationError, match="memory on cpu"):
        rebuild.strided_on("meta", buffers, "float32", 0, (1,), (1,), 0)
    with pytest.raises(SerializationError):
        rebuild.strided(torch.UntypedStorage(64, device="meta"), "float32", 0, (1,), (1,))  # type: ignore[arg-type]


def test_zeros_that_take_no_bytes_take_no_memory() -> None:
    made = rebuild.zeros("float32", (1 << 29,), 0)  # 2 GiB
    assert made[-1].item() == 0.0
    made[5] = 1.0
    assert made[:7].tolist() == [0.0] * 5 + [1.0, 0.0]
    for shape in ((1 << 62,), (1 << 33, 1 << 33), (-1,)):
        with pytest.raises(SerializationError):
            rebuild.zeros("float32", shape, 0)


def test_zeros_of_any_size_are_fresh_and_cannot_be_made_larger() -> None:
    """The message describes their memory and does not carry it: nothing but zeros may be there, whatever size it says."""
    for size in (1, 5, 4095, 5120, 1 << 20):
        junk = torch.full((size,), 7.0)
        del junk  # what was in memory of this size before
        storage = rebuild.zeros("float32", (size,), 0).untyped_storage()
        assert not torch.empty(0, dtype=torch.uint8).set_(storage).any()
        assert storage.nbytes() == 4 * size
        with pytest.raises(RuntimeError, match="not resizable"):
            torch.empty(0).set_(storage, 0, (size + 1,), (1,))


class Sub(torch.Tensor):
    """A tensor of a class of the program: torch rebuilds it."""


@pytest.mark.parametrize("size", [0, 100, 200_000])
def test_a_storage_by_itself_cannot_be_made_larger(size: int) -> None:
    """Torch puts tensors of subclasses into it, and believes what the message says of them."""
    arrived = unpack_packed(torch.ones(size).untyped_storage())
    assert arrived.nbytes() == 4 * size
    for storage in (arrived, rebuild.bare_storage_on("cpu", bytes(4 * size))):
        with pytest.raises(RuntimeError, match="not resizable"):
            torch.empty(0).set_(storage, 0, (size + 1,), (1,))
    same = unpack_packed(torch.arange(size).as_subclass(Sub))
    assert type(same) is Sub
    assert same.tolist() == list(range(size))


def unpack_packed(value: Any) -> Any:
    packed = pack(value)
    return unpack(packed.body, [from_bytes(bytes(buffer)) for buffer in packed.buffers])


# Sparse tensors: an index beyond the shape is a write beyond the memory of the dense one.

I = torch.tensor  # noqa: E741


@pytest.mark.parametrize(
    ("indices", "values", "shape", "coalesced"),
    [
        (I([[0, 5]]), torch.ones(2), (5,), False),
        (I([[0, -1]]), torch.ones(2), (5,), False),
        (I([[0, 1 << 40]]), torch.ones(2), (5,), False),
        (I([[3, 1]]), torch.ones(2), (5,), True),  # not in order
        (I([[1, 1]]), torch.ones(2), (5,), True),  # twice
        (I([[0, 1, 2]]), torch.ones(2), (5,), False),
        (I([[0, 1]]), torch.ones(2), (5, 5), False),
        (I([[0, 1]]), torch.ones(2, 3), (5, 4), False),
        (I([[0, 1]]), torch.ones(2), (-5,), False),
        (I([0, 1]), torch.ones(2), (5,), False),
    ],
)
def test_a_sparse_tensor_that_makes_no_sense_is_refused(indices: Any, values: Any, shape: Any, coalesced: bool) -> None:
    with pytest.raises(SerializationError, match=r"not valid|cannot have"):
        layouts._coo(indices, values, shape, coalesced, False)


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
@pytest.mark.parametrize(
    ("compressed", "plain"),
    [
        ([0, 1, 3], [0, 2]),
        ([0, 2, 1], [0, 1]),
        ([1, 1, 2], [0, 1]),
        ([0, 1, 2], [0, 9]),
        ([0, 1, 2], [0, -1]),
        ([0, 2], [0, 1]),
        ([0, 2, 2], [1, 0]),
    ],
)
def test_and_a_compressed_one(layout: str, compressed: list[int], plain: list[int]) -> None:
    blocks = layout in ("sparse_bsr", "sparse_bsc")
    values, shape = (torch.ones(2, 2, 2), (4, 4)) if blocks else (torch.ones(2), (2, 2))
    with pytest.raises(SerializationError, match="not valid"):
        layouts._compressed(layout, I(compressed), I(plain), values, shape, False)
    with pytest.raises(SerializationError, match="no compressed layout"):
        layouts._compressed("strided", I(compressed), I(plain), values, shape, False)


@pytest.mark.parametrize(
    ("sizes", "strides", "offsets"),
    [
        ([[2, 3], [2, 4]], [[3, 1], [4, 1]], [0, 6]),
        ([[2, 3]], [[3, 1]], [5]),
        ([[2, 3]], [[3, -1]], [0]),
        ([[2, -3]], [[3, 1]], [0]),
        ([[2, 3]], [[1 << 60, 1]], [0]),
        ([[2, 3]], [[3, 1]], [-1]),
        ([[2, 3]], [[3, 1]], [0, 0]),
        ([[2, 3]], [[3]], [0]),
        (3, 1, [0]),
        ([3], [1], [0]),
    ],
)
def test_and_a_nested_one(sizes: Any, strides: Any, offsets: Any) -> None:
    with pytest.raises(SerializationError, match="nested"):
        layouts._nested(torch.arange(10.0), I(sizes), I(strides), I(offsets), False)


@pytest.mark.parametrize("columns", [0, 1, 2])
def test_a_nested_one_without_rows_is_refused(columns: int) -> None:
    """Torch reads the first row, and ends the process."""
    table = torch.zeros(0, columns, dtype=torch.int64)
    with pytest.raises(SerializationError, match="nested"):
        layouts._nested(torch.arange(10.0), table, table, torch.zeros(0, dtype=torch.int64), False)


def _gapped(*numbers: int, between: int = 1 << 40) -> torch.Tensor:
    """These numbers in every tenth place of a tensor, and others between them."""
    wide = torch.full((10 * len(numbers),), between)
    wide[::10] = torch.tensor(numbers)
    return wide[::10]


def _negated(*numbers: int) -> torch.Tensor:
    """These numbers, for a reader that looks at a bit of the tensor; of the other sign, for one that looks at its memory."""
    tensor = -torch.tensor(numbers)
    torch._C._set_neg(tensor, True)
    return tensor


@pytest.mark.parametrize("spoil", [_gapped, _negated])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_tables_of_a_nested_one_are_what_torch_reads(which: int, spoil: Callable[..., torch.Tensor]) -> None:
    """Torch reads them number after number, whatever their strides."""
    parts = [I([2, 3]), I([1, 1]), I([0, 2])]
    good = [parts[0].view(2, 1), parts[1].view(2, 1), parts[2]]
    arrived = layouts._nested(torch.arange(5.0), *good, False)
    assert [each.tolist() for each in arrived.unbind()] == [[0.0, 1.0], [2.0, 3.0, 4.0]]
    bad = list(good)
    bad[which] = spoil(*parts[which].tolist()).view(good[which].shape)
    with pytest.raises(SerializationError, match="nested"):
        layouts._nested(torch.arange(5.0), *bad, False)


def test_the_tables_of_a_nested_one_are_not_changed_after_the_check() -> None:
    table = I([[2], [2]])
    arrived = layouts._nested(torch.arange(4.0), table, I([[1], [1]]), I([0, 2]), False)
    table.fill_(1 << 40)  # (another tensor of the message may have that memory)
    assert [each.tolist() for each in arrived.unbind()] == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("sparse_bsr", (1, 2, 0)), ("sparse_bsr", (1, 0, 2)), ("sparse_bsc", (1, 0, 2)), ("sparse_bsc", (1, 0, 0))],
)
def test_blocks_without_elements_are_refused(layout: str, shape: tuple[int, ...]) -> None:
    """Torch divides by their size when it makes a dense tensor of them, and ends the process."""
    with pytest.raises(SerializationError, match="not valid"):
        layouts._compressed(layout, I([0, 1]), I([0]), torch.ones(shape), (2, 2), False)


@pytest.mark.parametrize("name", sorted(rebuild.QUANTIZED))
def test_a_zero_tensor_is_of_no_quantised_type(name: str) -> None:
    """Torch ends the process when it makes one over memory."""
    with pytest.raises(SerializationError, match="zero tensor"):
        rebuild.zeros(name, (4,), 0)


def test_what_has_more_elements_than_came_is_not_copied() -> None:
    """A tensor may say each of its bytes many times. Where torch makes a copy of it as a whole, that would be memory for
    which no bytes came."""
    many = 1 << 40
    row, rows = torch.ones(1).expand(many), torch.zeros(1, dtype=torch.int64).expand(many)
    for refused in (
        lambda: layouts._quantized("qint8", (row, rows, 0), b"x", 0, (many,), (0,), "cpu"),
        lambda: layouts._mkldnn(row, False),
        lambda: layouts._nested(torch.ones(1), rows.view(many, 1), rows.view(many, 1), rows, False),
        lambda: layouts._coo(rows.view(1, many), row, (4,), True, False),
    ):
        with pytest.raises(SerializationError, match=r"elements|not valid|in one piece"):
            refused()
    diagonal = layouts._coo(I([0, 1]).expand(2, 2), torch.ones(2), (2, 2), True, False)  # this costs nothing
    assert diagonal.to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0, 3), (3, 0)])
@pytest.mark.parametrize("name", ["quint4x2", "quint2x4"])
def test_several_elements_in_a_byte_arrive_whatever_their_shape(name: str, shape: tuple[int, ...]) -> None:
    sent = torch._empty_affine_quantized(shape, scale=0.5, zero_point=0, dtype=getattr(torch, name))
    arrived = unpack_packed(sent)
    assert (arrived.shape, arrived.dtype) == (sent.shape, sent.dtype)
    assert bytes(arrived.untyped_storage()) == bytes(sent.untyped_storage())


def test_and_a_quantised_one() -> None:
    for name, quantizer, data, shape in [
        ("qint8", (float("nan"), 0), bytes(6), (2, 3)),
        ("qint8", (0.1, 1 << 40), bytes(6), (2, 3)),
        ("qint8", (0.1, 0.5), bytes(6), (2, 3)),
        ("qint8", (torch.ones(3), torch.zeros(3), 0), bytes(6), (2, 3)),
        ("qint8", (torch.ones(2), torch.zeros(3), 0), bytes(6), (2, 3)),
        ("qint8", (torch.ones(2), torch.zeros(2), 2), bytes(6), (2, 3)),
        ("qint8", (torch.ones(2), torch.zeros(2), -2), bytes(6), (2, 3)),
        ("quint4x2", (torch.ones(2), torch.zeros(2), 0), bytes(3), (2, 3)),
        ("quint4x2", (torch.ones(2), torch.zeros(2), 0), bytes(5), (2, 3)),
        ("float32", (0.1, 0), bytes(24), (2, 3)),
    ]:
        with pytest.raises(SerializationError):
            layouts._quantized(name, quantizer, data, 0, shape, (3, 1), "cpu")


def test_each_flipped_bit_of_a_pickle_with_tensors_is_an_error_or_a_value() -> None:
    """No crash, and no tensor that lies elsewhere than in what came."""
    sent = (torch.arange(6.0).view(2, 3).t(), torch.arange(9000), torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr())
    packed = pack(sent)
    outcomes = set()
    for bit in range(0, len(packed.body) * 8, 1 if THOROUGH else 7):
        body = bytearray(packed.body)
        body[bit // 8] ^= 1 << bit % 8
        if any(opcode in body for opcode in (pickle.LONG_BINPUT, pickle.BINPUT)) and body[bit // 8] in b"rqRJ\x8d\x8e\x96":
            continue  # the standard library itself reserves what such a number says
        try:
            made = unpack(bytes(body), [from_bytes(bytes(buffer)) for buffer in packed.buffers])
        except Exception as error:
            outcomes.add(type(error).__name__)
            continue
        for each in made if isinstance(made, tuple) else ():
            if isinstance(each, torch.Tensor) and each.layout is torch.strided and each.numel() < 1 << 20:
                each.sum() if not each.dtype.is_complex else each.clone()
                assert each.untyped_storage().nbytes() <= 1 << 18
            elif isinstance(each, torch.Tensor) and each.is_sparse and each.numel() < 1 << 20:
                each.to_dense()
    assert "SerializationError" in outcomes
