"""`python -m remora.launch`: groups that form, die and form again, from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
