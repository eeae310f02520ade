"""Tensors by stencil: the receiver cannot tell, and whatever is not that simple goes the usual way."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.options import FAST_PATHS
from remora.wire import fast_pickle, pickler
from remora.wire.fast_pickle import DEPTH, WIDE
from remora.wire.pack_scope import PackScope, UnpackScope
from remora.wire.pickler import pack, unpack
from remora.wire.tensors.storages import INLINE_BYTES, ROOM

pytestmark = pytest.mark.skipif(not FAST_PATHS.stencils, reason="turned off")

DTYPES = sorted(fast_pickle._STENCILED, key=str)


def a_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300)
shapes = st.lists(st.sampled_from([2, 3, 5, 9]), max_size=3).map(tuple)
small = st.builds(a_tensor, st.sampled_from(DTYPES), shapes)
parts = atoms | small


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inside, max_size=4)
    return several.map(tuple) | several | st.dictionaries(st.text(max_size=5) | st.integers(), inside, max_size=4)


values = small | containers(parts | containers(parts | containers(parts)))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            type(left) is type(right)
            and left.dtype == right.dtype
            and left.stride() == right.stride()
            and bool(torch.equal(left, right))
        )
    if isinstance(left, tuple | list):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(same, left.values(), right.values()))
    return type(left) is type(right) and bool(left == right)


def has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple | list) and any(map(has_tensor, value)))


@given(values.filter(has_tensor))
def test_what_arrives_is_what_was_sent(value: Any) -> None:
    body = fast_pickle.pickled(value, [])
    assert body is not None
    assert same(unpack(body), value)
    usual = pickler._Packer().pack(value, PackScope())
    assert same(unpack(usual.body, [torch.UntypedStorage(len(each)) for each in usual.buffers]), unpack(body))


@given(values.filter(has_tensor))
def test_pack_uses_it(value: Any) -> None:
    assert pack(value).body == fast_pickle.pickled(value, []) == pack(value, PackScope()).body


@given(atoms | st.lists(atoms | st.lists(atoms, max_size=4).map(tuple) | st.just({}), max_size=4).map(tuple))
def test_what_is_plain_is_what_pickle_makes_of_it(value: Any) -> None:
    assert fast_pickle.is_plain(value)
    assert fast_pickle.pickled(value, []) == pickle.dumps(value, 5) == pack(value).body


@given(st.lists(parts, min_size=1, max_size=4), small)
def test_what_is_there_twice_is_one_on_arrival(inside: list[Any], beside: torch.Tensor) -> None:
    for each in (inside, {"a": inside}):
        first, second, _ = unpack(pack((each, each, beside)).body)
        assert first is second
        assert same(first, each)


def test_arrived_tensors_own_their_memory() -> None:
    tensor = a_tensor(torch.float32, (4,))
    arrived = unpack(pack((tensor,)).body)[0]
    before = tensor.clone()
    tensor.add_(1)
    assert torch.equal(arrived, before)
    assert arrived.resize_(10).shape == (10,)


shared = a_tensor(torch.float32, (4,))


def with_attribute() -> torch.Tensor:
    tensor = a_tensor(torch.float32, (4,))
    tensor.mark = "mine"  # type: ignore[attr-defined]
    return tensor


class Subclass(torch.Tensor):
    pass


def deep(depth: int) -> Any:
    value: Any = shared
    for _ in range(depth + 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(4, requires_grad=True),
        torch.ones(8)[2:6],
        torch.ones(2, 3).t(),
        torch.ones(2, 1),
        torch.empty(0),
        torch.ones(2, dtype=torch.complex64),
        torch._neg_view(torch.ones(4)),
        torch.ones(2, 2).to_sparse(),
        torch.ones(4, device="meta"),
        torch.ones(4).as_subclass(Subclass),
        torch.nn.Parameter(torch.ones(4), requires_grad=False),
        with_attribute(),
        (shared, shared),
        (shared, shared.view(2, 2)),
        ([shared], [shared]),
        [shared] * (WIDE + 1),
        list(range(WIDE + 1)),
        deep(DEPTH),
        {shared: 1},
        {(1, 2): shared},
        (shared, fast_pickle._PLACE),
        (shared, torch.float32),
        (shared, set()),
    ],
)
def test_what_is_not_that_simple_is_left_to_the_pickler(value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fast_pickle.pickled(value, []) is None
        packed = pack(value)
        assert packed.body


def test_what_was_shared_is_shared_on_arrival() -> None:
    first, second = unpack(pack((shared, shared.view(2, 2))).body)
    first.fill_(7)
    assert second[1, 1] == 7


LARGE = 100_000  # bytes
SHAPES = [(LARGE,), (2, LARGE), (3, 2, LARGE // 2), (2, 2, 2, LARGE // 4), (4,)]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)),
        max_size=5,
    ),
    st.lists(atoms, max_size=3),
)
def test_large_tensors_go_in_buffers(kinds: list[tuple[torch.dtype, tuple[int, ...]]], beside: list[Any]) -> None:
    tensors = [a_tensor(dtype, shape) for dtype, shape in kinds]
    value = ("name", (*tensors, *beside), {})
    packed = pack(value)
    usual = pickler._Packer().pack(value, PackScope())
    large = [tensor for tensor in tensors if tensor.nbytes > LARGE // 2]
    assert [bytes(each) for each in packed.buffers] == [bytes(each) for each in usual.buffers]
    assert [id(each) for each in packed.tensors] == [id(each) for each in usual.tensors] == [id(each) for each in large]
    assert len(packed.keepalive) == len(large)
    assert packed.untracked is usual.untracked is False
    if tensors:
        assert packed.body == fast_pickle.pickled(value, [])
    arrived = unpack(packed.body, [_storage(each) for each in packed.buffers])
    assert same(arrived[1], value[1])


def _storage(view: memoryview) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(view), dtype=torch.uint8).untyped_storage()


def test_large_tensors_that_are_not_that_simple() -> None:
    large = torch.ones(300, 300)
    for other in [large.t(), large[10:], large.view(1, 300, 300), large.clone().requires_grad_(), torch._neg_view(large)]:
        assert fast_pickle.pickled((other,), []) is None
    assert fast_pickle.pickled((large, large), []) is None  # they are one on arrival, too
    assert fast_pickle.pickled(tuple(torch.empty(70_000, dtype=torch.uint8) for _ in range(257)), []) is None
    packed = pack(tuple(torch.full((70_000,), n % 256, dtype=torch.uint8) for n in range(300)))
    arrived = unpack(packed.body, [_storage(each) for each in packed.buffers])
    assert [int(each[-1]) for each in arrived] == [n % 256 for n in range(300)]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_those_between_go_inside_while_there_is_room(thousands: list[int]) -> None:
    tensors = [torch.full((1000 * n,), n, dtype=torch.uint8) for n in thousands]
    beside: list[fast_pickle.Large] = []
    body = fast_pickle.pickled(tuple(tensors), beside)
    assert body is not None
    large = [tensor for tensor, _, _ in beside]
    assert all(each.nbytes > INLINE_BYTES for each in large)
    inside = [each.nbytes for each in tensors if not any(each is other for other in large)]
    assert sum(nbytes for nbytes in inside if nbytes > INLINE_BYTES) <= ROOM
    assert (tensors[0].nbytes <= ROOM) == (inside[:1] == [tensors[0].nbytes])  # the first one has all the room
    arrived = unpack(body, [each.untyped_storage() for each in large])
    assert all(map(torch.equal, arrived, tensors))


def recorded(value: Any, simple: bool) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """What arrives of a message of a recording, and the tensors with a history as each side sees them."""
    scope, arrival = PackScope(), UnpackScope()
    scope.links = []
    packed = pack(value, scope, simple=simple)
    arrived = unpack(packed.body, [_storage(each) for each in packed.buffers], arrival)
    return arrived, scope.links, [arrival.links[number] for number in sorted(arrival.links)]


histories = st.lists(st.sampled_from([(4,), (3000,), (2, 3000), (LARGE,), (2, 1)]).flatmap(
    lambda shape: st.booleans().map(lambda wanted: torch.rand(shape).requires_grad_(wanted))
), max_size=5)  # fmt: skip


@given(histories, st.lists(atoms, max_size=2))
def test_tensors_with_a_history_are_linked_as_usual(tensors: list[torch.Tensor], beside: list[Any]) -> None:
    value = ((7, (*tensors, *beside), {}), (1, 2, True))
    simple, usual = recorded(value, True), recorded(value, False)
    assert same(simple[0], usual[0])
    assert [id(each) for each in simple[1]] == [id(each) for each in usual[1]]
    assert [id(each) for each in simple[1]] == [id(each) for each in tensors if each.requires_grad]
    assert all(same(*each) for each in zip(simple[2], usual[2], strict=True))
    assert not any(each.requires_grad for each in simple[2])  # whoever unpacks the message gives them a history


def test_a_recorded_call_goes_by_stencil() -> None:
    linked = torch.rand(3000, requires_grad=True)
    links: list[torch.Tensor] = []
    assert fast_pickle.pickled(((7, (linked,), {}), (1, 2, True)), [], links) is not None
    assert links == [linked]


def test_nothing_is_left_out_of_a_recording_or_there_twice() -> None:
    scope = PackScope()
    scope.links = []
    linked = torch.ones(4, requires_grad=True)
    pack((linked, a_tensor(torch.float32, (4,))), scope)
    assert scope.links == [linked]
    scope.links = []
    pack((linked, [1]), scope)  # which is found out when the first one has been written
    assert scope.links == [linked]
    scope.links = []
    pack((linked, lambda: None), scope)
    assert scope.links == [linked]


def test_more_tensors_with_a_history_than_fit_into_a_byte() -> None:
    value = tuple(torch.full((2,), float(n), requires_grad=True) for n in range(300))
    assert fast_pickle.pickled(value, [], []) is None
    arrived, links, found = recorded(value, True)
    assert [id(each) for each in links] == [id(each) for each in value]
    assert [float(each[0]) for each in found] == [float(each[0]) for each in arrived] == [float(n) for n in range(300)]


def test_a_function_that_has_no_name_goes_by_value_with_its_tensors() -> None:
    function, args, _ = unpack(pack((lambda x: x + 1, (a_tensor(torch.int64, (2,)),), {})).body)
    assert torch.equal(function(*args), args[0] + 1)


def test_the_number_of_stencils_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_pickle, "_stencils", dict.fromkeys(range(4096)))
    assert fast_pickle.pickled(torch.ones(7), []) is None


def test_long_texts_beside_tensors() -> None:
    """Pickle cuts them into frames."""
    value = ("x" * 70_000, a_tensor(torch.float32, (4,)), b"y" * 140_000, a_tensor(torch.int64, (2, 2)), "z" * 70_000)
    body = fast_pickle.pickled(value, [])
    assert body is not None
    assert same(pickle.loads(body), value)


class Ticket:
    """Something with a writer: known by its number among those of the message."""


def write_ticket(ticket: object, scope: PackScope) -> bytes:
    scope.attachments.append(ticket)
    return pickle.BININT1 + bytes([len(scope.attachments)])


@pytest.fixture
def tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fast_pickle._writers, Ticket, write_ticket)


@pytest.mark.usefixtures("tickets")
def test_what_has_a_writer_is_written_by_it() -> None:
    for make, expected in (
        (lambda a, b, t: a, lambda t: 1),
        (lambda a, b, t: (a, t, [b], {"x": 1}), lambda t: (1, t, [2], {"x": 1})),
        (lambda a, b, t: {"a": (7, "text"), "b": [t, (a, (b,))]}, lambda t: {"a": (7, "text"), "b": [t, (1, (2,))]}),
    ):
        scope = PackScope()
        tensor = a_tensor(torch.float32, (4,))
        value = make(Ticket(), Ticket(), tensor)  # type: ignore[no-untyped-call]
        assert same(unpack(pack(value, scope).body), expected(tensor))  # type: ignore[no-untyped-call]
        assert all(type(each) is Ticket for each in scope.attachments)


@pytest.mark.usefixtures("tickets")
def test_what_is_packed_is_there_until_it_is_packed() -> None:
    others: list[torch.Tensor] = []

    def clear(ticket: object, scope: PackScope) -> bytes:  # as another thread may do at any moment
        arguments.clear()
        others.extend(torch.zeros(1024) for _ in range(100))  # in memory that is free
        return write_ticket(ticket, scope)

    fast_pickle.register_writer(Ticket, clear)
    arguments = [torch.ones(1024), torch.ones(1024)]
    assert same(unpack(pack((arguments, Ticket())).body), ([torch.ones(1024)] * 2, 1))


@pytest.mark.usefixtures("tickets")
def test_who_has_no_scope_is_told_that_one_is_needed() -> None:
    for value in (Ticket(), (1, Ticket()), ([Ticket()],)):
        with pytest.raises(fast_pickle.NeedsScope):
            fast_pickle.pickled(value, [])


@pytest.mark.usefixtures("tickets")
def test_what_was_written_in_vain_is_taken_back() -> None:
    undone: list[str] = []
    twice = Ticket()

    def write_with_undo(ticket: object, scope: PackScope) -> bytes:
        scope.undo.append(lambda: undone.append("now"))
        return write_ticket(ticket, scope)

    fast_pickle.register_writer(Ticket, write_with_undo)
    for value in ((Ticket(), object()), (twice, twice), (Ticket(), fast_pickle._PLACE)):
        scope = PackScope()
        scope.attachments.append("before")
        assert pickler.pack_simply(value, True, scope) is None
        assert scope.attachments == ["before"]
        assert undone == ["now"]
        assert not scope.undo
        undone.clear()


@pytest.mark.usefixtures("tickets")
def test_a_writer_that_fails_leaves_nothing_behind() -> None:
    def fail(ticket: object, scope: PackScope) -> bytes:
        scope.attachments.append(ticket)
        raise ConnectionError("nobody there")

    fast_pickle.register_writer(Ticket, fail)
    scope = PackScope()
    with pytest.raises(ConnectionError, match="nobody there"):
        pack((1, Ticket()), scope)
    assert not scope.attachments
