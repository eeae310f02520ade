"""`init_rpc` means that the workers can talk: what keeps them from it is its error, and no first call has to find out."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from remora import rpc, worker
from remora.agent.peers.greeting import cannot_talk
from remora.agent.peers.peer import ENDED
from remora.errors import AuthenticationError, RemoraError, RendezvousError, WorkerLost
from remora.rendezvous.record import WorkerRecord
from remora.testing.processes import Pending
from remora.worker import Worker
from tests import hosts
from tests.eventually import eventually
from tests.hosts import Hosts
from tests.processes import targets, witness
from tests.workers import Workers

needs_hosts = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "there are hosts")
ONE, OTHER = "1" * 32, "2" * 32
GONE = "its process ended, or gave up init_rpc"
GIVING_UP = "it left again, or gave up init_rpc"


def join(rank: int, size: int | None, method: str, namespace: str = "", **settings: Any) -> None:
    logging.getLogger("remora").setLevel(logging.INFO)
    if namespace:
        hosts.enter(namespace)
    options = rpc.RemoraRpcBackendOptions(init_method=method, rpc_timeout=20, **settings)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def error_of(pending: Pending[None]) -> BaseException:
    with pytest.raises((RendezvousError, AuthenticationError)) as caught:
        pending.result(timeout=30)
    return caught.value


# Secrets.


def test_another_secret_is_an_error_of_every_worker() -> None:
    with Workers(3, join=False) as workers:
        method, secrets = workers.init_method, [ONE, OTHER, ONE]
        errors = [
            error_of(each)
            for each in [workers.start(rank, join, rank, 3, method, secret=secrets[rank]) for rank in range(3)]
        ]
        assert all(isinstance(error, AuthenticationError) and "same secret" in str(error) for error in errors)
        assert all(f"The group at {method}" in str(error) and "'worker1' (rank 1)" in str(error) for error in errors)


def test_a_worker_without_a_secret_is_named_to_all() -> None:
    with Workers(2, join=False) as workers:
        method = workers.init_method
        pending = [workers.start(0, join, 0, 2, method), workers.start(1, join, 1, 2, method, secret=ONE)]
        for each in pending:
            error = error_of(each)
            assert isinstance(error, AuthenticationError)
            assert "no secret was given, so that of this user on its host counts: 'worker0' (rank 0)" in str(error)
            assert "a secret was given: 'worker1' (rank 1)" in str(error)


def test_who_joins_a_dynamic_group_with_another_secret_is_told_and_not_listed() -> None:
    with Workers(3, join=False) as workers:
        method = workers.init_method
        workers.run(0, join, 0, None, method, secret=ONE)
        error = error_of(workers.start(1, join, 1, None, method, secret=OTHER))
        assert isinstance(error, AuthenticationError)
        assert "same secret" in str(error)
        workers.run(2, join, 2, None, method, secret=ONE)
        assert workers.run(2, witness.names) == ["worker0", "worker2"]
        workers.run(2, targets.leave)
        workers.run(0, targets.leave)


# Addresses.


@needs_hosts
def test_a_firewall_is_an_error_of_init_rpc_that_says_what_to_set() -> None:
    with Hosts(2) as where, Workers(2, join=False) as workers:
        where.cut(1)
        method = workers.init_method

        def start(rank: int) -> Pending[None]:
            at = {"host": where.address(rank), "secret": ONE, "reconnect_timeout": 1.0, "connect_timeout": 1.0}
            return workers.start(rank, join, rank, 2, method, where.namespace(rank), **at)

        began = time.monotonic()
        pending = [start(0), start(1)]
        for rank, each in enumerate(pending):
            text, other = str(error_of(each)), 1 - rank
            assert f"worker{rank} cannot talk to worker{other}" in text
            assert f"tcp://{where.address(other)}:" in text
            assert "REMORA_HOST" in text
            assert "firewall" in text
        assert time.monotonic() - began < 15


@needs_hosts
def test_an_address_that_only_its_own_host_reaches_is_named() -> None:
    """Before, the last to come took such a worker for dead: it dialled its own loopback."""
    with Hosts(2) as where, Workers(2, join=False) as workers:
        method = workers.init_method
        pending = [
            workers.start(0, join, 0, 2, method, where.namespace(0), host="127.0.0.1", secret=ONE),
            workers.start(1, join, 1, 2, method, where.namespace(1), host=where.address(1), secret=ONE),
        ]
        texts = [str(error_of(each)) for each in pending]
        assert "no address of worker0 works from here: it listens at" in texts[1]
        assert "On worker0, set REMORA_HOST or REMORA_INTERFACE" in texts[1]
        assert "Missing" not in texts[0]


@needs_hosts
def test_who_joins_a_dynamic_group_from_behind_a_firewall_is_told_and_takes_nobody_off_the_list() -> None:
    with Hosts(3) as where, Workers(3, join=False) as workers:
        method = workers.init_method

        def start(rank: int) -> Pending[None]:
            at = {"host": where.address(rank), "secret": ONE, "reconnect_timeout": 1.0, "connect_timeout": 1.0}
            return workers.start(rank, join, rank, None, method, where.namespace(rank), **at)

        start(0).result(20)
        where.cut(1)
        text = str(error_of(start(1)))
        assert "worker1 cannot talk to worker0" in text
        assert "REMORA_HOST" in text
        start(2).result(20)
        assert workers.run(2, witness.names) == ["worker0", "worker2"]
        workers.run(2, targets.leave)
        workers.run(0, targets.leave)


# Coming late, and dying on the way.


def start_late(seconds: float, rank: int, size: int, method: str) -> None:
    start = Worker.start

    def late(self: Worker, greet: bool = True) -> None:
        time.sleep(seconds)
        start(self, greet)

    Worker.start = late  # type: ignore[method-assign]
    join(rank, size, method)


def start_and_die(rank: int, size: int, method: str) -> None:
    def die(self: Worker, greet: bool = True) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Worker.start = die  # type: ignore[method-assign]
    join(rank, size, method)


def test_a_neighbour_that_is_late_is_waited_for() -> None:
    with Workers(3, join=False) as workers:
        method = workers.init_method
        pending = [workers.start(1, start_late, 1.3, 1, 3, method)]  # longer than one looks whether it lives
        pending += [workers.start(rank, join, rank, 3, method) for rank in (0, 2)]
        for each in pending:
            each.result(20)
        assert workers.run(0, targets.call, "worker1", targets.double, 2) == 4


def test_a_neighbour_that_dies_meanwhile_is_named() -> None:
    with Workers(2, join=False) as workers:
        method = workers.init_method
        workers.start(1, start_and_die, 1, 2, method)
        text = str(error_of(workers.start(0, join, 0, 2, method)))
        assert f"cannot talk to worker1 of its group: {GONE}, while the group was being formed" in text
        workers.kill(1)


def start_and_give_up(rank: int, size: int, method: str) -> None:
    def give_up(*_: object) -> None:
        raise RendezvousError("given up")

    worker.greet_neighbours = give_up
    join(rank, size, method)


def test_a_neighbour_whose_own_init_rpc_failed_is_not_said_to_have_ended() -> None:
    with Workers(2, join=False) as workers:
        method = workers.init_method
        given_up = workers.start(1, start_and_give_up, 1, 2, method)
        text = str(error_of(workers.start(0, join, 0, 2, method)))
        assert str(error_of(given_up)) == "given up"
        end = next(each for each in (GONE, GIVING_UP) if each in text)  # it has ended its part, or is about to
        assert f"cannot talk to worker1 of its group: {end}, while the group was being formed" in text
        assert "is lost, too" not in text
        assert workers.run(1, targets.double, 2) == 4  # its process lives


def test_the_dead_because_of_whom_a_neighbour_may_have_given_up_are_named() -> None:
    def member(name: str, state: str, reason: str = "") -> Any:
        place = WorkerRecord(name, 0, "incarnation", "host", ("tcp://127.0.0.1:1",))
        return SimpleNamespace(name=name, state=state, reason=reason, has_ended=reason == ENDED, record=place)

    members = [member("a", "alive"), member("b", "dead", ENDED), member("c", "dead", ENDED), member("d", "left", "it left")]
    members.append(member("e", "dead", "it cannot be reached"))
    text = str(cannot_talk(members[0].record, members[1], RemoraError("lost"), members))
    assert f"a cannot talk to b of its group: {GONE}, while the group was being formed. See what it printed. " in text
    assert f" c is lost, too: {GONE}. e is lost, too: it cannot be reached. Tried " in text
    assert text.count("is lost, too") == 2


# What the log says.


def log_to_stderr(level: int) -> None:
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", force=True)


def test_the_log_tells_who_listens_joins_connects_and_leaves() -> None:
    with Workers(2, join=False) as workers:
        workers.run_all(log_to_stderr, logging.INFO)
        for each in [workers.start(rank, join, rank, 2, workers.init_method) for rank in range(2)]:
            each.result(20)
        for each in [workers.start(rank, targets.leave) for rank in range(2)]:
            each.result(20)
        said = workers.output(0)
        assert "INFO worker0 listens at " in said
        assert "INFO worker0 joined " in said
        assert "INFO worker0 is connected with worker1 (unix://" in said
        assert "INFO worker0 left the group" in said
        assert "WARNING" not in said


def lost_by_shutdown() -> str:
    with pytest.raises(WorkerLost) as caught:
        rpc.shutdown()
    return str(caught.value)


def test_a_death_is_one_short_line_and_shutdown_blames_the_dead() -> None:
    with Workers(3) as workers:
        workers.run_all(log_to_stderr, logging.INFO)
        pid = workers.pid(2)
        workers.kill(2)
        assert "name=worker2) was lost while worker0 waited for it: its process ended" in workers.run(0, lost_by_shutdown)
        # The leader of gatherings has left by now, because of that. It is not to blame.
        assert "name=worker2) was lost while worker1 waited for it" in workers.run(1, lost_by_shutdown)
        for rank in (0, 1):
            lines = [line for line in workers.output(rank).splitlines() if "worker2" in line and "INFO" not in line]
            assert lines == [f"WARNING worker2 (pid {pid}) is gone: its process ended"]


def host_a_store(rank: int, port: int) -> None:
    join(rank, None, f"tcp://127.0.0.1:{port}")


def test_the_end_of_the_store_brings_no_stack_traces_of_c_plus_plus() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with Workers(2, join=False) as workers:
        workers.run(0, host_a_store, 0, port)
        workers.run(1, host_a_store, 1, port)
        workers.kill(0)
        eventually(lambda: workers.run(1, witness.states)["worker0"] == "dead")
        workers.run(1, targets.leave)
        assert "frame #" not in workers.output(1)
        assert "c10d" not in workers.output(1)
