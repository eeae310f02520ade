"""How workers end: together and served to the last, at once if asked, with a name if one of them died, and silently."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from remora import rpc
from remora.rpc import all_gather, api
from tests.eventually import eventually
from tests.processes import targets, witness
from tests.workers import Workers

# No time limit of Remora's ends a wait here: what is found out late is not found out at all, however slow the machine is.
PATIENT = dict.fromkeys(("connect_timeout", "reconnect_timeout", "silence_limit"), 600.0)


def graceful(timeout: float = 0.0) -> tuple[float, str, str]:
    """(seconds, kind of error, words) of a graceful shutdown."""
    seconds, outcome = targets.timed(rpc.shutdown, timeout=timeout)
    return seconds, type(outcome).__name__ if outcome is not None else "", str(outcome)


def at_once() -> float:
    start = time.monotonic()
    rpc.shutdown(graceful=False)
    return time.monotonic() - start


def call_for(to: str, seconds: float) -> int:
    """Call again and again for a while; how often."""
    end, made = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        assert rpc.rpc_sync(to, targets.double, args=(made,)) == 2 * made
        made += 1
    return made


def test_a_passive_worker_serves_inside_shutdown_until_all_arrive() -> None:
    with Workers(3) as workers:
        passive = [workers.start(rank, graceful) for rank in (0, 2)]
        assert workers.run(1, call_for, "worker0", 1.0) > 50
        assert workers.run(1, call_for, "worker2", 1.0) > 50
        assert not any(pending.done() for pending in passive)
        passive.append(workers.start(1, graceful))
        for pending in passive:
            _, kind, words = pending.result()
            assert kind == "", words


def test_calls_under_way_are_finished_first() -> None:
    with Workers(2) as workers:
        slow = workers.start(0, start_slow_and_leave, "worker1")
        _, kind, words = workers.run(1, graceful)
        assert kind == "", words
        assert slow.result() == 0.5


def start_slow_and_leave(to: str) -> float:
    future = rpc.rpc_async(to, targets.nap, args=(0.5,))
    rpc.shutdown()
    value: float = future.wait()
    return value


def test_calls_that_make_further_calls_are_finished_first() -> None:
    """worker0 asks worker1, which after a while asks worker2, and everybody is in shutdown by then."""
    with Workers(3) as workers:
        first = workers.start(0, start_chain_and_leave)
        others = [workers.start(rank, graceful) for rank in (1, 2)]
        assert first.result(timeout=15.0) == "worker0 worker1 worker2 worker0"
        for pending in others:
            assert pending.result()[1] == ""


def start_chain_and_leave() -> str:
    future = rpc.rpc_async("worker1", pass_along, args=("worker0", ["worker1", "worker2", "worker0"]))
    rpc.shutdown()
    return str(future.wait())


def pass_along(said: str, names: list[str]) -> str:
    time.sleep(0.2)
    here = rpc.get_worker_info().name
    assert names[0] == here
    said = f"{said} {here}"
    return said if len(names) == 1 else rpc.rpc_sync(names[1], pass_along, args=(said, names[1:]))


def test_not_graceful_returns_at_once() -> None:
    with Workers(2) as workers:
        workers.run(0, targets.call, "worker1", targets.double, 1)
        workers.start(0, start_and_forget, "worker1").result()
        assert workers.run(0, at_once) < 1.0
        workers.run(1, targets.unblock)
        assert workers.run(1, at_once) < 1.0


def start_and_forget(to: str) -> None:
    future = rpc.rpc_async(to, targets.block, timeout=0)
    future.add_done_callback(lambda done: done.exception())  # type: ignore[attr-defined]


def test_calls_that_wait_fail_when_their_own_worker_ends() -> None:
    with Workers(2) as workers:
        kind, words = workers.run(0, leave_while_waiting, "worker1")
        assert kind == "NotInitialized"
        assert "no longer running" in words
        workers.run(1, targets.unblock)
        workers.stop(1)  # it cannot leave gracefully: the other has gone


def leave_while_waiting(to: str) -> tuple[str, str]:
    future = rpc.rpc_async(to, targets.block, timeout=0)
    rpc.shutdown(graceful=False)
    with pytest.raises(RuntimeError) as caught:
        future.wait()
    return type(caught.value).__name__, str(caught.value)


def test_a_worker_that_left_is_gone_for_its_callers_at_once() -> None:
    with Workers(2, options=PATIENT) as workers:
        waiting = workers.start(1, targets.timed_call, "worker0", targets.block, timeout=20.0)
        eventually(lambda: workers.run(0, serving) == 1)
        workers.run(0, leave_and_unblock)
        _, kind, words = waiting.result()
        assert kind in ("WorkerLost", "")  # its answer may have been on the way
        _, kind, words = workers.run(1, targets.timed_call, "worker0", targets.double, 1)
        assert kind == "CallNotSent"
        assert "left" in words
        workers.stop(1)


def serving() -> int:
    return rpc._get_current_rpc_agent().agent.dispatch.counts()


def leave_and_unblock() -> None:
    targets.unblock()
    rpc.shutdown(graceful=False)


def test_a_worker_that_dies_while_others_leave_is_named() -> None:
    with Workers(3, options=PATIENT) as workers:
        leaving = [workers.start(rank, graceful) for rank in (0, 1)]
        eventually(lambda: workers.run(2, targets.call, "worker0", targets.double, 1) == 2)
        workers.kill(2)
        for pending in leaving:
            _, kind, words = pending.result(timeout=30.0)
            assert kind == "WorkerLost", words
            assert "worker2" in words


def test_a_worker_that_died_before_is_named_when_the_others_leave() -> None:
    with Workers(3, options=PATIENT) as workers:
        workers.kill(2)
        leaving = [workers.start(rank, graceful) for rank in (0, 1)]
        for pending in leaving:
            _, kind, words = pending.result(timeout=30.0)
            assert kind in ("WorkerLost", "CallNotSent"), words
            assert "worker2" in words


def test_the_leader_may_die_too() -> None:
    with Workers(3, options=PATIENT) as workers:
        leaving = [workers.start(rank, graceful) for rank in (1, 2)]
        eventually(lambda: workers.run(0, targets.call, "worker1", targets.double, 1) == 2)
        workers.kill(0)
        for pending in leaving:
            _, kind, words = pending.result(timeout=30.0)
            assert kind == "WorkerLost", words
            assert "worker0" in words


asked = threading.Event()


def hold_gatherings() -> None:
    """Serve no gathering: those who come wait for an answer."""

    def hold(*arguments: object) -> None:
        asked.set()
        threading.Event().wait()

    api._gather_to_leader = hold  # type: ignore[assignment]


def test_a_leader_that_dies_while_it_is_asked_is_named_and_so_is_what_was_waited_for() -> None:
    """Not the call in which shutdown happened to be."""
    with Workers(2) as workers:
        workers.run(0, hold_gatherings)
        leaving = workers.start(1, graceful)
        workers.run(0, wait_until_asked)
        workers.kill(0)
        _, kind, words = leaving.result()
        assert kind == "WorkerLost"
        assert words == "shutdown: WorkerInfo(id=0, name=worker0) was lost while worker1 waited for it: its process ended"


def wait_until_asked() -> None:
    assert asked.wait(30.0)


def test_shutdown_gives_up_after_its_timeout_and_names_who_is_missing() -> None:
    with Workers(3) as workers:
        leaving = [workers.start(rank, graceful, 0.5) for rank in (0, 1)]
        for pending in leaving:
            seconds, kind, words = pending.result(timeout=30.0)
            assert seconds > 0.4  # (and it ends, though one never comes)
            assert kind in ("CallTimeout", "WorkerLost", "RemoraError"), words
        assert "worker2" in leaving[0].result()[2], "the leader knows who did not come"
        workers.stop(2)


def test_shutdown_twice_says_that_there_is_no_worker() -> None:
    with Workers(1) as workers:
        assert workers.run(0, graceful)[1] == ""
        assert workers.run(0, graceful)[1] == "NotInitialized"


def test_a_function_that_does_not_end_holds_nobody_up_for_longer_than_the_timeout() -> None:
    with Workers(2) as workers:
        workers.run(0, start_and_forget, "worker1")
        eventually(lambda: workers.run(1, serving) == 1)
        leaving = [workers.start(rank, graceful, 1.0) for rank in (0, 1)]
        for pending in leaving:
            seconds, kind, words = pending.result()
            assert kind in ("CallTimeout", "WorkerLost"), words
            assert "worker" in words
            assert seconds > 0.5  # (and it ends, though the function does not)
        workers.run(1, targets.unblock)


def test_the_others_go_on_when_the_host_of_the_store_has_left() -> None:
    with Workers(3, join=False) as workers:
        port = free_port()
        for pending in [workers.start(rank, join_over_tcp, rank, port) for rank in range(3)]:
            pending.result(timeout=20.0)
        workers.kill(0)
        assert workers.run(1, targets.call, "worker2", targets.double, 2) == 4
        assert workers.run(2, targets.call, "worker1", targets.double, 2) == 4
        leaving = [workers.start(rank, graceful) for rank in (1, 2)]
        for pending in leaving:
            _, kind, words = pending.result(timeout=30.0)
            assert kind in ("WorkerLost", "CallNotSent")
            assert "worker0" in words


def test_a_dynamic_group_can_be_left_when_its_store_is_gone() -> None:
    with Workers(2, join=False) as workers:
        port = free_port()
        workers.run(0, join_over_tcp, 0, port, None)
        workers.run(1, join_over_tcp, 1, port, None)
        assert workers.run(1, targets.call, "worker0", targets.double, 2) == 4
        workers.kill(0)
        _, kind, words = workers.run(1, graceful)
        assert kind in ("", "RendezvousError"), words
        assert workers.run(1, graceful)[1] == "NotInitialized", "it has ended all the same"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def join_over_tcp(rank: int, port: int, world_size: int | None = 3) -> None:
    options = rpc.RemoraRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)


# Several threads, and several workers one after the other.


def leave_in_a_thread() -> tuple[threading.Thread, list[tuple[float, str, str]]]:
    outcomes: list[tuple[float, str, str]] = []
    thread = threading.Thread(target=lambda: outcomes.append(graceful()), daemon=True)
    thread.start()
    return thread, outcomes


def wait_in_vain_and_end() -> tuple[str, str]:
    """One thread waits for the others to come; another one ends the worker. What the first is told."""
    worker = rpc._get_current_rpc_agent()
    thread, outcomes = leave_in_a_thread()
    eventually(lambda: all_gather.gatherings_of(worker).states)
    rpc.shutdown(graceful=False)
    thread.join(2.5)
    assert outcomes, "it waits for ever"
    return outcomes[0][1:]


def test_who_waits_in_shutdown_is_told_when_another_thread_ends_the_worker() -> None:
    with Workers(2) as workers:
        kind, words = workers.run(0, wait_in_vain_and_end)
        assert kind == "NotInitialized"
        assert "no longer running" in words
        workers.stop(1)  # it cannot leave gracefully: the other has gone


def leave_twice_and_join_again(method: str) -> tuple[str, int]:
    """One thread is held up while it leaves; another one ends the worker and starts the next. Whether that one works."""
    former, held, go = rpc._get_current_rpc_agent(), threading.Event(), threading.Event()

    def leave(timeout: float) -> None:
        held.set()
        assert go.wait(10.0)

    former.leave = leave  # type: ignore[method-assign]
    thread, outcomes = leave_in_a_thread()
    assert held.wait(10.0)
    rpc.shutdown(graceful=False)
    targets.join_dynamic("worker0", 0, method)
    go.set()
    thread.join(10.0)
    value = rpc.rpc_sync("worker0", targets.double, args=(2,))
    rpc.shutdown()
    return outcomes[0][1], value


def test_a_shutdown_that_ends_late_does_not_end_the_next_worker() -> None:
    with Workers(1, join=False) as workers:
        workers.run(0, targets.join_dynamic, "worker0", 0, workers.init_method)
        assert workers.run(0, leave_twice_and_join_again, workers.init_method) == ("", 4)


def leave_late(other: str) -> list[str]:
    """Leave, and look after the others once more when one of them has ended; what was heard about it."""
    worker = rpc._get_current_rpc_agent()
    peers, stop = worker.agent.peers, worker.stop

    def late(graceful: bool = False) -> None:
        eventually(lambda: worker.handshake_client.is_gone(peers.find(other).record))
        peers.failure_detector._began = float("-inf")
        peers.tick(worker.clock.now())
        eventually(lambda: not peers.find(other).dialling)
        stop(graceful)

    worker.stop = late  # type: ignore[method-assign]
    witness.listen()
    rpc.shutdown()
    return witness.kinds(other)


def test_one_that_has_ended_before_us_is_not_taken_for_dead() -> None:
    """They never talked to each other, so it did not say goodbye, and the time has come to look after it."""
    with Workers(3) as workers:
        late = workers.start(2, leave_late, "worker1")
        for pending in [workers.start(rank, graceful) for rank in (0, 1)]:
            _, kind, words = pending.result()
            assert kind == "", words
        assert "Died" not in late.result()
        assert workers.output(2) == ""


def leave_from_a_callback(to: str) -> None:
    ended = threading.Event()

    def leave(done: object) -> None:
        rpc.shutdown()
        ended.set()

    rpc.rpc_async(to, targets.double, args=(1,)).then(leave)
    assert ended.wait(10.0)


def test_a_callback_may_end_its_worker_without_a_word() -> None:
    with Workers(2, join=False) as workers:
        for rank in (0, 1):
            workers.run(rank, targets.join_dynamic, f"worker{rank}", rank, workers.init_method)
        workers.run(0, leave_from_a_callback, "worker1")
        assert workers.output(0) == ""
        workers.run(1, targets.leave)
