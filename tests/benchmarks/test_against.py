"""Two trees of Remora, turn by turn: what is made of the numbers, which tree is measured, and that nothing stays behind."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import __main__ as command_line
from benchmarks import against, report, trees
from benchmarks.against import BEFORE, NOW, Change, Comparison, Verdict
from benchmarks.measure import Benchmark, Reading, Setting, Unit

ROOT = Path(__file__).parents[2]


def change_of(ratios: list[float], unit: Unit = Unit.SECONDS, rounds: int = 5) -> Change:
    """Each round has pairs of these ratios."""
    return Change("work", "metric", unit, rounds={number: [(ratio, 1.0) for ratio in ratios] for number in range(rounds)})


class TestVerdicts:
    @pytest.mark.parametrize(
        ("ratios", "verdict"),
        [
            ([1.05, 1.06, 1.07], Verdict.WORSE),
            ([1.01, 1.02, 1.02], Verdict.NO_WORSE),
            ([0.9, 1.0, 1.02], Verdict.NO_WORSE),
            ([0.95, 0.96, 0.97], Verdict.BETTER),
            ([0.95, 1.04, 1.2], Verdict.OPEN),
        ],
    )
    def test_a_time_that_grows_is_worse(self, ratios: list[float], verdict: Verdict) -> None:
        assert change_of(ratios).verdict() is verdict
        assert change_of([1 / ratio for ratio in ratios], Unit.CALLS_PER_SECOND).verdict() is verdict

    def test_the_ratio_is_the_median_of_pairs_and_not_of_medians(self) -> None:
        # In the second round the machine was ten times slower; each pair tells the same.
        change = Change("work", "metric", Unit.SECONDS, rounds={0: [(2.0, 1.0), (2.2, 1.0)], 1: [(20.0, 10.0)]})
        assert change.ratio() == 2
        assert change.values(NOW) == [2.0, 2.2, 20.0]
        assert change.values(BEFORE) == [1.0, 1.0, 10.0]

    def test_the_luck_of_a_group_is_in_the_interval(self) -> None:
        """Pairs of one group agree with each other, and groups do not: many pairs do not make that certain."""
        alike = Change("work", "metric", Unit.SECONDS, rounds={n: [(1.0, 1.0)] * 10 + [(1.2, 1.0)] * 10 for n in range(4)})
        lucky = Change("work", "metric", Unit.SECONDS, rounds={n: [(1.0 + 0.2 * (n % 2), 1.0)] * 20 for n in range(4)})
        assert lucky.interval() == (1.0, 1.2)
        assert lucky.verdict() is Verdict.OPEN
        assert alike.ratio() == lucky.ratio() == pytest.approx(1.1)

    def test_a_few_pairs_tell_nothing(self) -> None:
        assert change_of([1.2, 1.2], rounds=2).verdict() is Verdict.OPEN
        assert change_of([1.2, 1.2], rounds=3).verdict() is Verdict.WORSE

    def test_what_cannot_be_compared_has_no_verdict(self) -> None:
        assert change_of([1.0], rounds=1).verdict() is None
        assert change_of([1.1, 1.1], Unit.COUNT).ratio() is None
        shrunk = Change("work", "metric", Unit.BYTES, rounds={0: [(-5.0, 3.0), (4.0, 0.0)]})
        assert (shrunk.ratio(), shrunk.interval(), shrunk.verdict()) == (None, None, None)

    def test_a_metric_that_one_tree_does_not_have_is_left_out(self) -> None:
        found, old = Comparison("REV"), Reading("old", 1.0, Unit.SECONDS)
        found.add("work", 0, {NOW: [old, Reading("new", 1.0, Unit.SECONDS)], BEFORE: [old]})
        assert [change.metric for change in found.of("work")] == ["old"]

    def test_neighbouring_turns_are_a_pair_and_who_is_first_changes(self) -> None:
        assert against.block(0) == [(NOW, BEFORE), (BEFORE, NOW)]
        assert against.block(1) == [(BEFORE, NOW), (NOW, BEFORE)]


class TestTrees:
    @pytest.fixture
    def repository(self, tmp_path: Path) -> Path:
        git(tmp_path, "init", "--quiet")
        commit(tmp_path, "README", "no package yet")
        git(tmp_path, "tag", "empty")
        commit(tmp_path, "src/remora/__init__.py", "MARK = 'first'\n")
        commit(tmp_path, "src/remora/__init__.py", "MARK = 'second'\n")
        return tmp_path

    def test_a_revision_is_there_until_the_end(self, repository: Path) -> None:
        with trees.checked_out("HEAD~1", repository) as packages:
            assert (packages / "remora" / "__init__.py").read_text() == "MARK = 'first'\n"
        assert not packages.parent.exists()
        with pytest.raises(KeyboardInterrupt), trees.checked_out("HEAD", repository) as packages:
            raise KeyboardInterrupt
        assert not packages.parent.exists()

    @pytest.mark.parametrize(
        ("revision", "reason"), [("nowhere", "no commit of that name"), ("--all", "no commit"), ("empty", "src")]
    )
    def test_a_revision_that_cannot_be_had(self, repository: Path, revision: str, reason: str) -> None:
        with pytest.raises(trees.NoSuchTree, match=f"--against {revision}: .*{reason}"):
            trees.checked_out(revision, repository).__enter__()

    def test_what_is_no_repository(self, tmp_path: Path) -> None:
        with pytest.raises(trees.NoSuchTree, match="not a git repository"):
            trees.commit_of("HEAD", tmp_path)


class TestCommandLine:
    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def run(*arguments: str) -> int:
            monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
            return command_line.main()

        yield run
        for number, handler in before.items():
            signal.signal(number, handler)

    def test_a_bad_revision_is_an_error_that_names_it(
        self, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("--against", "no-such-revision") == 2
        assert "--against no-such-revision: git knows no commit of that name" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [(["--who", "torch"], "two trees of Remora"), (["--only", "memcpy"], "memcpy measures the machine")],
    )
    def test_what_does_not_go_with_it(
        self, run: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
    ) -> None:
        with pytest.raises(SystemExit):
            run("--against", "HEAD", *arguments)
        assert reason in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [(["--who", "torch"], "of Remora alone"), (["--only", "callers"], "no benchmark is called 'callers'")],
    )
    def test_what_does_not_go_with_instructions(
        self, run: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
    ) -> None:
        with pytest.raises(SystemExit):
            run("--instructions", *arguments)
        assert reason in capsys.readouterr().err


def test_each_tree_measures_its_own_package(tmp_path: Path) -> None:
    """On the callee, too; and the table tells which is which."""
    packages = tmp_path / "src"
    shutil.copytree(ROOT / "src", packages)
    with (packages / "remora" / "__init__.py").open("a") as file:
        file.write("\nCOST = 2.0\n")
    benchmark = Benchmark("cost", "cost of the tree", cost)
    said: list[str] = []
    found = Comparison("REV")
    against.run([benchmark], packages, found, rounds=1, quick=True, say=said.append)
    assert found.notes == {}
    (change,) = found.of("cost")
    assert set(change.rounds[0]) == {(1.0, 2.0)}
    assert said == ["round 1 of 1 · cost"]
    console = Console(width=120, file=io.StringIO(), record=True)
    report.show_changes(found, [benchmark], console)
    table = console.export_text()
    assert "The working tree beside REV" in table
    assert "0.500 to 0.500" in table


def cost(setting: Setting) -> list[Reading]:
    """On worker0; the number is found on worker1."""
    return [Reading("cost", setting.rpc.rpc_sync("worker1", cost_here), Unit.SECONDS)]


def cost_here() -> float:
    import remora

    return float(getattr(remora, "COST", 1.0))


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """No process, no folder: though it strikes in the middle of a turn that would take long."""
    command = [sys.executable, "-m", "benchmarks", "--against", "HEAD", "--quick", "--only", "idle"]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        while not list(tmp_path.glob("remora-bench-*/store")):  # workers come up
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    left = {path.name for path in tmp_path.iterdir()} - {f"remora-{os.getuid()}"}  # where workers have their sockets
    assert left == set()
    while processes_with(f"TMPDIR={tmp_path}"):  # those of multiprocessing end when they see that the others have
        time.sleep(0.01)


def processes_with(variable: str) -> list[int]:
    """Those that were started with that in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def git(repository: Path, *arguments: str) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "-C", repository, *who, *arguments], check=True, capture_output=True)


def commit(repository: Path, name: str, text: str) -> None:
    path = repository / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "a step")
