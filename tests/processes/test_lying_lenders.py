"""A member of the group that lies about its shared memory: its own calls fail, with its name; the others notice nothing."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.channel import outbox
from remora.agent.memory import shared
from remora.errors import CallOutcomeUnknown, CallTimeout
from remora.transport.shm import borrower as loans
from remora.transport.shm.arena import LATER, Placement
from remora.transport.shm.loan_reference import HEAD, PLACE, REFERENCE, TURNS, places_in
from remora.transport.shm.mapping import PAGE
from remora.transport.shm.sealed_memory import SEALS, identity
from tests.eventually import eventually
from tests.processes import targets
from tests.workers import Workers

MB = 1 << 20
SMALL = 100_000  # floats, which are filled when their message has been sent
pytestmark = [
    pytest.mark.skipif(not identity(), reason="this system has no memory that processes can share in this way"),
    pytest.mark.skipif(os.environ.get("REMORA_SHARED_MEMORY") == "0", reason="REMORA_SHARED_MEMORY=0 turns it off"),
]
later = pytest.mark.skipif(not LATER, reason="nothing is filled after it was lent on this machine")

Reference = tuple[tuple[Any, ...], list[tuple[int, int, int]]]  # its head, and its places
HONEST = Placement.refer
OTHERS = int.from_bytes(os.urandom(6), "little")  # numbers of arenas that the receiver does not know
kept: list[Any] = []  # descriptors and tensors that the liar needs


def parts(placement: Placement, number: int = 0) -> Reference:
    """What is true; or of another arena, which the receiver does not know yet."""
    honest = HONEST(placement)
    known, *rest = REFERENCE.unpack_from(honest)
    return (number or known, *rest), places_in(honest)


def joined(head: tuple[Any, ...], places: list[tuple[int, int, int]]) -> bytes:
    return REFERENCE.pack(*head) + b"".join(PLACE.pack(*place) for place in places)


def elsewhere(placement: Placement, descriptor: int) -> bytes:
    """The same places in another file of this process."""
    (number, process, _, size, *rest), places = parts(placement, descriptor + OTHERS)
    return joined((number, process, descriptor, size, *rest), places)


def forged(placement: Placement, seals: int, sparse: bool = False) -> int:
    """A file that passes for the arena, with these seals."""
    (_, _, _, size, *_), places = parts(placement)
    descriptor = os.memfd_create("remora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    kept.append(descriptor)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, (descriptor + OTHERS).to_bytes(8, "little"), 0)
    if not sparse:
        for _, at, length in places:
            os.pwrite(descriptor, bytes(length + PAGE), at)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def unsealed(placement: Placement, seals: int = 0) -> bytes:
    """And its memory is gone as soon as it was named: a receiver that uses it is killed (SIGBUS)."""
    descriptor = forged(placement, seals)
    rpc._get_current_rpc_agent().agent.timers.soon(0.001, lambda: os.ftruncate(descriptor, 0))
    return elsewhere(placement, descriptor)


def half_sealed(placement: Placement) -> bytes:
    return unsealed(placement, fcntl.F_SEAL_GROW)


def sparse(placement: Placement) -> bytes:
    """A segment of all the arena, which is a hole."""
    (_, process, _, size, lent, _, _), _ = parts(placement)
    descriptor = forged(placement, SEALS, sparse=True)
    return joined((descriptor + OTHERS, process, descriptor, size, lent, 0, 1), [(1, PAGE + HEAD, size // 2)])


def file_of_the_users(placement: Placement) -> bytes:
    descriptor, name = tempfile.mkstemp()
    os.unlink(name)
    kept.append(descriptor)
    os.truncate(descriptor, parts(placement)[0][3])
    os.pwrite(descriptor, (descriptor + OTHERS).to_bytes(8, "little"), 0)
    return elsewhere(placement, descriptor)


def device(placement: Placement) -> bytes:
    kept.append(os.open("/dev/zero", os.O_RDWR))
    return elsewhere(placement, kept[-1])


def of_another_process(placement: Placement) -> bytes:
    """Memory as it should be, by way of a process that is not the lender."""
    descriptor = forged(placement, SEALS)
    child = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor])
    kept.append(lambda: (child.kill(), child.wait()))
    (_, _, _, size, *rest), places = parts(placement)
    return joined((descriptor + OTHERS, child.pid, descriptor, size, *rest), places)


def much_larger_than_it_is(placement: Placement) -> bytes:
    """The arena is known to the receiver by now; places behind its end would be memory of the receiver's own."""
    (number, process, descriptor, size, *rest), [(loan, _, length), *_] = parts(placement)
    beyond = (loan, size + PAGE + HEAD, length)
    return joined((number, process, descriptor, 1 << 40, *rest[:-1], 1), [beyond])


def beyond(placement: Placement) -> bytes:
    head, [(loan, _, length), *rest] = parts(placement)
    return joined(head, [(loan, head[3] - PAGE, length), *rest])


def cut_short(placement: Placement) -> bytes:
    return HONEST(placement)[:-5]


def nothing(placement: Placement) -> bytes:
    return b""


def more_than_there_is(placement: Placement) -> bytes:
    return HONEST(placement)[: -PLACE.size]


LIES: list[Callable[[Placement], bytes]] = [
    unsealed, half_sealed, sparse, file_of_the_users, device, of_another_process, much_larger_than_it_is, beyond, cut_short,
    nothing, more_than_there_is,
]  # fmt: skip


def lie(name: str, to: str) -> None:
    """From the next message on. (What the receiver said of our memory before is forgotten.)"""
    Placement.refer = globals()[name]
    no_bytes_count()
    agent = rpc._get_current_rpc_agent().agent
    agent.peers.by_name[to].shared_memory.willing = True


def no_bytes_count() -> None:
    """The liar's own books do not look at what it sends."""
    outbox.lent_bytes = lambda body: 0


def be_honest() -> None:
    Placement.refer = HONEST  # type: ignore[method-assign]


def clear_away() -> None:
    """What the lies needed: not before, so that no other file gets the number of a descriptor."""
    while kept:
        each = kept.pop()
        os.close(each) if isinstance(each, int) else each()


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


def outcome(to: str, function: Any, argument: Any, timeout: float = 20.0) -> str:
    try:
        found = rpc.rpc_sync(to, function, args=(argument,), timeout=timeout)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return str(found if isinstance(found, float) else total(found))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def allocated() -> int:
    """Resident memory in all, in bytes: one's own, of files, and shared."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


def as_told(text: str) -> bool:
    """Whether an outcome names the liar and what it lied about."""
    return "worker0" in text and "memory" in text


def test_each_lie_fails_the_liars_call_alone_and_the_next_goes_over_the_connection() -> None:
    with Workers(3) as workers:
        for rank in (0, 2):
            assert workers.run(rank, outcome, "worker1", total, torch.ones(MB)) == str(float(MB))
        memory = workers.run(1, allocated)
        for each in LIES:
            workers.run(0, lie, each.__name__, "worker1")
            told = workers.run(0, outcome, "worker1", total, torch.ones(MB))
            assert as_told(told), (each.__name__, told)
            assert workers.run(0, outcome, "worker1", total, torch.ones(MB)) == str(float(MB)), each.__name__
            assert workers.run(2, outcome, "worker1", total, torch.ones(MB)) == str(float(MB)), each.__name__
            workers.run(0, be_honest)
        workers.run(0, clear_away)
        assert workers.run(1, allocated) - memory < 64 * MB
        assert workers.output(1).count("cannot use the shared memory") <= 1, "one line in the log"


def test_so_does_each_lie_about_an_answer() -> None:
    with Workers(2) as workers:
        assert workers.run(1, outcome, "worker0", ones, MB) == str(float(MB))
        for each in LIES:
            workers.run(0, lie, each.__name__, "worker1")
            told = workers.run(1, outcome, "worker0", ones, MB)
            assert as_told(told), (each.__name__, told)
            assert workers.run(1, outcome, "worker0", ones, MB) == str(float(MB)), each.__name__
            workers.run(0, be_honest)
        workers.run(0, clear_away)


def send_raw(to: str, body: bytes) -> str:
    """A call whose body is this, and says that there is shared memory."""
    agent = rpc._get_current_rpc_agent().agent
    real = shared.PeerSharedMemory.lend
    lent: Any = shared.Lent(body, None, None, [])  # type: ignore[arg-type]
    shared.PeerSharedMemory.lend = lambda self, packed: lent  # type: ignore[method-assign]
    try:
        return outcome(to, total, torch.ones(MB))
    finally:
        shared.PeerSharedMemory.lend = real  # type: ignore[method-assign]
        assert agent.peers.by_name[to].outgoing.link is not None, "the link goes on"


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_body_that_does_not_say_where_its_memory_is_does_not_stop_the_link(transport: str) -> None:
    bodies = [b"", b"1234567", bytes(8), struct.pack("<II", 1 << 31, 1 << 31), struct.pack("<II", 0, 3) + bytes(11),
              bytes(3) + struct.pack("<II", 0, 3), bytes(48) + struct.pack("<II", 48, 0)]  # fmt: skip
    with Workers(2, join=False) as workers:
        for pending in [
            workers.start(rank, start_with, workers.init_method, rank, 2, transports=[transport]) for rank in range(2)
        ]:
            pending.result()
        workers.run(0, no_bytes_count)
        for body in bodies:
            told = workers.run(0, send_raw, "worker1", body)
            assert as_told(told), (body, told)
            assert workers.run(0, outcome, "worker1", total, torch.ones(9)) == "9.0"


def start_with(init_method: str, rank: int, size: int, **settings: Any) -> None:
    options = rpc.RemoraRpcBackendOptions(init_method=init_method, **settings)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def never_copy() -> None:
    """From now on what is to be copied later is not copied at all."""
    shared.Copying.__call__ = lambda self: None  # type: ignore[method-assign]


def send_many_late(to: str, count: int, timeout: float) -> None:
    kept.extend(rpc.rpc_async(to, total, args=(torch.ones(SMALL),), timeout=timeout) for _ in range(count))


def outcomes() -> list[str]:
    found = []
    while kept:
        try:
            kept.pop().wait()
            found.append("it came")  # over the connection: a thread that finds another one lending does not wait for it
        except RuntimeError as error:
            found.append(type(error).__name__)
    return found


def served() -> int:
    return rpc._get_current_rpc_agent().agent.dispatch.counts()


def meet(other: str) -> None:
    """Both know all memory of the other that the next small tensor could be in."""
    for _ in range(TURNS + 2):
        rpc.rpc_sync(other, targets.echo, args=(torch.ones(SMALL),))


@later
def test_requests_that_are_never_filled_hold_no_thread_and_end_at_their_deadline() -> None:
    many = 40
    with Workers(3, join=False) as workers:
        for pending in [
            workers.start(rank, start_with, workers.init_method, rank, 3, num_worker_threads=2) for rank in range(3)
        ]:
            pending.result()
        for rank in (0, 2):
            workers.run(rank, meet, "worker1")
        before = workers.run(1, threads)
        workers.run(0, never_copy)
        workers.run(0, send_many_late, "worker1", many, 4.0)
        eventually(lambda: workers.run(1, served) > many // 2, what="they have come")
        for _ in range(3):
            assert workers.run(2, outcome, "worker1", total, torch.ones(SMALL), 4.0) == str(float(SMALL))
        assert workers.run(1, served) > 0, "the others wait on"
        assert workers.run(1, threads) - before < 8
        assert set(workers.run(0, outcomes)) <= {"CallTimeout", "SerializationError", "it came"}
        eventually(lambda: workers.run(1, served) == 0, what="they are given up")


def fetch_late(to: str, timeout: float) -> tuple[str, float]:
    began = time.monotonic()
    try:
        rpc.rpc_sync(to, ones, args=(SMALL,), timeout=timeout)
    except CallTimeout as error:
        return f"timeout: {error}", time.monotonic() - began
    except CallOutcomeUnknown as error:
        return str(error), time.monotonic() - began
    return "it came", 0.0


def fetch_many_late(to: str, count: int, timeout: float) -> tuple[list[str], int]:
    """Their outcomes, and how many threads there were meanwhile."""
    futures = [rpc.rpc_async(to, ones, args=(SMALL,), timeout=timeout) for _ in range(count)]
    eventually(lambda: not rpc._get_current_rpc_agent().agent.peers.by_name[to].outgoing.pending, what="answers")
    most = threads()
    kept.extend(futures)
    return outcomes(), most


def have_little_patience() -> None:
    loans.FILL_LIMIT = 1.0


@later
def test_answers_that_are_never_filled_end_at_their_deadline_and_without_one_at_the_limit() -> None:
    # Few threads of the pool: with 16 it grows by those that read, more of them the less each of them runs.
    with Workers(2, options={"num_worker_threads": 2}) as workers:
        workers.run(1, meet, "worker0")
        workers.run(0, never_copy)
        told, took = workers.run(1, fetch_late, "worker0", 1.0)
        assert told.startswith("timeout: ")
        assert "worker0" in told
        assert 0.9 < took < 20.0
        before = workers.run(1, threads)
        told_many, most = workers.run(1, fetch_many_late, "worker0", 30, 2.0)
        assert set(told_many) <= {"CallTimeout", "it came"}
        waited = told_many.count("CallTimeout")
        assert waited >= 16
        assert most - before < waited / 2  # (some read; if each held a thread, there would be one for each)
        workers.run(1, have_little_patience)
        told, _ = workers.run(1, fetch_late, "worker0", 0.0)
        assert "worker0 has not copied them into its shared memory" in told


def freeze_once() -> None:
    """This process is stopped, once, when it should fill memory that it has lent, as its message says already."""
    real = Placement.fill

    def fill(*args: Any) -> None:
        Placement.fill = real  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGSTOP)
        real(*args)

    Placement.fill = fill  # type: ignore[method-assign]


@later
def test_a_lender_that_is_frozen_holds_up_nobody_and_its_call_succeeds_when_it_goes_on() -> None:
    with Workers(3, join=False) as workers:
        for pending in [
            workers.start(rank, start_with, workers.init_method, rank, 3, num_worker_threads=1) for rank in range(3)
        ]:
            pending.result()
        for rank in (0, 2):
            workers.run(rank, meet, "worker1")
        workers.run(0, freeze_once)
        slow = workers.start(0, outcome, "worker1", total, torch.ones(SMALL))
        eventually(lambda: workers.run(1, served) == 1, what="its message has come")
        assert workers.run(2, outcome, "worker1", total, torch.ones(SMALL), 5.0) == str(float(SMALL))
        workers.cont(0)
        assert slow.result() == str(float(SMALL))
