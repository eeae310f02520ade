"""The parsers of the package, each fed with bytes directly. What they make of them is used, as a program would.

A receiver takes one sample: bytes, and the buffers that came beside them. It returns what it found, or raises. Which errors
are clear is in `CLEAR`; all others, and everything that the process does not survive, are findings.
"""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remora.agent.channel.function_table import Heard
from remora.agent.memory.shared import SharedMemory
from remora.errors import AuthenticationError, ProtocolError, RendezvousError, SerializationError
from remora.protocol.handshake import Accepted, Hello, Identity, Initiator, Responder
from remora.rendezvous.record import WorkerRecord
from remora.rendezvous.seal import RecordSeal
from remora.rendezvous.static_join import Roster
from remora.transport.shm import borrower as loans
from remora.transport.shm.lender import Lender
from remora.transport.shm.loan_reference import SHORT
from remora.vocabulary.ids import WorkerKey
from remora.wire import exceptions, frames, ref_header
from remora.wire.device_buffers import Landing, split, write_manifest
from remora.wire.enclosed import Missing
from remora.wire.frames import FrameReader
from remora.wire.id_codec import unpack_id, unpack_ids
from remora.wire.pack_scope import UnpackScope
from remora.wire.pickler import pack, unpack
from remora.wire.raw_memory import from_bytes
from tests.damage.mutations import Mutation, apply
from tests.damage.units import Unit
from tests.transport.returns import returns

SECRET = b"the secret of workers that are damaged"
MOST_ELEMENTS = 1 << 22  # of a tensor that is looked at as a whole
GROWTH = 256 << 20  # bytes that no single message of these sessions may cost, whatever it says


class Exposed(Exception):
    """Memory is used that did not come with the message."""


@dataclass(frozen=True)
class Sample:
    """What one receiver got in a captured session."""

    receiver: str
    data: bytes
    buffers: tuple[bytes, ...] = ()
    sizes: frozenset[int] | None = None  # of the storages that the message makes when it is not damaged


# What is captured.


def captured(record: Sequence[tuple[str, Unit]]) -> Iterator[Sample]:
    """The samples in the traffic between two workers."""
    for _, unit in record:
        if not unit.is_frame:
            continue
        yield Sample("stream", unit.data)
        for frame in frames_of(unit.data):
            yield from _of_frame(frame)


def frames_of(data: bytes) -> list[frames.Frame]:
    """The frames in some bytes."""
    reader, found = FrameReader(), []
    while data:
        space = reader.room
        n = min(len(space), len(data))
        space[:n] = data[:n]
        found += reader.received(n)
        data = data[n:]
    return found


def _of_frame(frame: frames.Frame) -> Iterator[Sample]:
    body = bytes(frame.body)
    enclosed = frame.enclosed.buffers
    buffers = () if isinstance(enclosed, Missing) else tuple(bytes(memoryview(_bytes_of(each))) for each in enclosed)
    if frame.kind == 0x47:
        yield Sample("function", body)
    elif frame.flags & frames.FAILED:
        yield Sample("failure", body)
    elif frame.kind in (0x107, 0x108, 0x10B, 0x10C, 0x10D) and not frame.flags & frames.RECORDED:
        yield Sample("ids", body[1:] if frame.kind == 0x10B else body)  # (before goodbyes is a byte)
    elif frame.flags & frames.REFERENCES:
        yield Sample("preamble", body, buffers)
        _, _, rest = ref_header.detach(body)
        yield Sample("body", bytes(rest), buffers)
    elif body and not frame.flags & frames.SHARED and frame.kind >= 0x100:
        yield Sample("body", body, buffers)


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy()) if storage.nbytes() else b""


def handshakes() -> Iterator[Sample]:
    """What the two ends of a handshake say. The receiver of each knows what came before."""
    machines = _ends()
    said = machines[0].start()
    for i in range(4):
        yield Sample(f"handshake {i}", said)
        said = machines[1 - i % 2].receive(said)


_ME, _PEER = Identity("worker0", 0, "a" * 32, "group"), Identity("worker1", 1, "b" * 32, "group")


def _ends() -> tuple[Initiator, Responder]:
    caller = Initiator(_ME, "s" * 32, 3, SECRET, expected=_PEER, nonce=b"n" * 16)
    return caller, Responder(_PEER, _admit, SECRET, nonce=b"m" * 16)


def _admit(hello: Hello) -> int:
    return 0


def records() -> Iterator[Sample]:
    """What workers write to the store."""
    workers = [
        WorkerRecord(f"worker{i}", i, f"{i}" * 32, "host", (f"unix:@remora-{i}", "tcp:127.0.0.1:5000"), {"memory": "x"})
        for i in range(2)
    ]
    yield Sample("record", workers[0].to_json())
    yield Sample("roster", Roster("group", tuple(workers)).to_json().encode())
    yield Sample("sealed", _seal.close("tcp port 1", "static/0/1", workers[0].to_json().decode()).encode())


def words() -> Iterator[Sample]:
    """What stands beside a pickle: loans that are given back, and the list of what lies on devices."""
    yield Sample("given back", struct.pack("<4Q", 1, SHORT, 1 << 63 | 5, 1 << 63 | 1 << 61 | 7))
    listed = write_manifest([("cpu", (0, 1)), ("cpu", b"t" + bytes(80)), ("?cpu", b"h" + bytes(8))])
    yield Sample("manifest", b"body" + listed)


# Inbox.


def _stream(sample: Sample) -> object:
    """Bytes as they come from a socket, in pieces."""
    reader, data = FrameReader(), sample.data
    chance = random.Random(len(data))
    sizes = [chance.choice((1, 7, 48, 1000, 1 << 18)) for _ in range(16)]
    found, i = [], 0
    before = _virtual()
    try:
        while data:
            space = reader.room
            n = min(len(space), len(data), sizes[i % 16])
            space[:n] = data[:n]
            found += reader.received(n)
            data, i = data[n:], i + 1
        promised = _virtual() - before
    finally:
        reader.drop()
    if promised > GROWTH:
        raise Exposed(f"{promised >> 20} MB were taken for a message of which {len(sample.data)} bytes came")
    return len(found)


def _virtual() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


MOST_MEMOS = 1 << 20


class BeyondUs(BaseException):
    """A pickle asks the unpickler of Python itself for memory: LONG_BINPUT and PUT make its memo as long as they say. What
    keeps damage away from there is the checksum of a frame; a member that writes it on purpose may run code anyway. It is no
    `Exception`: no receiver makes something else of it."""


def is_beyond_us(data: bytes) -> bool:
    """Return True if the unpickler would take memory for its memo by a number in this pickle."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("LONG_BINPUT", "PUT") and isinstance(argument, int) and argument > MOST_MEMOS:
                return True
    except Exception:  # it is damaged, and the unpickler comes no further
        pass
    return False


@contextlib.contextmanager
def memos_bounded() -> Iterator[None]:
    """Have what is unpickled looked through first, wherever in a message it is. What is parsed in another way has no such
    excuse."""
    loads = pickle.loads

    def bounded(data: bytes | bytearray | memoryview, /, **options: Any) -> Any:
        if is_beyond_us(bytes(data)):
            raise BeyondUs
        return loads(data, **options)

    pickle.loads = bounded  # type: ignore[assignment]
    try:
        yield
    finally:
        pickle.loads = loads


def _body(sample: Sample) -> object:
    value = _unpacked(sample.data, sample.buffers)
    return Use(sample.sizes).all_of(value)


def _unpacked(data: bytes, buffers: Sequence[bytes]) -> Any:
    arrival = _Arrival()
    landing = Landing([("cpu", (0, max(len(buffers), 1)))], _NoLender())
    return unpack(data, [from_bytes(each) for each in buffers], UnpackScope(None, arrival, landing))


class _Arrival:
    """References that came with a message."""

    def __init__(self) -> None:
        self.handles: list[object] = [object() for _ in range(4)]
        self.pending: list[object] = []


class _NoLender:
    """Nobody lends device memory."""

    def fetch(self, reference: bytes, device: torch.device) -> list[torch.UntypedStorage]:
        raise SerializationError("nothing is lent")  # as the real one does

    def try_out(self, reference: bytes, device: torch.device) -> None:
        pass

    def give_back(self, reference: bytes) -> None:
        pass


def _preamble(sample: Sample) -> object:
    creates, listed, rest = ref_header.detach(sample.data)
    return creates, len(listed), len(rest)


def _failure(sample: Sample) -> object:
    error = exceptions.load(sample.data)
    return f"{error!s} {error!r}"


def _ids(sample: Sample) -> object:
    return unpack_id(sample.data) if len(sample.data) == 16 else unpack_ids(sample.data)


def _function(sample: Sample) -> object:
    heard = Heard()
    heard.listen(1, sample.data)
    return heard.find(1)


def _handshake(sample: Sample) -> object:
    """Play a conversation up to the message of the sample, and give it that."""
    turn = int(sample.receiver[-1])
    machines = _ends()
    said = machines[0].start()
    for i in range(turn):
        said = machines[1 - i % 2].receive(said)
    machine = machines[1 - turn % 2]
    machine.receive(sample.data)
    result = machine.result
    if isinstance(result, Accepted) and not sample.data.startswith(said):
        raise Exposed(f"a handshake with a damaged message was accepted: {result}")
    return result


def _record(sample: Sample) -> object:
    return WorkerRecord.from_json(sample.data)


def _roster(sample: Sample) -> object:
    return Roster.from_json(sample.data.decode())


_seal = RecordSeal(SECRET, "a secret")


def _sealed(sample: Sample) -> object:
    return _seal.open("tcp port 1", "static/0/1", sample.data.decode(errors="replace"), "a store")


def _given_back(sample: Sample) -> object:
    """By a peer to which something is lent, and to one to which nothing is."""
    bulk = SharedMemory(1 << 20, 1 << 20, lambda: 0.0, lambda task: None)
    sharing = bulk.with_peer(WorkerKey(1, "b" * 32), "worker1")
    sharing.willing = True
    assert sharing.lend(pack(torch.zeros(50_000))) is not None
    lent = bulk.lender.counts()
    try:
        sharing.take_back(sample.data)
        if bulk.lender.counts() != lent:
            raise Exposed("a loan of which the number was not said came back")
        return lent
    finally:
        sharing.forget()


def _manifest(sample: Sample) -> object:
    body, manifest = split(sample.data)
    Landing(manifest, _NoLender()).storage((0, 0), torch.device("cpu"), [from_bytes(b"memory")])
    return len(body)


_lender = Lender(1 << 26)
_borrower = loans.Borrower()


def borrow_damaged(mutations: tuple[Mutation, ...]) -> str:
    """For the subject: lend some memory, and borrow it by a reference that is damaged. Both ends are in this process, so the
    arena is there."""
    views = [memoryview(bytes(range(256)) * 300), memoryview(bytes(90_000)), memoryview(b"x" * 500)]
    placement = _lender.lend(views, "peer", 0.0)
    assert placement is not None, "there is no memory to lend"
    try:
        placement.fill(views)
        _lender.filled(placement, 0.0)
        reference = bytes(placement.refer())
        return f"{type(_borrow(apply(mutations, reference))).__name__}"
    except (OSError, ValueError, ProtocolError) as error:
        return type(error).__name__
    finally:
        _lender.retract(placement, 0.0)


def _loan(sample: Sample) -> object:
    return borrow_damaged(pickle.loads(sample.data))


def _borrow(reference: bytes) -> object:
    """Borrow, and read what was borrowed."""
    storages, filling = _borrower.take(reference, 0.0)
    total = 0
    for storage in storages:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        total += int(flat[:: max(len(flat) // 1000, 1)].sum())
    del storages
    returns(_borrower)
    return total, filling


RECEIVERS: dict[str, Callable[[Sample], object]] = {
    "stream": _stream, "body": _body, "preamble": _preamble, "failure": _failure, "ids": _ids, "function": _function,
    "record": _record, "roster": _roster, "sealed": _sealed, "given back": _given_back, "manifest": _manifest, "loan": _loan,
    **{f"handshake {i}": _handshake for i in range(4)},
}  # fmt: skip

CLEAR: dict[str, tuple[type[BaseException], ...]] = {
    "stream": (ProtocolError,),
    "record": (RendezvousError,),
    "roster": (RendezvousError, UnicodeDecodeError),
    "sealed": (RendezvousError,),
    "given back": (ValueError,),
    "ids": (ProtocolError,),
    "preamble": (SerializationError,),
    "manifest": (SerializationError,),
    **{f"handshake {i}": (ProtocolError, AuthenticationError) for i in range(4)},
}
"""Which errors a receiver raises that is not behind a net. Where a message is unpickled, any `Exception` is told."""


class Use:
    """Looks at everything in a value that arrived, as a program may."""

    def __init__(self, sizes: frozenset[int] | None) -> None:
        self._sizes = sizes
        self._seen: set[int] = set()
        self._depth = 0

    def all_of(self, value: Any) -> int:
        """How many tensors there were."""
        if id(value) in self._seen or self._depth > 50:
            return 0
        self._seen.add(id(value))
        self._depth += 1
        try:
            if isinstance(value, torch.Tensor):
                self._tensor(value)
                return 1
            if isinstance(value, dict):
                return sum(self.all_of(each) for pair in value.items() for each in pair)
            if isinstance(value, list | tuple | set | frozenset):
                return sum(map(self.all_of, value))
            return 0
        finally:
            self._depth -= 1

    def _tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            return
        with torch.no_grad():
            if tensor.layout is torch.strided and not tensor.is_nested:
                self._strided(tensor)
            elif tensor.is_nested:
                for part in tensor.unbind():
                    self._strided(part)
            else:
                for part in _parts(tensor):
                    self._strided(part)
                if tensor.numel() <= MOST_ELEMENTS:
                    tensor.to_dense().sum()

    def _strided(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        have = storage.nbytes()
        if self._sizes is not None and have and have not in self._sizes and not _is_zero_tensor(storage):
            raise Exposed(f"a storage has {have} bytes, and the message has none of that size: {sorted(self._sizes)}")
        if tensor.numel():
            last = tensor.storage_offset() + sum(
                (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            per_byte = {torch.quint4x2: 2, torch.quint2x4: 4}.get(tensor.dtype, 1)
            needs = (last // per_byte + 1) * tensor.element_size()
            if needs > have or tensor.storage_offset() < 0:
                raise Exposed(f"a tensor {tuple(tensor.shape)} needs {needs} bytes of a storage of {have}")
        if 0 < tensor.numel() <= MOST_ELEMENTS:
            plain = tensor.dequantize() if tensor.is_quantized else tensor
            plain.resolve_conj().resolve_neg().clone()


def _is_zero_tensor(storage: torch.UntypedStorage) -> bool:
    """Whether this can be the storage of a zero tensor, the one value whose memory a message describes and does not carry:
    fresh zeros from the system, which torch cannot make larger. What torch allocates itself can be made larger."""
    return not storage.resizable() and not bool(torch.empty(0, dtype=torch.uint8).set_(storage).any())


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def storage_sizes(data: bytes, buffers: Sequence[bytes]) -> frozenset[int]:
    """Of a message that is not damaged."""
    found: set[int] = set()

    class Measure(Use):
        def _strided(self, tensor: torch.Tensor) -> None:
            found.add(tensor.untyped_storage().nbytes())

    Measure(None).all_of(_unpacked(data, buffers))
    return frozenset(found | {len(each) for each in buffers})
