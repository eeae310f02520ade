"""`python -m remora.compat` runs a program as `python` would, and `--check` reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.compat import __main__ as command
from remora.compat import check
from tests.compat.fresh import python

SHOWS = """
import sys
print(sys.argv[1:], __name__, sys.path[0], sys.flags.utf8_mode, "torch" in sys.modules)
sys.exit(int(sys.argv[1]))
"""


def test_a_script_is_main_and_gets_its_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "script.py").write_text(SHOWS)
    ended = python(["-X", "utf8", "-m", "remora.compat", folder / "script.py", "3", "-m", "--check"], tmp_path)
    assert ended.stdout == f"['3', '-m', '--check'] __main__ {folder} 1 False\n"
    assert ended.returncode == 3


def test_a_module_is_main_and_gets_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(SHOWS)
    ended = python(["-m", "remora.compat", "-m", "package.program", "0"], tmp_path)
    assert ended.stdout == f"['0'] __main__ {tmp_path} 0 False\n"


def test_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert command.main(["--help"]) == 0
    assert capsys.readouterr().out.count("python -m remora.compat script.py") == 2


def test_an_interpreter_that_ignores_the_environment_is_refused(tmp_path: Path) -> None:
    source = Path(command.__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(source)!r}); from remora.compat.__main__ import main; "
    code += "sys.exit(main(['x.py']))"
    ended = python(["-I", "-c", code], tmp_path)
    assert ended.returncode == 2
    assert "without -E, -I and -S" in ended.stderr


def written(folder: Path, text: str) -> str:
    path = folder / "checked.py"
    path.write_text(text)
    return str(path)


def test_check_finds_all_that_a_program_uses_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import torch.distributed.rpc as rpc\nrpc.init_rpc('a', backend=rpc.BackendType.TENSORPIPE)\nrpc.shutdown()\n"
    assert check.main([written(tmp_path, program)]) == 0
    printed = capsys.readouterr().out
    assert "all 4 names are there" in printed
    assert "torch.distributed.rpc.init_rpc " in printed


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("from torch.distributed.rpc._utils import _update_group_membership", "Remora has no such name"),
        ("import torch; torch._C._distributed_rpc._invoke_rpc_builtin()", "Remora has no such name"),
        ("from torch.distributed import rpc; rpc.not_a_name", "neither Remora nor this torch"),
        (
            "import torch\nfrom torch.distributed.rpc import rpc_async\n"
            "@torch.jit.script\ndef f(x: int):\n    return rpc_async('a', f, (x,))",
            "inside TorchScript",
        ),
    ],
)
def test_check_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, complaint: str
) -> None:
    assert check.main([written(tmp_path, line)]) == 1
    assert complaint in capsys.readouterr().out


def test_check_reads_folders_and_says_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, "import os\n")
    assert check.main([str(tmp_path)]) == 0
    assert "uses nothing of torch's RPC" in capsys.readouterr().out
    written(tmp_path, "def (:\n")
    assert check.main([str(tmp_path), str(tmp_path / "missing.py")]) == 2
    assert capsys.readouterr().err.count("cannot be read") == 2
