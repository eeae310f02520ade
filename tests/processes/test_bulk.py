"""Large tensors between processes of one host: through shared memory, right, bounded, returned, and never missed."""

from __future__ import annotations

import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from remora import rpc
from remora.errors import WorkerLost
from remora.testing.processes import ProcessEnded
from remora.transport.shm import lender as shm_lender
from remora.transport.shm.arena import LATER, Placement
from remora.transport.shm.loan_reference import TURNS
from remora.transport.shm.sealed_memory import identity
from remora.wire import raw_memory as wire_memory
from tests.eventually import eventually
from tests.processes import targets
from tests.thorough import THOROUGH
from tests.workers import Workers

MB = 1 << 20
pytestmark = pytest.mark.skipif(not identity(), reason="this system has no memory that processes can share in this way")
# `make paths` runs these tests without it, too; what says that it is used cannot hold then.
used = pytest.mark.skipif(os.environ.get("REMORA_SHARED_MEMORY") == "0", reason="REMORA_SHARED_MEMORY=0 turns it off")

held: list[torch.Tensor] = []


def hold(tensor: torch.Tensor) -> int:
    """Keep a tensor as it came; how many there are."""
    held.append(tensor)
    return len(held)


def sums() -> list[float]:
    return [float(tensor.sum()) for tensor in held]


def let_go() -> None:
    held.clear()
    gc.collect()


def served() -> int:
    """How many requests are being served here."""
    return rpc._get_current_rpc_agent().agent.dispatch.counts()


def memory() -> tuple[int, int]:
    """(bytes of shared memory here, segments that others have)."""
    return rpc._get_current_rpc_agent().agent.peers.shared_memory.lender.counts()


def fill(size: int, value: float) -> torch.Tensor:
    return torch.full((size,), value)


def send_and_change(to: str) -> float:
    """What the callee has of a tensor that its sender changed as soon as the call was on its way."""
    tensor = torch.ones(MB)
    future = rpc.rpc_async(to, hold, args=(tensor,))
    tensor.fill_(7.0)
    future.wait()
    return rpc.rpc_sync(to, sums)[-1]


def send_many(to: str, count: int) -> list[float]:
    for i in range(count):
        rpc.rpc_sync(to, hold, args=(fill(MB, float(i)),))
    return rpc.rpc_sync(to, sums)


def echo_many(to: str, count: int) -> tuple[int, int]:
    for i in range(count):
        back = rpc.rpc_sync(to, targets.echo, args=(fill(4 * MB, float(i)),))
        assert back[0] == i
        assert back[-1] == i
    return memory()


def double_in_place(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mul_(2.0)


async def sum_slowly(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def lent_after(to: str, function: Any) -> int:
    """How much of our memory others have as soon as a call has returned."""
    rpc.rpc_sync(to, function, args=(torch.ones(MB),))
    return memory()[1]


def echo_more_than_half(to: str) -> tuple[int, int]:
    """The limit of the memory is less than two of these."""
    tensor = torch.ones(6 * MB)
    for _ in range(3):
        assert torch.equal(rpc.rpc_sync(to, targets.echo, args=(tensor,)), tensor)
    return memory()


def echo_bytes(to: str) -> tuple[int, int]:
    """Bytes there and back, inside other things; how much memory we and the other have for such messages then."""
    data = os.urandom(256) * (4 * MB // 256)
    for value in (data, bytearray(data), {"a": [data, 1]}, [(bytearray(data), "x")], "é" * (2 * MB)):
        back = rpc.rpc_sync(to, targets.echo, args=(value,))
        assert back == value
        assert type(back) is type(value)
    return memory()[0], rpc.rpc_sync(to, memory)[0]


def fetch_and_keep(to: str) -> int:
    return hold(rpc.rpc_sync(to, fill, args=(MB, 3.0)))


def start_with(init_method: str, rank: int, size: int, **settings: Any) -> None:
    options = rpc.RemoraRpcBackendOptions(init_method=init_method, **settings)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def start_all(workers: Workers, **settings: Any) -> None:
    for pending in [workers.start(rank, start_with, workers.init_method, rank, 2, **settings) for rank in range(2)]:
        pending.result()


@pytest.fixture
def pair() -> Any:
    with Workers(2) as workers:
        yield workers
        workers.run_all(let_go)


@used
def test_a_large_tensor_goes_through_shared_memory_and_is_a_value(pair: Workers) -> None:
    assert pair.run(0, send_and_change, "worker1") == MB
    total, lent = pair.run(0, memory)
    assert total >= 4 * MB
    assert lent == 1, "the callee keeps the tensor, and the memory with it"
    pair.run(1, let_go)
    eventually(lambda: pair.run(0, memory)[1] == 0, what="the memory is given back")


def counters() -> dict[str, int]:
    """The memory that this worker keeps, as its debug info tells it."""
    found = {name: int(value) for name, value in rpc._get_debug_info().items() if "_memory_" in name}
    return {name.removeprefix("agent."): value for name, value in found.items()}


@used
def test_what_is_lent_borrowed_and_kept_for_later_is_in_the_counters(pair: Workers) -> None:
    nothing = pair.run(0, counters)
    assert set(nothing.values()) == {0}
    pair.run(0, send_and_change, "worker1")  # 4 MB, which the callee keeps
    lender, borrower = pair.run(0, counters), pair.run(1, counters)
    assert 4 * MB <= lender["shared_memory_lent_bytes"] == lender["shared_memory_bytes"] < 5 * MB
    assert 4 * MB <= borrower["shared_memory_borrowed_bytes"] < 5 * MB
    assert borrower["shared_memory_bytes"] == lender["shared_memory_borrowed_bytes"] == 0
    pair.run(1, let_go)
    assert pair.run(1, counters)["shared_memory_borrowed_bytes"] == 0
    eventually(lambda: pair.run(0, counters)["shared_memory_lent_bytes"] == 0, what="the memory is given back")
    assert pair.run(0, counters)["shared_memory_bytes"] >= 4 * MB, "it is kept for a while, which is to be seen"
    pair.run(0, tidy_up, 2 * shm_lender.IDLE)
    assert pair.run(0, counters) == nothing


def tidy_up(seconds: float) -> None:
    """Do what is done now and then, as if it were so much later."""
    agent = rpc._get_current_rpc_agent().agent
    agent.peers.shared_memory.lender.trim(agent.clock.now() + seconds)


@used
def test_large_bytes_go_the_same_way_both_as_arguments_and_as_results(pair: Workers) -> None:
    ours, theirs = pair.run(0, echo_bytes, "worker1")
    assert ours >= 4 * MB
    assert theirs >= 4 * MB
    eventually(lambda: [pair.run(rank, memory)[1] for rank in (0, 1)] == [0, 0], what="it is given back")


def work_of_echoes(to: str, value: Any) -> float:
    """Seconds of processor time that both workers take to send a value there and back; the least of several."""
    found: list[float] = []
    for _ in range(4):
        before = time.process_time() + rpc.rpc_sync(to, time.process_time)
        rpc.rpc_sync(to, targets.echo, args=(value,))
        found.append(time.process_time() + rpc.rpc_sync(to, time.process_time) - before)
    return min(found)


def work_of_bytes_by_that_of_a_tensor(to: str) -> float:
    size = 200 * MB
    return work_of_echoes(to, bytes(size)) / work_of_echoes(to, torch.ones(size // 4))


@used
@pytest.mark.skipif(not THOROUGH, reason="moves gigabytes; make test-long runs it")
@pytest.mark.skipif(not wire_memory._has_huge_pages(), reason="this system has no large pages")
def test_bytes_take_the_time_of_the_copy_that_they_need_beside_that_of_a_tensor(pair: Workers) -> None:
    """A tensor is copied once, bytes twice, the second time to fresh memory. It was 7 times the work, and before that 70."""
    assert pair.run(0, work_of_bytes_by_that_of_a_tensor, "worker1") < 5


def test_tensors_that_are_kept_keep_their_values(pair: Workers) -> None:
    assert pair.run(0, send_many, "worker1", 12) == [float(i * MB) for i in range(12)]


def test_the_same_memory_serves_again_and_again(pair: Workers) -> None:
    total, _ = pair.run(0, echo_many, "worker1", 40)
    assert total <= 128 * MB


@used
@pytest.mark.parametrize("function", [targets.echo, double_in_place, torch.sum, sum_slowly])
def test_what_a_call_lent_comes_back_with_its_answer(pair: Workers, function: Any) -> None:
    assert pair.run(0, lent_after, "worker1", function) == 0


@used
def test_so_one_that_takes_most_of_the_memory_always_has_it() -> None:
    with Workers(2, join=False) as workers:
        start_all(workers, shared_memory=40 * MB)
        total, lent = workers.run(0, echo_more_than_half, "worker1")
        assert total >= 24 * MB, "none of them went over the connection"
        assert lent == 0


def be_quick_to_return_it() -> None:
    shm_lender.IDLE = 1.0


def test_it_is_returned_to_the_system_when_nobody_needs_it(pair: Workers) -> None:
    pair.run_all(be_quick_to_return_it)
    pair.run(0, echo_many, "worker1", 3)
    eventually(lambda: pair.run(0, memory) == (0, 0), timeout=30.0, what="idle memory is returned")


def test_a_receiver_keeps_what_a_worker_sent_that_was_killed() -> None:
    with Workers(2) as workers:
        workers.run(0, fetch_and_keep, "worker1")
        workers.kill(1)
        assert workers.run(0, sums) == [3.0 * MB]
        workers.run(0, let_go)


@used
def test_memory_of_a_receiver_that_was_killed_is_free_again() -> None:
    with Workers(3) as workers:
        workers.run(0, send_many, "worker1", 4)
        assert workers.run(0, memory)[1] == 4
        workers.kill(1)
        eventually(lambda: workers.run(0, memory)[1] == 0, what="the dead one's memory is free")


@pytest.mark.parametrize("limit", [0, 3 * MB])
def test_without_enough_of_it_tensors_go_the_usual_way(limit: int) -> None:
    with Workers(2, join=False) as workers:
        start_all(workers, shared_memory=limit)
        assert workers.run(0, send_many, "worker1", 3) == [float(i * MB) for i in range(3)]
        assert workers.run(0, memory)[0] <= limit
        workers.run(1, let_go)


def die_instead_of_copying() -> None:
    """From now on this process ends where it should fill memory that it has lent, as its message says already."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Placement.fill = die  # type: ignore[method-assign]


def meet(other: str) -> None:
    """Both know all memory of the other that the next small tensor could be in."""
    for _ in range(TURNS + 2):
        rpc.rpc_sync(other, targets.echo, args=(torch.ones(100_000),))


def send_one(to: str) -> None:
    rpc.rpc_async(to, hold, args=(torch.ones(100_000),))


def fetch_one(to: str) -> str:
    try:
        rpc.rpc_sync(to, fill, args=(100_000, 3.0))
    except WorkerLost as error:
        return str(error)
    return "it came"


def number_held() -> int:
    return len(held)


later = pytest.mark.skipif(not LATER, reason="nothing is filled after it was lent on this machine")


@used
@later
def test_a_function_does_not_run_with_arguments_that_their_sender_did_not_live_to_copy() -> None:
    with Workers(3) as workers:
        workers.run(0, meet, "worker1")
        workers.run(0, die_instead_of_copying)
        with pytest.raises(ProcessEnded):
            workers.run(0, send_one, "worker1")
        workers.kill(0)
        eventually(lambda: workers.run(1, served) == 0, what="it is given up")
        assert workers.run(1, number_held) == 0
        workers.run(2, send_one, "worker1")
        eventually(lambda: workers.run(1, number_held) == 1, what="others are served")
        workers.run(1, let_go)


@used
@later
def test_an_answer_that_its_sender_did_not_live_to_copy_is_lost() -> None:
    with Workers(2) as workers:
        workers.run(0, meet, "worker1")
        workers.run(1, die_instead_of_copying)
        outcome = workers.run(0, fetch_one, "worker1")
        workers.kill(1)
    assert "worker1" in outcome
    assert "it came" not in outcome


def total_of(tensor: torch.Tensor) -> tuple[float, torch.Tensor]:
    """What is in a tensor when the function begins, and the same with one more in each place."""
    return float(tensor.sum()), tensor.add_(1)


def call_from_many_threads(to: str, threads: int, times: int) -> int:
    """Each has sizes and values of its own, and sees that no other's are in what it gets."""

    def call(seed: int) -> int:
        for i in range(times):
            size, value = 20_000 + 7_000 * ((seed + i) % 32), float(seed * times + i)
            before, after = rpc.rpc_sync(to, total_of, args=(torch.full((size,), value, dtype=torch.float64),))
            assert before == size * value
            assert after.shape == (size,)
            assert bool((after == value + 1).all())
        return times

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(call, range(threads)))


def test_nobody_sees_what_is_not_there_yet(pair: Workers) -> None:
    assert pair.run(0, call_from_many_threads, "worker1", 4, 60) == 240


def forget_where_processes_are() -> None:
    """From now on nothing that others lend can be opened here."""
    real = os.open

    def fail(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "not allowed", path)
        return real(path, *args, **kwargs)

    os.open = fail


def outcome_of_two(to: str) -> list[str]:
    outcomes = []
    for value in (1.0, 2.0):
        try:
            outcomes.append(str(rpc.rpc_sync(to, targets.sum_of, args=(fill(MB, value),))))
        except RuntimeError as error:
            outcomes.append(type(error).__name__)
    return outcomes


@used
def test_a_peer_that_cannot_use_it_says_so_once_and_is_not_asked_again(pair: Workers) -> None:
    pair.run(1, forget_where_processes_are)
    first, second = pair.run(0, outcome_of_two, "worker1")
    assert "Error" in first
    assert second == str(2.0 * MB)


@used
def test_an_address_of_the_network_makes_no_difference() -> None:
    with Workers(2, join=False) as workers:
        for pending in [
            workers.start(rank, start_with, workers.init_method, rank, 2, transports=["tcp"]) for rank in range(2)
        ]:
            pending.result()
        workers.run(0, send_many, "worker1", 2)
        assert workers.run(0, memory)[1] == 2
        workers.run(1, let_go)


def keep_the_small_one(large: torch.Tensor, small: torch.Tensor) -> int:
    return hold(small)


def send_pairs(to: str, count: int) -> int:
    """How much memory is shared when the callee has kept the small tensor of each pair."""
    for i in range(count):
        rpc.rpc_sync(to, keep_the_small_one, args=(fill(MB, 1.0), fill(20_000, float(i))))
    return memory()[0]


@used
def test_a_small_tensor_that_is_kept_does_not_keep_the_large_one_beside_it(pair: Workers) -> None:
    assert pair.run(0, send_pairs, "worker1", 40) < 40 * 100_000 + 8 * 4 * MB
    assert pair.run(1, sums) == [20_000.0 * i for i in range(40)]


def send_small(to: str, count: int) -> tuple[int, int]:
    """How many descriptors more there are when the callee has kept so many tensors, here and there."""
    rpc.rpc_sync(to, hold, args=(fill(17_500, 1.0),))
    here, there = descriptors(), rpc.rpc_sync(to, descriptors)
    for _ in range(count):
        rpc.rpc_sync(to, hold, args=(fill(17_500, 1.0),))
    return descriptors() - here, rpc.rpc_sync(to, descriptors) - there


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@used
def test_many_tensors_that_are_kept_take_no_descriptors(pair: Workers) -> None:
    more = pair.run(0, send_small, "worker1", 500)
    assert max(more) < 10
    assert pair.run(0, memory)[1] == 501, "they are in shared memory"


def have_no_descriptors_left() -> None:
    """From now on this process cannot make arenas."""

    def fail(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    held_back.append(os.memfd_create)
    os.memfd_create = fail


def have_descriptors_again() -> None:
    os.memfd_create = held_back.pop()


held_back: list[Any] = []


@used
def test_without_descriptors_tensors_go_the_usual_way_until_there_are_some(pair: Workers) -> None:
    pair.run(0, have_no_descriptors_left)
    assert pair.run(0, send_many, "worker1", 2) == [0.0, float(MB)]
    assert pair.run(0, memory) == (0, 0)
    pair.run(0, have_descriptors_again)

    def shared_again() -> bool:
        pair.run(0, send_many, "worker1", 1)
        return bool(pair.run(0, memory)[1])

    eventually(shared_again, what="shared memory is used again")
