"""The processes that a program starts run on Remora, too, however they are started."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from remora.compat import children
from tests.compat.fresh import SOURCE, TIMEOUT, environment, python, run

pytestmark = pytest.mark.timeout(TIMEOUT + 30)

PROGRAMS = Path(__file__).with_name("programs")
WAYS = {"fork", "forkserver", "spawn", "subprocess", "torch.multiprocessing"}


def assert_all_on_remora(output: str) -> None:
    found = json.loads(output)
    assert found.keys() == WAYS
    assert set(found.values()) == {"remora.rpc"}, found


def test_children_of_a_program_that_was_started_by_us(tmp_path: Path) -> None:
    ended = python(["-m", "remora.compat", PROGRAMS / "children.py"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert_all_on_remora(ended.stdout)


def test_children_of_a_program_that_installs_it_itself(tmp_path: Path) -> None:
    """In its main part, which spawned children do not run."""
    text = f"""
import sys
sys.path.insert(0, {str(PROGRAMS)!r})
if __name__ == "__main__":
    import remora.compat
    remora.compat.install()
    import children
    children.main()
"""
    assert_all_on_remora(run(text, tmp_path))


def test_the_variable_alone_is_enough_where_remora_is_installed(tmp_path: Path) -> None:
    """The wheel puts a line into site-packages; addsitedir does with it what Python does when it starts."""
    shutil.copy(SOURCE / "remora-compat.pth", tmp_path)
    ask = f"import site; site.addsitedir({str(tmp_path)!r}); import sys; assert 'torch' not in sys.modules; "
    ask += "import torch.distributed.rpc as rpc; print(rpc.__name__)"
    for setting, expected in (("1", "remora.rpc"), ("0", "torch.distributed.rpc")):
        assert python(["-c", ask], tmp_path, REMORA_COMPAT=setting).stdout.strip() == expected


WATCHES = "import sys; print(any(type(each).__name__ == '_Watch' for each in sys.meta_path))"


@pytest.mark.parametrize("value", ["", "0", "no", "off", "false", "False", " OFF ", "NO"])
def test_what_means_no_means_no(tmp_path: Path, value: str) -> None:
    shutil.copy(SOURCE / "remora-compat.pth", tmp_path)
    ask = f"import site; site.addsitedir({str(tmp_path)!r}); {WATCHES}"
    assert python(["-S", "-c", ask], tmp_path, REMORA_COMPAT=value).stdout.strip() == "False"
    ask = f"import sys; sys.path.insert(0, {children.STARTUP!r}); import sitecustomize; {WATCHES}"
    assert python(["-S", "-c", ask], tmp_path, REMORA_COMPAT=value).stdout.strip() == "False"


@pytest.mark.parametrize("flags", ["-I", "-E"])
def test_an_interpreter_that_ignores_its_environment_ignores_the_variable(tmp_path: Path, flags: str) -> None:
    shutil.copy(SOURCE / "remora-compat.pth", tmp_path)
    ask = f"import site, sys; sys.path.append({str(SOURCE)!r}); site.addsitedir({str(tmp_path)!r}); {WATCHES}"
    assert python(["-S", "-c", ask], tmp_path, REMORA_COMPAT="1").stdout.strip() == "True"  # (-S: what is installed is old)
    assert python(["-S", flags, "-c", ask], tmp_path, REMORA_COMPAT="1").stdout.strip() == "False"


def test_the_variable_costs_nothing_when_it_is_not_set(tmp_path: Path) -> None:
    shutil.copy(SOURCE / "remora-compat.pth", tmp_path)
    ask = f"import site, sys; before = set(sys.modules), list(sys.meta_path); site.addsitedir({str(tmp_path)!r}); "
    ask += "assert (set(sys.modules), list(sys.meta_path)) == before"
    assert python(["-c", ask], tmp_path).returncode == 0


def test_torchrun(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    settings = environment()
    children.mark(settings)
    ended = python([*arguments, "--master-port", str(port), PROGRAMS / "ring.py"], tmp_path, **settings)
    assert ended.returncode == 0, ended.stderr
    for name in ("worker0", "worker1"):  # (two processes write to one pipe, perhaps into each other's line)
        assert ended.stdout.count(f"{name} runs on remora.rpc") == 1


def test_a_sitecustomize_that_was_there_is_run_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine'); value = 7")
    settings = environment(PYTHONPATH=f"{tmp_path}:{SOURCE}")
    children.mark(settings)
    ask = "import sys, sitecustomize; print(sitecustomize.value, [p for p in sys.path if p.endswith('startup')])"
    ended = python(["-c", ask], tmp_path, **settings)
    assert (ended.stdout.split("\n")[:2], ended.stderr) == (["mine", "7 []"], "")


def test_an_interpreter_without_remora_is_left_alone(tmp_path: Path) -> None:
    """It may be any Python; if it has torch, somebody should know."""
    settings = {"REMORA_COMPAT": "1", "PYTHONPATH": children.STARTUP}
    quiet = python(["-S", "-c", "import site; site.execsitecustomize(); print('well')"], tmp_path, **settings)
    assert (quiet.stdout, quiet.stderr) == ("well\n", "")
    (tmp_path / "torch.py").touch()
    settings["PYTHONPATH"] += f":{tmp_path}"
    warned = python(["-S", "-c", "import site; site.execsitecustomize(); print('well')"], tmp_path, **settings)
    assert warned.stdout == "well\n"
    assert "runs PyTorch's own RPC" in warned.stderr


def test_the_environment_is_marked_once_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.delenv(children.VARIABLE, raising=False)
    children.include()
    children.include()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [children.STARTUP, "/somewhere"]
    assert os.environ[children.VARIABLE] == "1"
    children.exclude()
    assert os.environ["PYTHONPATH"] == "/somewhere"
    assert children.VARIABLE not in os.environ


@pytest.mark.parametrize("before", ["", ":/somewhere", "/somewhere:", "/some::where"])
def test_empty_parts_of_the_path_stay(before: str) -> None:
    """`PYTHONPATH=$PYTHONPATH:/somewhere` makes one where nothing was set, and Python takes it for the current folder."""
    environment = {"PYTHONPATH": before}
    children.mark(environment)
    children.mark(environment)
    assert environment["PYTHONPATH"] == (f"{children.STARTUP}:{before}" if before else children.STARTUP)
