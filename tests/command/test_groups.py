"""The command looks at workers in processes of their own that hang, are slow, leak, freeze and die."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from remora import rpc
from remora.command.main import main
from remora.observer import directory, snapshot_json
from remora.testing.processes import Pending, Processes
from tests.command import targets
from tests.command.running import Done, group_of, remora
from tests.eventually import eventually

pytestmark = pytest.mark.usefixtures("fork_server")

LONG = "30s"  # for workers of a busy machine; no test waits for that long, unless one of them is silent


@pytest.fixture(scope="module")
def workers(fork_server: None) -> Iterator[Processes]:
    with Processes(3) as started:
        yield started


def look(workers: Processes, *words: str, timeout: str = LONG) -> Done:
    done = remora(*words, "--group", group_of(workers), "--timeout", timeout)
    assert "Traceback" not in done.err, done.err
    return done


def until(workers: Processes, text: str, *words: str, timeout: str = LONG) -> Done:
    """Look again and again, until the text is there."""
    seen: list[Done] = []

    def there() -> bool:
        seen[:] = [look(workers, *words, timeout=timeout)]
        return text in seen[0].out

    eventually(there, 60, lambda: f"{text!r} in\n{seen[0].out}{seen[0].err}")
    return seen[0]


def test_a_healthy_group(workers: Processes) -> None:
    ps = look(workers, "ps")
    assert ps.code == 0, ps
    assert [line.split()[1] for line in ps.out.splitlines()[1:]] == ["worker0", "worker1", "worker2"]
    why = look(workers, "why")
    assert why.code == 0
    assert "A cycle" not in why.out
    told = json.loads(look(workers, "ps", "--json").out)
    assert [each["name"] for each in told[0]["workers"]] == ["worker0", "worker1", "worker2"]
    assert {each["pid"] for each in told[0]["workers"]} == {workers.pid(n) for n in range(3)}


def test_a_cycle_of_three_workers_is_found_and_named() -> None:
    """It never ends, so these workers are of no use afterwards."""
    with Processes(3) as workers:
        workers.start(0, targets.begin_cycle, 2)
        why = until(workers, ": a cycle", "why")
        assert why.code == 1
        lines = why.out.splitlines()
        assert lines[0] == "A cycle:"
        sentence = lines[1].strip()
        assert sentence.startswith("worker0 waits for targets.around on worker1 (")
        assert "which waits for targets.around on worker2 (" in sentence
        assert "which waits for targets.take_lock on worker0 (" in sentence
        assert sentence.endswith("which waits for the lock lock that the main thread of worker0 holds: a cycle")
        assert "no deadline" in lines[2]
        told = json.loads(look(workers, "why", "--json").out)
        assert [node["worker"] for node in told["cycles"][0]["nodes"] if node["kind"] == "thread"] == [
            "worker0", "worker1", "worker2", "worker0", "worker0",
        ]  # fmt: skip
        assert ": a cycle" in look(workers, "why", "worker2").out
        calls = look(workers, "calls", "--function", "take_lock")
        (row,) = calls.out.splitlines()[1:]
        assert row.split()[1:5] == ["worker2", "worker0", "tests.command.targets.take_lock", "running"]


def test_a_cycle_through_an_event_loop() -> None:
    """It never ends, so these workers are of no use afterwards."""
    with Processes(2) as workers:
        workers.start(0, targets.call_on_the_loop)
        why = until(workers, ": a cycle", "why")
        assert why.code == 1
        sentence = why.out.splitlines()[1].strip()
        assert sentence.startswith("thread remora-worker0-loop of worker0, which serves targets.block_the_loop on worker0, ")
        assert "waits for targets.call_back on worker1 (" in sentence
        assert "which waits for targets.do_nothing on worker0 (" in sentence
        assert sentence.endswith(", which waits for the event loop of worker0: a cycle")


def test_a_call_stuck_behind_a_lock_is_shown_with_both_stacks(workers: Processes) -> None:
    holding = workers.start(1, targets.hold_lock)
    until(workers, " hold_lock", "stack", "worker1")
    calling = workers.start(0, targets.wait_for, "worker1", "take_lock")
    try:
        why = until(workers, "the lock lock", "why")
        assert "worker0 waits for targets.take_lock on worker1 (" in why.out
        assert "which waits for the lock lock that the main thread of worker1 holds, which is at targets.py:" in why.out
        assert "hold_lock, in Condition.wait" in why.out
        stack = look(workers, "stack", "worker1")
        blocked, _, holder = stack.out.partition("worker1 MainThread\n")
        assert "serves tests.command.targets.take_lock for worker0" in blocked
        assert "which MainThread holds" in blocked
        assert blocked.rstrip().endswith("take_lock")
        assert "targets.py" in holder
        assert " hold_lock" in holder
    finally:
        workers.run(2, rpc.rpc_sync, "worker1", targets.release)
        holding.result()
        calling.result()


def test_a_barrier_with_one_missing(workers: Processes) -> None:
    waiting: list[Pending[None]] = [workers.start(rank, targets.meet) for rank in (0, 1)]
    try:
        why = until(workers, "worker1 waits in _all_gather", "why")
        assert "worker0 waits in _all_gather (" in why.out or "worker0 waits in _all_gather," in why.out
        assert why.out.count("where worker2 has not come, and worker2 is at ") == 2
        assert why.code == 0
    finally:
        workers.run(2, targets.meet)
        for each in waiting:
            each.result()


def test_leaked_references_are_attributed_to_function_and_holder(workers: Processes) -> None:
    workers.run(0, targets.leak, "worker1", 10_000)
    refs = look(workers, "refs", "--function", "make_thing", "--older", "0s")
    rows = [line.split() for line in refs.out.splitlines()[1:]]
    assert sum(int(row[row.index("worker0") + 1].replace(",", "")) for row in rows) == 10_000, refs.out
    assert all(row[:2] == ["worker1", "tests.command.targets.make_thing"] for row in rows)
    each = look(workers, "refs", "--each", "--limit", "3")
    assert len(each.out.splitlines()) == 5
    assert "9,997 more rows (--limit)" in each.out
    workers.run(0, targets.forget)


def test_a_slow_link_made_by_a_fault_plan(workers: Processes) -> None:
    workers.set_faults("delay PYTHON_CALL worker0->worker2 50ms")
    try:
        for caller, callee in ((0, 1), (0, 2), (1, 2)):
            workers.run(caller, targets.many_calls, f"worker{callee}", 12)
        links = look(workers, "links", "--sort", "delay")
        (slow,) = [line for line in links.out.splitlines() if line.startswith("slow:")]
        assert slow.startswith("slow: a call from worker0 to worker2 is on the way for 5")
        assert links.out.splitlines()[1].split()[:2] == ["worker0", "worker2"]
    finally:
        workers.set_faults("")


def test_events_tell_of_calls(workers: Processes) -> None:
    workers.run(0, targets.many_calls, "worker1", 3)
    events = look(workers, "events", "--worker", "worker1", "--kind", "run ended", "--limit", "3")
    rows = events.out.splitlines()[1:4]
    assert all("worker1" in row and "targets.make_thing" in row and "worker0#" in row for row in rows), events.out


def test_a_worker_whose_interpreter_is_held_in_c(workers: Processes) -> None:
    held = workers.start(2, targets.hold_interpreter, 14)
    done = until(workers, "worker2 does not answer. Its process wrote:", "stack", timeout="4s")
    assert done.code == 1
    assert "hold_interpreter" in done.out.partition("Its process wrote:")[2]
    assert "2 of 3 workers answered; worker2 is silent" in done.out
    held.result()


def test_a_worker_frozen_by_a_signal(workers: Processes) -> None:
    workers.freeze(2)
    calling = workers.start(0, targets.many_calls, "worker2", 1)
    try:
        ps = look(workers, "ps", timeout="5s")
        assert ps.code == 1
        assert "2 of 3 workers answered; worker2 is silent: its process" in ps.out
        assert "SIGSTOP" in ps.out
        why = until(workers, "worker0 waits for targets.make_thing on worker2", "why", timeout="5s")
        assert why.code == 1
        assert "and worker2 is silent: its process" in why.out
    finally:
        workers.thaw(2)
        calling.result()


def test_workers_of_another_version(
    workers: Processes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(snapshot_json, "VERSION", snapshot_json.VERSION + 1)
    assert main(["ps", "--group", group_of(workers), "--timeout", LONG]) == 1
    told = capsys.readouterr().out
    assert "0 of 3 workers answered; worker0 is unreachable: this snapshot has version 1" in told
    assert "install the same one everywhere" in told


def test_wrong_names_are_a_clear_line(workers: Processes) -> None:
    for words in (["why", "worker9"], ["calls", "--worker", "worker9"], ["stack", "worker9"], ["why", "worker0#99999"]):
        done = look(workers, *words)
        assert done.code == 2
        assert done.err.startswith("remora: ")
        assert "worker0, worker1, worker2" in done.err
        assert done.out == ""


def test_a_worker_that_was_killed_and_a_group_that_is_gone() -> None:
    with Processes(2) as workers:
        group = group_of(workers)
        workers.kill(1)
        ps = until(workers, "worker1 is dead", "ps")
        assert ps.code == 1
        assert "1 of 2 workers answered" in ps.out
        assert any(line.split()[1:4] == ["worker1", "1", "dead"] for line in ps.out.splitlines() if "dead" in line)
    done = remora("ps", "--group", group)
    assert done.code == 2
    assert done.err.startswith(f"remora: no group '{group}' of this user runs on this host")


def test_another_secret_is_refused(workers: Processes) -> None:
    entry = next(each for each in directory.entries() if each.pid == workers.pid(0))
    right = remora("ps", "--at", entry.addresses[0], "--timeout", LONG)
    assert right.code == 0, right.err
    wrong = remora("ps", "--at", entry.addresses[0], REMORA_SECRET="x" * 32)
    assert wrong.code == 2
    assert "the ends do not have the same secret" in wrong.err
    assert wrong.out == ""
