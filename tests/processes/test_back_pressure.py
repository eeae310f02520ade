"""PeerManager that do not keep up: they slow their callers, memory stays bounded, deadlines hold, and nothing is lost."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remora import rpc
from remora.agent.channel.flow_control import OUTBOX_LIMIT
from tests.eventually import eventually
from tests.processes import targets
from tests.workers import Workers

MIB = 1 << 20
ANSWERS = 600  # of a megabyte: twice as much as fits
BOUND = 300 * MIB  # what the buffers of one worker may take, with copies, pickles and the allocator's slack
KINDS = ["function", "coroutine", "promise"]


class Watch(threading.Thread):
    """Notes the most memory this process has had meanwhile, and by how much one of its threads woke too late at worst."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak = targets.resident_bytes()
        self.latest = 0.0
        self.stopped = False

    def run(self) -> None:
        while not self.stopped:
            self.peak = max(self.peak, targets.resident_bytes())
            due = time.monotonic() + 0.005
            time.sleep(0.005)
            self.latest = max(self.latest, time.monotonic() - due)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        self.join()

    @property
    def growth(self) -> int:
        return self.peak - self.start_bytes


def send_to_a_stopped_worker(to: str, pid: int, n: int, timeout: float) -> tuple[int, float, dict[str, int]]:
    """A megabyte in each of up to `n` calls, all with one deadline, and a few after it.

    (growth of memory, the longest that a call outlived its deadline beyond what any thread here is late, kinds of errors)
    """
    rpc.rpc_sync(to, targets.double, args=(1,))
    kinds: Counter[str] = Counter()
    late: list[float] = []
    futures: list[Any] = []
    os.kill(pid, signal.SIGSTOP)
    try:
        with Watch() as watch:
            end = time.monotonic() + timeout
            while len(futures) + kinds.total() < n and time.monotonic() < end + 0.2:
                left = max(end - time.monotonic(), 0.001)
                deadline = time.monotonic() + left
                try:
                    future = rpc.rpc_async(to, targets.sum_of, args=(torch.zeros(MIB // 4),), timeout=left)
                    future.add_done_callback(lambda _, due=deadline: late.append(time.monotonic() - due))  # type: ignore[misc]
                    futures.append(future)
                except RuntimeError as error:
                    kinds[f"{type(error).__name__} at once"] += 1
                late.append(time.monotonic() - deadline)
            for future in futures:
                try:
                    future.wait()
                    kinds["answered"] += 1
                except RuntimeError as error:
                    kinds[type(error).__name__] += 1
    finally:
        os.kill(pid, signal.SIGCONT)
    return watch.growth, max(late) - watch.latest, dict(kinds)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_gigabyte_for_a_worker_that_does_not_read(transport: str) -> None:
    with Workers(2, options={"transports": [transport]}) as workers:
        growth, worst, kinds = workers.run(0, send_to_a_stopped_worker, "worker1", workers.pid(1), 1024, 5.0)
        assert growth < BOUND
        assert worst < 1.5, "every call ends at its deadline"
        assert OUTBOX_LIMIT // MIB <= sum(kinds.values()) <= 1024, "the outbox was full"
        assert set(kinds) <= {"CallTimeout", "CallNotSent", "CallNotSent at once", "CallTimeout at once"}
        # It goes on, and so do they.
        assert workers.run(0, targets.timed_call, "worker1", targets.double, 4, timeout=10.0)[1:] == ("", "8")


def send_small_calls(to: str, pid: int, n: int) -> tuple[int, int]:
    """Many small calls to a worker that is stopped for a while; (growth of memory, how many were answered)."""
    rpc.rpc_sync(to, targets.double, args=(1,))
    body = b"x" * 4096
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
    with Watch() as watch:
        futures = [rpc.rpc_async(to, len, args=(body,), timeout=30) for _ in range(n)]
        answered = sum(value == 4096 for value in torch.futures.wait_all(futures))
    return watch.growth, answered


def test_two_hundred_megabytes_of_small_calls() -> None:
    with Workers(2) as workers:
        growth, answered = workers.run(0, send_small_calls, "worker1", workers.pid(1), 50_000)
        assert answered == 50_000
        assert growth < BOUND + 50_000 * 3000, "bounded buffers, and what 50,000 futures take"


def ask_and_do_not_read(to: str, n: int, go_on: str, function: Any = torch.zeros) -> int:
    """Ask for `n` megabytes, read nothing until the file `go_on` is there, then read it all; how many were right."""
    rpc.rpc_sync(to, targets.double, args=(1,))
    channel = rpc._get_current_rpc_agent().agent.peers.find(to).outgoing
    shape = (MIB // 4,)
    if function is fetched:
        rref = rpc.remote(to, torch.zeros, args=(shape,))
        rref.to_here()

    def ask() -> Any:
        channel.reading.renew()
        if function is fetched:
            return rref.to_here_async(timeout=0)
        return rpc.rpc_async(to, function, args=(shape,), timeout=0)

    with channel.reading:  # nobody here reads, nor in our stead, which happens to a reader that has not moved for two ticks
        futures = [ask() for _ in range(n)]
        print("asked")
        eventually(lambda: channel.reading.renew() or os.path.exists(go_on), timeout=60.0)
    channel.watch()
    return sum(value.shape == shape for value in torch.futures.wait_all(futures))


def until_it_stands_still(look: Callable[[], int], step: int = MIB) -> int:
    """What `look` says when it has not grown for a while."""
    value, since = look(), time.monotonic()
    while time.monotonic() < since + 0.4:
        time.sleep(0.02)
        if (now := look()) > value + step:
            value, since = now, time.monotonic()
    return value


async def make_in_coroutine(shape: tuple[int]) -> torch.Tensor:
    return torch.zeros(shape)


async def double_in_coroutine(x: int) -> int:
    return 2 * x


@rpc.functions.async_execution
def promise_made(shape: tuple[int]) -> torch.futures.Future[torch.Tensor]:
    """Completed by a callback, on a thread of ours."""
    return rpc.rpc_async(rpc.get_worker_info(), targets.double, args=(1,)).then(lambda _: torch.zeros(shape))


@rpc.functions.async_execution
def promise_double(x: int) -> torch.futures.Future[int]:
    return rpc.rpc_async(rpc.get_worker_info(), targets.double, args=(x,))


def fetched() -> None:
    """Stands for `to_here` of a value of a megabyte, again and again."""


@pytest.mark.parametrize("function", [torch.zeros, make_in_coroutine, promise_made, fetched], ids=[*KINDS, "fetch"])
def test_a_caller_that_does_not_read_its_answers_does_not_fill_the_callee(function: Any, tmp_path: Path) -> None:
    with Workers(2) as workers:
        before = workers.run(1, targets.resident_bytes)
        asking = workers.start(0, ask_and_do_not_read, "worker1", ANSWERS, str(tmp_path / "go on"), function)
        eventually(lambda: "asked" in workers.output(0))
        assert until_it_stands_still(lambda: workers.run(1, targets.resident_bytes)) - before < BOUND
        (tmp_path / "go on").touch()
        assert asking.result(timeout=90.0) == ANSWERS


@pytest.mark.parametrize(
    ("slow", "quick"),
    [(torch.zeros, targets.double), (make_in_coroutine, double_in_coroutine), (promise_made, promise_double)],
    ids=KINDS,
)
def test_other_callers_are_served_while_one_does_not_read(slow: Any, quick: Any, tmp_path: Path) -> None:
    with Workers(3, options={"num_worker_threads": 2}) as workers:
        asking = workers.start(0, ask_and_do_not_read, "worker1", 200, str(tmp_path / "go on"), slow)
        eventually(lambda: "asked" in workers.output(0))
        until_it_stands_still(lambda: workers.run(1, reply_bytes, "worker0"))
        for _ in range(5):
            # (a call that waited for the other caller would wait for ever: that one reads when it is told to)
            _, kind, value = workers.run(2, targets.timed_call, "worker1", quick, 4)
            assert (kind, value) == ("", "8")
        (tmp_path / "go on").touch()
        assert asking.result(timeout=30.0) == 200


_parameters = torch.zeros(8 * MIB)


def pull() -> torch.Tensor:
    return _parameters


def push() -> float:
    _parameters.add_(1.0)
    return float(_parameters[0])


def pull_without_reading(to: str, changed: str) -> list[float]:
    """Ask for the parameters, do not read the answer before the file `changed` is there; what came."""
    rpc.rpc_sync(to, targets.double, args=(1,))
    channel = rpc._get_current_rpc_agent().agent.peers.find(to).outgoing
    with channel.reading:
        future = rpc.rpc_async(to, pull, timeout=20)
        eventually(lambda: channel.reading.renew() or os.path.exists(changed))
    channel.watch()
    return list(future.wait().unique().tolist())


@pytest.mark.parametrize("threads", [1, 4])
def test_a_reply_is_what_the_function_returned_and_not_what_became_of_it(threads: int, tmp_path: Path) -> None:
    """A parameter server: the reply is half sent when another call changes the tensor in place."""
    with Workers(3, options={"num_worker_threads": threads}) as workers:
        changed = tmp_path / "changed"
        pulling = workers.start(0, pull_without_reading, "worker1", str(changed))
        eventually(lambda: workers.run(1, reply_bytes, "worker0") > MIB)
        assert workers.run(2, targets.call, "worker1", push) == 1.0
        changed.touch()
        assert pulling.result(timeout=20.0) == [0.0]


def reply_bytes(to: str) -> int:
    """How many bytes of replies are being sent, or wait for it."""
    incoming = rpc._get_current_rpc_agent().agent.peers.find(to).incoming
    return 0 if incoming is None else incoming.session.kept_bytes


def block_the_way(to: str, pid: int) -> dict[str, tuple[float, str]]:
    """While a huge message without a deadline cannot leave, others to the same worker have deadlines to keep."""
    rpc.rpc_sync(to, targets.double, args=(1,))
    os.kill(pid, signal.SIGSTOP)
    huge = threading.Thread(target=lambda: rpc.rpc_sync(to, targets.sum_of, args=(torch.zeros(8 * MIB),), timeout=0))
    huge.start()
    channel = rpc._get_current_rpc_agent().agent.peers.find(to).outgoing
    try:
        eventually(lambda: channel.pending)
        time.sleep(0.2)  # it has filled what the kernel takes by now
        found = {}
        for name, way in {
            "sync": lambda: rpc.rpc_sync(to, targets.double, args=(1,), timeout=0.5),
            "async": lambda: rpc.rpc_async(to, targets.double, args=(1,), timeout=0.5).wait(),
            "async with a tensor": lambda: rpc.rpc_async(
                to, targets.sum_of, args=(torch.zeros(MIB),), timeout=0.5
            ).wait(),
        }.items():
            waited: list[tuple[float, Any]] = []
            thread = threading.Thread(target=lambda w=way, into=waited: into.append(targets.timed(w)), daemon=True)  # type: ignore[misc]
            thread.start()
            thread.join(2.5)
            seconds, outcome = waited[0] if waited else (2.5, "still waiting")
            found[name] = (seconds, type(outcome).__name__)
    finally:
        os.kill(pid, signal.SIGCONT)
    huge.join(20.0)
    assert not huge.is_alive()
    return found


def test_a_huge_message_that_cannot_leave_does_not_hold_up_the_deadlines_of_others() -> None:
    with Workers(2) as workers:
        found = workers.run(0, block_the_way, "worker1", workers.pid(1))
        assert all(seconds < 1.5 for seconds, _ in found.values()), found
        assert {kind for _, kind in found.values()} <= {"CallTimeout", "CallNotSent"}, found


def test_a_stopped_worker_does_not_hold_up_calls_to_others() -> None:
    with Workers(3) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        workers.stop(1)
        sending = workers.start(2, targets.timed_call, "worker1", targets.sum_of, torch.zeros(32 * MIB // 4))
        seconds, kind, value = workers.run(0, call_both, "worker1", "worker2")
        assert (kind, value) == ("", "8")
        assert seconds < 1.0
        workers.cont(1)
        assert sending.result(timeout=10.0)[1:] == ("", "0.0")


def call_both(stopped: str, well: str) -> tuple[float, str, str]:
    """A large message to one that does not read, on another thread; meanwhile a call to one that does."""
    large = threading.Thread(
        target=lambda: rpc.rpc_sync(stopped, targets.sum_of, args=(torch.zeros(8 * MIB),), timeout=20), daemon=True
    )
    large.start()
    time.sleep(0.1)
    return targets.timed_call(well, targets.double, 4)


# What does not fit into memory fails by itself.


def limit_memory(more: int) -> None:
    """Let this process have only so much address space more than now."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))


def unlimited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def make_bytes(n: int) -> bytes:
    return b"x" * n


def ask_for_more_than_fits(to: str, function: Any, argument: Any) -> list[tuple[str, str]]:
    """With little memory left, ask for much; before and after it for little. By both ways."""
    rpc.rpc_sync(to, targets.double, args=(1,))
    other = rpc.rpc_async(to, targets.nap, args=(1.0,), timeout=20)
    limit_memory(200 * MIB)
    try:
        found = [targets.timed_call(to, function, argument, timeout=8.0)]
        seconds, outcome = targets.timed(lambda: rpc.rpc_async(to, function, args=(argument,), timeout=8.0).wait())
        found.append((seconds, type(outcome).__name__, str(outcome)))
        found.append(targets.timed_call(to, targets.double, 4))
    finally:
        unlimited()
    assert other.wait() == 1.0, "a call that was under way meanwhile is not harmed"
    return [(kind, words[:300]) for _, kind, words in found]


@pytest.mark.parametrize(
    ("function", "argument"),
    [(torch.zeros, (400 * MIB // 4,)), (make_bytes, 400 * MIB)],
    ids=["tensor", "bytes"],
)
def test_a_result_too_large_for_memory_fails_that_call_only(function: Any, argument: Any) -> None:
    with Workers(2) as workers:
        first, second, third = workers.run(0, ask_for_more_than_fits, "worker1", function, argument)
        for kind, words in (first, second):
            assert kind in ("SerializationError", "MemoryError")
            assert "memory" in words.lower()
        assert third == ("", "8")
        assert workers.run(0, targets.call, "worker1", targets.double, 4) == 8


def test_an_argument_too_large_for_the_callee_fails_that_call_only() -> None:
    with Workers(2) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        workers.run(1, limit_memory, 200 * MIB)
        for what in ("tensor", "bytes"):
            _, kind, words = workers.run(0, send_large, "worker1", what)
            assert kind in ("SerializationError", "MemoryError"), words
            assert "memory" in words.lower()
        assert workers.run(0, targets.call, "worker1", targets.double, 4) == 8
        workers.run(1, unlimited)


def send_large(to: str, what: str) -> tuple[float, str, str]:
    value: Any = torch.zeros(400 * MIB // 4) if what == "tensor" else b"x" * (400 * MIB)
    seconds, error, words = targets.timed_call(to, len, value, timeout=8.0)
    return seconds, error, words[:300]
