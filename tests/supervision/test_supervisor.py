"""Real processes under supervision: restarted by policy, signalled together, none left behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import remora
from remora.supervision import Outcome, RestartPolicy, Supervisor
from remora.supervision.child import Child
from tests.eventually import eventually

QUICK = RestartPolicy(limit=3, delay=0.02)
NEVER = RestartPolicy("never")


def python(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def note_life(path: str, code: int) -> None:
    """Append which life this is, and end."""
    with open(path, "a") as file:
        file.write(os.environ["REMORA_RESTARTS"] + "\n")
    sys.exit(code)


def test_functions_and_commands_run_and_their_exit_codes_are_told(tmp_path: Path) -> None:
    with Supervisor(NEVER, together=False) as supervisor:
        supervisor.start("function", note_life, str(tmp_path / "lives"), 0)
        supervisor.start("command", python("import sys; sys.exit(7)"))
        supervisor.start("lambda", lambda: sys.exit(3))
        supervisor.start("raises", lambda: 1 / 0)
        supervisor.start("killed", python("import os; os.kill(os.getpid(), 9)"))
        supervisor.start("told", python("import os, sys; sys.exit(int(os.environ['CODE']))"), env={"CODE": "5"})
        found = supervisor.wait(timeout=20.0)
    codes = {name: outcome.code for name, outcome in found.items()}
    assert codes == {"function": 0, "command": 7, "lambda": 3, "raises": 1, "killed": -9, "told": 5}
    assert {(outcome.restarts, outcome.ended) for outcome in found.values()} == {(0, False)}
    assert (tmp_path / "lives").read_text() == "0\n"


def test_a_function_finds_what_its_supervisor_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remora itself as well: it may lie beside a program that was started from somewhere else."""
    (tmp_path / "remora").symlink_to(Path(remora.__file__).parent)
    monkeypatch.syspath_prepend(tmp_path)
    with Supervisor(NEVER) as supervisor:
        supervisor.start("a", lambda: sys.exit(Path(sys.modules["remora"].__file__ or "").parent != tmp_path / "remora"))
        assert supervisor.wait(timeout=20.0) == {"a": Outcome(0, 0)}


def test_a_crash_loop_hits_the_limit_with_growing_pauses(tmp_path: Path) -> None:
    path = tmp_path / "times"
    text = f"import time, sys; open({str(path)!r}, 'a').write(f'{{time.monotonic()}}\\n'); sys.exit(4)"
    with Supervisor(RestartPolicy(limit=3, delay=0.1)) as supervisor:
        supervisor.start("a", python(text))
        assert supervisor.wait(timeout=20.0) == {"a": Outcome(4, 3)}
    times = [float(line) for line in path.read_text().split()]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(gaps) == 3
    assert all(gap >= least for gap, least in zip(gaps, (0.1, 0.2, 0.4), strict=True)), gaps


def test_one_that_succeeds_in_its_third_life(tmp_path: Path) -> None:
    text = "import os, sys; sys.exit(os.environ['REMORA_RESTARTS'] != '2')"
    with Supervisor(QUICK) as supervisor:
        supervisor.start("a", python(text))
        assert supervisor.wait(timeout=20.0) == {"a": Outcome(0, 2)}


def test_always_restarts_after_success_as_well() -> None:
    with Supervisor(RestartPolicy("always", limit=2, delay=0.01)) as supervisor:
        supervisor.start("a", python(""))
        assert supervisor.wait(timeout=20.0) == {"a": Outcome(0, 2)}


def test_the_time_to_wait_is_up_between_two_lives_as_well() -> None:
    with Supervisor(RestartPolicy(limit=1, delay=5.0)) as supervisor:
        supervisor.start("a", python("import sys; sys.exit(1)"))

        def has_ended() -> bool:
            with pytest.raises(TimeoutError, match="still running"):
                supervisor.wait(timeout=0.02)
            return not supervisor.pids()

        eventually(has_ended)


SLEEPER = "import time; time.sleep(60)"


def test_one_that_fails_for_good_takes_the_others_with_it() -> None:
    with Supervisor(NEVER) as supervisor:
        supervisor.start("sleeper", python(SLEEPER))
        supervisor.start("fails", python("import sys; sys.exit(2)"))
        found = supervisor.wait(timeout=20.0)
    assert found == {"sleeper": Outcome(-signal.SIGTERM, 0, ended=True), "fails": Outcome(2, 0)}


def test_all_are_restarted_when_one_fails(tmp_path: Path) -> None:
    """What a static group needs."""
    path = str(tmp_path / "lives")
    with Supervisor(QUICK, restart="all") as supervisor:
        supervisor.start("note", python(f"import os; open({path!r}, 'a').write(os.environ['REMORA_RESTARTS']); {SLEEPER}"))
        eventually(lambda: Path(path).exists() and Path(path).read_text() == "0")
        supervisor.start("fails", python("import os, sys; sys.exit(9 if os.environ['REMORA_RESTARTS'] == '0' else 0)"))
        with pytest.raises(TimeoutError, match="note"):
            supervisor.wait(timeout=1.5)
    assert Path(path).read_text() == "01"


def test_leaving_the_block_ends_everything_that_was_started(tmp_path: Path) -> None:
    """Also what a command started itself, and what does not want to end."""
    path = tmp_path / "pids"
    stubborn = (
        "import signal, subprocess, sys, os, time; signal.signal(15, signal.SIG_IGN);"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}]);"
        f"open({str(path)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n'); time.sleep(60)"
    )
    with Supervisor(NEVER, grace=0.3) as supervisor:
        supervisor.start("stubborn", python(stubborn))
        eventually(lambda: path.exists() and path.read_text().endswith("\n"))
        pids = [int(text) for text in path.read_text().split()]
        assert all(map(is_running, pids))
        assert supervisor.pids() == {"stubborn": pids[0]}
    assert not any(map(is_running, pids))


def test_what_a_dead_process_left_behind_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    text = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}]);"
    text += f"open({str(path)!r}, 'w').write(str(child.pid))"
    with Supervisor(NEVER) as supervisor:
        supervisor.start("parent", python(text))
        supervisor.wait(timeout=10.0)
        eventually(lambda: not is_running(int(path.read_text())))


SUPERVISE = """
import signal, sys
from remora.supervision import RestartPolicy, Supervisor
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it

class Telling(Supervisor):
    told = False

    def _sleep(self, *arguments):
        if not self.told:  # `wait` hears signals from here on
            self.told = True
            print(*self.pids().values(), flush=True)
        super()._sleep(*arguments)

with Telling(RestartPolicy("always"), grace=5.0) as supervisor:
    for name in "ab":
        supervisor.start(name, [sys.executable, "-S", "-c", sys.argv[1]])
    supervisor.wait()
"""


def supervise(child: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen([sys.executable, "-c", SUPERVISE, child], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(text) for text in process.stdout.readline().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_supervisor_reaches_its_processes_and_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    told = f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').write(str(n))"
    child = "import os, signal, sys, time\n"
    child += f"def end(n, f):\n    {told}\n    sys.exit(0)\n"
    child += "for n in (1, 2, 15): signal.signal(n, end)\n"
    child += f"open({str(tmp_path)!r} + f'/ready{{os.getpid()}}', 'w')\n{SLEEPER}"
    process, pids = supervise(child)
    with process:
        try:
            eventually(lambda: all((tmp_path / f"ready{pid}").exists() for pid in pids))
            process.send_signal(number)
            assert process.wait(10.0) == -number
        finally:
            process.kill()  # or leaving the block would wait for ever
    assert [(tmp_path / str(pid)).read_text() for pid in pids] == [str(int(number))] * 2
    assert not any(map(is_running, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_supervisor_that_is_killed_leaves_no_process_behind() -> None:
    process, pids = supervise(SLEEPER)
    with process:
        assert all(map(is_running, pids))
        process.kill()
    eventually(lambda: not any(map(is_running, pids)))


def test_it_works_on_any_thread() -> None:
    found: list[object] = []

    def work() -> None:
        with Supervisor(NEVER) as supervisor:
            supervisor.start("a", python(""))
            found.append(supervisor.wait(timeout=10.0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20.0)
    assert found == [{"a": Outcome(0, 0)}]


def test_names_are_unique_and_modes_known() -> None:
    with pytest.raises(ValueError, match="restart must be"):
        Supervisor(restart="some")  # type: ignore[arg-type]
    with Supervisor(NEVER) as supervisor:
        supervisor.start("a", python(""))
        with pytest.raises(ValueError, match="already"):
            supervisor.start("a", python(""))


class Waiting:
    """`wait()` on a thread of its own."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._outcomes: list[dict[str, Outcome]] = []
        self._thread = threading.Thread(target=lambda: self._outcomes.append(supervisor.wait(timeout=30.0)))
        self._thread.start()

    def result(self) -> dict[str, Outcome]:
        self._thread.join(20.0)
        assert not self._thread.is_alive()
        return self._outcomes[0]


def test_what_is_stopped_is_not_restarted_by_a_thread_that_waits(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    text = f"import os; open({str(lives)!r}, 'a').write(os.environ['REMORA_RESTARTS']); {SLEEPER}"
    with Supervisor(RestartPolicy("always", delay=0.0)) as supervisor:
        supervisor.start("a", python(text))
        waiting = Waiting(supervisor)
        eventually(lambda: lives.exists() and lives.read_text())
        supervisor.stop()
        assert not supervisor.pids()
        assert waiting.result() == {"a": Outcome(-signal.SIGTERM, 0, ended=True)}
        assert not supervisor.pids()
    assert lives.read_text() == "0"


def test_what_is_stopped_is_not_a_failure_that_ends_the_others() -> None:
    """Each is recorded as ended, whichever of the two threads sees its end."""
    with Supervisor(RestartPolicy("on-failure", delay=0.0)) as supervisor:
        for number in range(8):
            supervisor.start(str(number), python(SLEEPER))
        waiting = Waiting(supervisor)
        supervisor.stop(signal.SIGKILL)
        found = waiting.result()
    assert found == {str(number): Outcome(-signal.SIGKILL, 0, ended=True) for number in range(8)}


def test_stop_takes_no_name_and_says_so_before_anything_is_ended() -> None:
    with Supervisor() as supervisor:
        supervisor.start("w", python(SLEEPER))
        pids = supervisor.pids()
        with pytest.raises(TypeError, match=r"stop ends all processes, with a signal \(signal.SIGTERM\); got str 'w'\."):
            supervisor.stop("w")  # type: ignore[arg-type]
        assert supervisor.pids() == pids != {}


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("echo 'a b' c", r"got str .*: a command is a list: did you mean \['echo', 'a b', 'c'\]\?"),
        (None, r"process 'w' needs a function or a command, got NoneType None: pass the function, .* start\('w', functio"),
        (5, "got int 5"),
    ],
)
def test_what_can_be_no_process_is_refused_with_what_was_meant(target: Any, text: str) -> None:
    with Supervisor(NEVER) as supervisor:
        with pytest.raises(TypeError, match=text):
            supervisor.start("w", target)
        supervisor.start("w", python(""))  # the name is free
        assert supervisor.wait(timeout=20.0) == {"w": Outcome(0, 0)}


def test_an_argument_that_no_process_can_be_given_is_named() -> None:
    lock = threading.Lock()
    with Supervisor(NEVER) as supervisor:
        with pytest.raises(TypeError, match="cannot pickle") as caught:
            supervisor.start("w", note_life, "path", {"code": lock})
        note = "args[1] of note_life, of type dict, cannot be sent to a new process: make it there."
        assert caught.value.__notes__ == [note]
        # (a strike in an earlier test can leave CPython with an exception that it takes for handled still)
        assert caught.value.__context__ is sys.exception()
        with pytest.raises(TypeError, match="cannot pickle") as caught:
            supervisor.start("w", lambda: lock)
        assert "<lambda> uses cannot be sent to a new process" in caught.value.__notes__[0]


def test_stop_ends_a_wait_for_the_next_life() -> None:
    with Supervisor(RestartPolicy(limit=1, delay=25.0)) as supervisor:
        supervisor.start("a", python("import sys; sys.exit(3)"))
        waiting = Waiting(supervisor)
        eventually(lambda: not supervisor.pids())
        supervisor.stop()
        outcome = waiting.result()["a"]  # (stopped before it was decided on its next life, or after)
        assert (outcome.code, outcome.ended) == (3, True)


def test_a_group_that_is_about_to_be_restarted_can_be_stopped() -> None:
    with Supervisor(RestartPolicy(limit=1, delay=25.0), restart="all") as supervisor:
        supervisor.start("a", python("import sys; sys.exit(3)"))
        supervisor.start("b", python(SLEEPER))
        waiting = Waiting(supervisor)
        eventually(lambda: not supervisor.pids())
        supervisor.stop()
        assert {name: outcome.ended for name, outcome in waiting.result().items()} == {"a": True, "b": True}


def test_a_thread_that_waits_sees_what_another_one_starts() -> None:
    with Supervisor(NEVER) as supervisor:
        supervisor.start("first", python(SLEEPER))
        waiting = Waiting(supervisor)
        supervisor.start("second", python("import sys; sys.exit(5)"))  # which takes the first with it
        found = waiting.result()
    assert found == {"first": Outcome(-signal.SIGTERM, 0, ended=True), "second": Outcome(5, 0)}


def test_the_name_of_one_that_has_ended_is_free() -> None:
    with Supervisor(NEVER) as supervisor:
        supervisor.start("a", python(SLEEPER))
        with pytest.raises(ValueError, match="already"):
            supervisor.start("a", python(""))
        supervisor.stop()
        supervisor.start("a", python(""))
        assert supervisor.wait(timeout=20.0) == {"a": Outcome(0, 0)}
        supervisor.start("a", python(SLEEPER))
        assert list(supervisor.pids()) == ["a"]


def test_a_signal_that_is_not_for_it_does_not_keep_it_awake() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        with Supervisor(NEVER) as supervisor:
            supervisor.start("a", python("import time; time.sleep(1)"))
            began = time.thread_time()
            supervisor.wait(timeout=20.0)
            assert time.thread_time() - began < 0.1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_name_is_taken_while_its_process_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a second thread got the same name, and one of the two processes was in no table."""
    begun, go_on = threading.Event(), threading.Event()

    class SlowChild(Child):
        def __init__(self, *args: Any) -> None:
            if not begun.is_set():
                begun.set()
                assert go_on.wait(20.0)
            super().__init__(*args)

    monkeypatch.setattr("remora.supervision.supervisor.Child", SlowChild)
    with Supervisor(NEVER, together=False) as supervisor:  # or the failure of "a" ends "b", if that is still running
        first = threading.Thread(target=supervisor.start, args=("a", python("import sys; sys.exit(5)")))
        first.start()
        try:
            assert begun.wait(20.0)
            with pytest.raises(ValueError, match="'a' already"):
                supervisor.start("a", python(""))
            supervisor.start("b", python(""))  # another name does not wait for it
        finally:
            go_on.set()
            first.join(20.0)
        assert {name: outcome.code for name, outcome in supervisor.wait(timeout=20.0).items()} == {"a": 5, "b": 0}


def test_the_name_of_one_that_cannot_be_started_is_free(tmp_path: Path) -> None:
    with Supervisor(NEVER) as supervisor:
        with pytest.raises(FileNotFoundError):
            supervisor.start("a", [str(tmp_path / "missing")])
        supervisor.start("a", python(""))
        assert supervisor.wait(timeout=20.0) == {"a": Outcome(0, 0)}


# Its name is that of a function of the module that the child starts in.
RUN = """
from remora.supervision import RestartPolicy, Supervisor

def run(x):
    print("ran with", x, flush=True)

if __name__ == "__main__":
    with Supervisor(RestartPolicy("never")) as supervisor:
        supervisor.start("a", run, 5)
        print(supervisor.wait(timeout=20)["a"].code)
"""


@pytest.mark.parametrize("how", ["-c", "-m"])
def test_a_function_of_a_main_program_that_the_child_cannot_load(how: str, tmp_path: Path) -> None:
    """The child of `python -c` and of `python -m package` has a `__main__` of its own, in which names mean other things."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(RUN)
    command = [sys.executable, how, RUN if how == "-c" else "package"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout == "ran with 5\n0\n", done.stderr
