"""What the command prints of thousands of things that are alike."""

from __future__ import annotations

import argparse
import io
from dataclasses import replace
from pathlib import Path

import pytest

from remora.command.output import PlainOutput
from remora.command.verbs import stack_verb, why_verb
from remora.observer.model import GroupSnapshot, Stage, ThreadStatus
from tests.observer.snapshots import call, gone, group, key, waits_for, worker


def explained(snapshot: GroupSnapshot) -> list[str]:
    stream = io.StringIO()
    options = argparse.Namespace(what=None, limit=20, json=False, watch=None)
    why_verb._once(options, snapshot, PlainOutput(stream))
    return stream.getvalue().splitlines()


def shown(snapshot: GroupSnapshot, native: bool = False) -> list[str]:
    stream = io.StringIO()
    stack_verb.show_stacks(snapshot, PlainOutput(stream), native=native)
    return stream.getvalue().splitlines()


def test_chains_that_are_alike_are_told_once_and_counted() -> None:
    """They do not push out what is told only once."""
    calls = tuple(call(f"worker0#{n}", "worker1", "f", Stage.SENT, 100.0 + n) for n in range(1, 51))
    calls += (call("worker0#99", "worker2", "g", Stage.SENT, 1.0),)
    snapshot = group(
        worker("worker0", calls=calls, waits=(waits_for("worker0#99", age=1.0),)),
        worker("worker2"),
        missing=(gone("worker1"),),
    )
    assert explained(snapshot)[1:4] == [
        "  f on worker1, and worker1 is silent: its process is stopped (SIGSTOP) (and 49 more like this)",
        "  worker0 waits for g on worker2 (1.0 s), which is on its way there or back",
        "",
    ]


def test_ages_do_not_make_chains_unlike() -> None:
    calls = tuple(call(f"worker0#{n}", "worker1", "f", Stage.SENT) for n in range(1, 4))
    waiting = tuple(waits_for(f"worker0#{n}", thread=n, age=10.0 + n) for n in range(1, 4))
    threads = tuple(ThreadStatus(id=n, name="pool", role="program", stack=("t.py:1 f",)) for n in range(1, 4))
    (line,) = explained(group(worker("worker0", calls=calls, waits=waiting, threads=threads), worker("worker1")))[1:]
    assert line == (
        "  thread pool of worker0 waits for f on worker1 (13.0 s), which is on its way there or back (and 2 more like this)"
    )


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo Thread 17; echo $*", ["    py-spy says:", "    Thread 17", "    dump --native --pid 4711"]),
        ("echo Error: not permitted >&2; exit 1", ["    py-spy says nothing: Error: not permitted"]),
        ("exit 3", ["    py-spy says nothing: it ended with exit code 3"]),
        (None, []),
    ],
)
def test_the_stacks_of_c_code_if_py_spy_is_installed(
    script: str | None, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        tool = tmp_path / "py-spy"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    held = gone("worker1", stacks="Thread 0x1: f", pid=4711)
    stopped = gone("worker2", pid=4712)
    assert shown(group(missing=(held, stopped)), native=True) == [
        "worker1 does not answer. Its process wrote:",
        "    Thread 0x1: f",
        *told,
    ]


def test_stacks_that_are_alike_name_a_few_of_their_threads() -> None:
    threads = tuple(
        ThreadStatus(id=n, name=f"t{n}", role="coroutine", stack=("t.py:1 f",), serving=key(f"worker1#{n}"))
        for n in range(1, 3001)
    )
    found = worker("worker0", threads=threads)
    lines = shown(group(replace(found, left_out={"threads": 7})))
    assert lines[0] == "3000 threads: worker0 t1, worker0 t2, worker0 t3, worker0 t4 and 2996 others"
    assert lines[1] == "  worker0 t1 serves call worker1#1 for worker1 (worker1#1)"
    assert lines[11:14] == ["  … and 2,990 more", "    t.py:1 f", ""]
    assert "7 more threads and coroutines not shown" in lines[-1]
