"""The command line: verbs, help, exit codes, and what is imported for them."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from remora.command.main import main
from remora.command.usage_errors import UsageError, extra
from remora.command.verbs import VERBS, load, parser_of, ps_verb
from remora.errors import NothingFound
from remora.observer.dump import Cause, WorkerDump, write_worker_dump
from remora.observer.group_observer import GroupEntry
from tests.command.running import TIMEOUT, remora
from tests.observer.snapshots import worker

SOURCE = Path(__file__).parents[2] / "src" / "remora" / "command" / "verbs"


def test_help_names_every_verb_and_imports_no_torch() -> None:
    code = """
import sys
from remora.command.main import main
main(["--help"])
print(sorted({"torch", "textual", "starlette"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")] == list(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_has_help_with_an_example_that_can_be_parsed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb = load(name)
    assert name == verb.NAME
    assert verb.HELP
    assert not verb.HELP.endswith(".")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"remora {name}" in text.partition("example:")[2]
    for line in verb.EXAMPLE.splitlines():
        words = re.split(r"[#&(>]", line)[0].split()  # (the rest is for the shell, or for the reader)
        if words[:2] == ["remora", name]:
            parser_of(verb).parse_args(words[2:])


def test_each_module_of_a_verb_is_in_the_table() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py") if path.name != "__init__.py"}
    assert modules == {f"{verb}_verb" for verb in VERBS}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["whi"], "Did you mean 'why'?"),
        (["frobnicate"], "`remora --help` lists them"),
        (["calls", "--older", "5 minutes"], "not a time"),
        (["calls", "--limit", "0"], "not a number of rows"),
        (["calls", "--sort", "colour"], "invalid choice"),
        (["ps", "--at", "nonsense"], "nonsense"),
        (["ps", "--at", "unix://@remora-nobody"], "nothing listens"),
        (["ps", "--group", "0" * 31], "no group"),
        (["why", "--group", "0" * 31], "no group"),
        (["completion", "csh"], "invalid choice"),
        (["doctor", "--with", "nowhere"], "Not a host and a port"),
        (["top", "--group", "0" * 31], "needs a terminal"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_code_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(words)
    except SystemExit as error:  # argparse
        code = error.code
    told = capsys.readouterr()
    assert code == 2
    assert says in told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("remora 0.")


def test_no_words_show_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: remora VERB" in capsys.readouterr().out


def test_a_missing_extra_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"needs nosuchlibrary.*pip install 'remora\[top\]'"), extra("top", "top"):
        import nosuchlibrary  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError), extra("top", "top"):  # ours: a fault, and no matter of what is installed
        import remora.nosuchmodule  # type: ignore[import-not-found]  # noqa: F401


def test_top_without_textual(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "textual"] + ["remora.command.top_app"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    assert main(["top"]) == 2
    assert "pip install 'remora[top]'" in capsys.readouterr().err


def test_python_minus_m_remora_is_the_same() -> None:
    done = remora("--version")
    assert (done.code, done.err) == (0, "")


def test_output_that_is_closed_is_no_error() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$0" -m remora doctor --json >&-', sys.executable], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)


def test_an_output_that_lacks_letters_gets_the_others(tmp_path: Path) -> None:
    write_worker_dump(str(tmp_path), WorkerDump(cause=Cause.SIGNAL, snapshot=worker("w\N{GREEK SMALL LETTER OMEGA}rker")))
    done = remora("explain", str(tmp_path), PYTHONIOENCODING="ascii")
    assert done.err == ""
    assert "w?rker wrote 1 dump" in done.out


def test_a_group_that_ends_meanwhile_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [GroupEntry("a" * 32, ()), GroupEntry("b" * 32, ())]

    def find(**which: str) -> str:
        if which["group"] == "a" * 32:
            raise NothingFound("", "it has just ended")
        return f"observer of {which['group'][:2]}"

    monkeypatch.setattr(ps_verb, "groups", lambda: there)
    monkeypatch.setattr(ps_verb.GroupObserver, "find", find)
    options = argparse.Namespace(at=None, group=None)
    assert ps_verb._find(options) == ["observer of bb"]  # type: ignore[comparison-overlap]
    del there[1]
    with pytest.raises(NothingFound, match="just ended"):
        ps_verb._find(options)


def test_a_reader_that_ends_early_is_no_error() -> None:
    code = "import sys; from remora.__main__ import main; sys.exit(main(['completion', 'fish']))"
    done = subprocess.run(
        f'"{sys.executable}" -c "{code}" | head -c 10', shell=True, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


def cpu(code: str) -> float:
    """Seconds of processor time of a fresh interpreter, the least of three."""
    measure = "import resource; used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime + used.ru_stime)"
    runs = [
        subprocess.run(
            [sys.executable, "-c", f"{code}\n{measure}"], capture_output=True, text=True, timeout=60, check=True
        )
        for _ in range(3)
    ]
    return min(float(each.stdout.splitlines()[-1]) for each in runs)


def test_ps_starts_in_well_under_a_third_of_a_second() -> None:
    """In time of the processor, beside an interpreter that does nothing: the wall clock of a busy machine says little."""
    nothing = cpu("pass")
    ps = cpu("import sys; from remora.command.main import main; main(['ps']); assert 'torch' not in sys.modules")
    assert ps - nothing < 0.3 * max(1.0, nothing / 0.05), f"{ps:.3f} s, of which the interpreter takes {nothing:.3f}"
