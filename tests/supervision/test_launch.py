"""`python -m remora.launch`: groups that form, die and form again, from the command line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.supervision import prefixed_output
from remora.supervision.prefixed_output import folded

STATIC = """
import os
from remora import rpc
rank, size, life = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "REMORA_RESTARTS"))
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
if rank == 0 and life == 0:
    os._exit(11)
found = sorted(rpc._all_gather(rank).values())
rpc.shutdown()
os.write(1, f"rank {rank} life {life} found {found}\\n".encode())  # at once: others print there, too
"""

DYNAMIC = """
import os, sys, time
from remora import rpc
rank, life = int(os.environ["RANK"]), int(os.environ["REMORA_RESTARTS"])
rpc.init_rpc(f"worker{rank}", rank=rank)
if rank == 0 and life == 0:
    os._exit(11)
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    try:
        assert rpc.rpc_sync(f"worker{1 - rank}", os.getenv, args=("REMORA_RESTARTS",)) == str(rank)
        break
    except (RuntimeError, AssertionError):
        time.sleep(0.02)
else:
    sys.exit(1)
rpc._all_gather(None, {"worker0", "worker1"})
os.write(1, f"rank {rank} life {life} done\\n".encode())
rpc.shutdown()
"""


def launch(tmp_path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(text)
    command = [sys.executable, "-m", "remora.launch", *options, str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["-n", "0"], "argument -n/--nproc-per-node/--nproc_per_node: give a number of processes, at least 1, not '0'"),
        (["--port", "99999"], "argument --port: give a number from 1 to 65535, or 0 for any port that is free, not '99999'"),
        (["--host", "192.0.2.1"], "cannot host the store at --host 192.0.2.1: it is no address or name of this host"),
        (["--host", "nowhere.invalid"], "cannot host the store at --host nowhere.invalid: it is no address or name of this"),
        (["--port", "{taken}"], "cannot host the store at 127.0.0.1:{taken}: another program has that port. Choose another"),
    ],
)
def test_what_cannot_be_launched_is_one_line(options: list[str], text: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        done = launch(tmp_path, "print('ran')", *(each.format(taken=taken) for each in options))
    assert done.returncode != 0
    assert text.format(taken=taken) in done.stderr
    assert "Traceback" not in done.stderr
    assert "c10d" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--nproc-per-node=2", "--nproc_per_node=2"])
def test_the_number_of_processes_may_be_given_as_to_torchrun(option: str, tmp_path: Path) -> None:
    done = launch(tmp_path, "import os; os.write(1, os.environ['WORLD_SIZE'].encode() + b'\\n')", option)
    assert sorted(done.stdout.splitlines()) == ["[0] 2", "[1] 2"], done.stderr


def test_a_static_group_is_restarted_as_a_whole(tmp_path: Path) -> None:
    done = launch(tmp_path, STATIC, "-n", "2", "--restart", "on-failure", "--scope", "all", "--delay", "0.1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 life 1 found [0, 1]", "[1] rank 1 life 1 found [0, 1]"]
    assert "exit code 11" in done.stderr


def test_a_worker_of_a_dynamic_group_is_restarted_alone(tmp_path: Path) -> None:
    done = launch(tmp_path, DYNAMIC, "-n", "2", "--restart", "on-failure", "--delay", "0.1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 life 1 done", "[1] rank 1 life 0 done"]


def test_the_exit_code_is_that_of_the_process_that_failed(tmp_path: Path) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(60)"
    assert launch(tmp_path, text, "-n", "2").returncode == 5


INTERRUPTED = """
import os, time
from remora import rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")

os.write(1, b"ready\\n"); rpc.rpc_sync(f"worker{1 - rank}", time.sleep, args=(60,))
"""


SERVING = """
import os, time
from remora import rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
work = rpc.rpc_async("worker1", time.sleep, args=(60,)) if rank == 0 else None
os.write(1, b"ready\\n"); work.wait() if work else rpc.shutdown()
"""


@pytest.mark.parametrize("text", [INTERRUPTED, SERVING], ids=["each calls the other", "one serves while it shuts down"])
def test_ctrl_c_is_one_line_per_worker(text: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    command = [sys.executable, "-m", "remora.launch", "-n", "2", str(program)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    said = [line for line in errors.splitlines() if "is gone" not in line]  # one may end before the other is interrupted
    assert sorted(said) == [f"[{rank}] KeyboardInterrupt in <module> ({program}, line 7)" for rank in range(2)]
    assert process.returncode == -signal.SIGINT


def test_only_tracebacks_of_an_interrupt_are_folded() -> None:
    place = b'  File "train.py", line 3, in step\n    work()\n'
    trace = [b"Traceback (most recent call last):\n", *place.splitlines(keepends=True)]
    assert list(folded([b"a\n", *trace, b"KeyboardInterrupt\n", b"b\n"])) == [
        b"a\n", b"KeyboardInterrupt in step (train.py, line 3)\n", b"b\n",
    ]  # fmt: skip
    assert list(folded([*trace, b"ValueError: x\n"])) == [*trace, b"ValueError: x\n"]
    assert list(folded(trace)) == trace  # killed in the midst of it
    gone = b"worker0 (pid 17) is gone: its process ended\n"  # said by another thread
    assert list(folded([*trace[:2], gone, trace[2], b"KeyboardInterrupt\n"])) == [
        gone, b"KeyboardInterrupt in step (train.py, line 3)\n",
    ]  # fmt: skip
    torn = [*trace, b"\n"]  # the log line came before the end of a line
    assert list(folded([*torn, b"KeyboardInterrupt\n"])) == [b"KeyboardInterrupt in step (train.py, line 3)\n"]
    assert list(folded([*torn, b"ValueError: x\n"])) == [*torn, b"ValueError: x\n"]


def chain(handled_in: str) -> list[bytes]:
    """What Python prints when Ctrl-C strikes `take` while the function of that file handles another exception."""
    text = f"""Traceback (most recent call last):
  File "{handled_in}", line 7, in take
    return idle.pop()
IndexError: pop from empty list

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 3, in step
    work()
  File "{prefixed_output.__file__}", line 9, in take
    return new()
KeyboardInterrupt
"""
    return text.encode().splitlines(keepends=True)


@pytest.mark.parametrize("place", [prefixed_output.__file__, os.__file__, "/x/site-packages/torch/futures.py"])
def test_what_a_library_was_handling_is_no_news_after_an_interrupt(place: str) -> None:
    assert list(folded([b"a\n", *chain(place), b"b\n"])) == [
        b"a\n", b"KeyboardInterrupt in step (train.py, line 3)\n", b"b\n",
    ]  # fmt: skip


def test_what_the_program_was_handling_is_news() -> None:
    assert list(folded(chain("train.py"))) == chain("train.py")


def test_an_error_that_nothing_follows_is_shown_once_the_process_is_quiet() -> None:
    """A chain may follow it: it is held until the pipe says, by an empty piece, that nothing comes."""
    error = [b"Traceback (most recent call last):\n", b'  File "train.py", line 3, in step\n', b"ValueError: x\n"]

    def lines() -> Iterator[bytes]:
        yield from [*error, b""]
        raise AssertionError("nothing more comes")

    shown = folded(lines())
    assert [next(shown) for _ in error] == error


def test_an_interrupt_that_a_destructor_swallowed_is_one_line() -> None:
    head = b"Exception ignored in: <function Handle.__del__ at 0x7f>\n"
    interrupted = chain("x")[-6:]
    assert list(folded([head, *interrupted])) == [b"KeyboardInterrupt in step (train.py, line 3)\n"]
    failed = [*interrupted[:-1], b"ValueError: \n"]
    assert list(folded([head, *failed])) == [head, *failed]
    assert list(folded([head, b"", b"a\n"])) == [head, b"a\n"]


def test_one_process_prints_as_it_is(tmp_path: Path) -> None:
    assert launch(tmp_path, "print('plain')", "-n", "1").stdout == "plain\n"
