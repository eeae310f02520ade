"""Programs as people write them from PyTorch's documentation run as they are. They import torch, and nothing of ours."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import pytest

from remora.compat.check import what_is_wrong
from remora.compat.usage import uses
from tests.compat.fresh import TIMEOUT, python, run

pytestmark = pytest.mark.timeout(TIMEOUT + 30)

PROGRAMS = Path(__file__).with_name("programs")
TWO_PORTS_TRIES = 50


def two_free_ports() -> int:
    """The first of two neighbouring ports that nobody listens at."""
    for _ in range(TWO_PORTS_TRIES):
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port
    raise AssertionError("no two free ports side by side")


@pytest.mark.parametrize(
    ("program", "last_words"),
    [
        ("parameter_server", "the loss fell on every trainer"),
        ("split_rnn", "the loss fell through both workers, from"),
        ("actors", "the agent learned"),
        ("remote_layers", "the loss fell on every trainer, and they agree"),
    ],
)
def test_it_runs(program: str, last_words: str, tmp_path: Path) -> None:
    ended = python(["-m", "remora.compat", PROGRAMS / f"{program}.py", str(two_free_ports())], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith(last_words)


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_it_knows_nothing_of_remora_and_uses_what_remora_has(path: Path) -> None:
    text = path.read_text()
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any("remora" in ast.unparse(node) for node in imported)
    assert [use.name for use in uses(text) if what_is_wrong(use.name, use.in_script)] == []


RANK_ALONE = """
import torch.distributed.rpc as rpc
rpc.init_rpc("w", rank=0)
print(rpc.api._get_current_rpc_agent().is_static_group)
rpc.shutdown(graceful=False)
"""


@pytest.mark.parametrize("ours", ["", "import remora.compat; remora.compat.install()"], ids=["torch", "remora"])
def test_a_rank_without_a_world_size_asks_for_a_dynamic_group_also_under_a_launcher(ours: str, tmp_path: Path) -> None:
    """A launcher sets WORLD_SIZE. PyTorch's group is dynamic all the same, and programs that let workers join rely on it."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(two_free_ports())}
    assert run(ours + RANK_ALONE, tmp_path, RANK="0", WORLD_SIZE="1", **place).strip() == "False"
