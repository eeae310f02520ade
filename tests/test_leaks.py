"""The leak check is itself checked: it must see each kind of leak, forgive what is going, and cost next to nothing."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests import leaks
from tests.eventually import eventually

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the leak check reads /proc")

Undo = Callable[[], object]


def leak_thread() -> tuple[str, Undo]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()

    def undo() -> None:
        stop.set()
        thread.join()

    return "thread 'forgotten'", undo


def leak_socket() -> tuple[str, Undo]:
    opened = socket.socket()
    return f"descriptor {opened.fileno()} -> socket:", opened.close


def leak_child() -> tuple[str, Undo]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return f"process {child.pid}", lambda: child.communicate(b"\n")


def leak_grandchild() -> tuple[str, Undo]:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # the grandchild is up
    grandchild = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().strip()
    return f"process {grandchild}", lambda: child.communicate(b"\n")


def leak_shared_file() -> tuple[str, Undo]:
    segment = shared_memory.SharedMemory(create=True, size=4096)

    def undo() -> None:
        segment.close()
        segment.unlink()

    return f"shared memory /dev/shm/{segment.name}", undo


def leak_memfd() -> tuple[str, Undo]:
    descriptor = os.memfd_create("forgotten")
    return f"descriptor {descriptor} -> /memfd:forgotten", lambda: os.close(descriptor)


def leak_mapping() -> tuple[str, Undo]:
    descriptor = os.memfd_create("mapped")
    os.ftruncate(descriptor, 1 << 20)
    mapping = mmap.mmap(descriptor, 1 << 20)
    os.close(descriptor)
    mapping.write(b"x" * (1 << 20))
    return "mapping of /memfd:mapped", mapping.close


EVERY_LEAK = [leak_thread, leak_socket, leak_child, leak_grandchild, leak_shared_file, leak_memfd, leak_mapping]


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    """multiprocessing starts it for the first shared memory and keeps it to the end."""
    with leaks.kept():
        segment = shared_memory.SharedMemory(create=True, size=1)
        segment.close()
        segment.unlink()


@pytest.mark.parametrize("leak", EVERY_LEAK, ids=lambda leak: leak.__name__)
def test_each_kind_of_leak_is_seen_and_named(leak: Callable[[], tuple[str, Undo]]) -> None:
    before = leaks.census()
    words, undo = leak()
    try:
        assert words in str(leaks.leaked_since(before, timeout=0.0))
    finally:
        undo()
    assert not leaks.leaked_since(before, timeout=3.0)


def test_what_is_on_its_way_out_is_given_time() -> None:
    before = leaks.census()
    leaving = threading.Timer(0.05, lambda: None)
    leaving.start()
    assert leaks.census() - before, "the thread should still be there, or this test shows nothing"
    assert not leaks.leaked_since(before, timeout=3.0)


def test_garbage_is_not_a_leak() -> None:
    before = leaks.census()
    cycle: list[object] = [socket.socket()]
    cycle.append(cycle)
    del cycle
    with pytest.warns(ResourceWarning):
        assert not leaks.leaked_since(before, timeout=3.0)


def test_what_was_there_before_is_not_reported() -> None:
    opened = socket.socket()
    assert not leaks.leaked_since(leaks.census(), timeout=0.0)
    opened.close()


def test_a_descriptor_reused_for_something_else_is_seen() -> None:
    first = socket.socket()
    number = first.fileno()
    before = leaks.census()
    first.close()
    second = socket.socket()
    assert second.fileno() == number
    assert f"descriptor {number}" in str(leaks.leaked_since(before, timeout=0.0))
    second.close()


def test_a_leaked_thread_is_shown_with_its_stack() -> None:
    before = leaks.census()
    _, undo = leak_thread()
    assert "in wait" in leaks.stacks(leaks.leaked_since(before, timeout=0.0))
    undo()


STRANGER = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    kept = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


# Ends at once, and what it started is nobody's child any more.
PARENT = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]); os._exit(0)"


def test_what_other_processes_share_is_no_leak_of_ours() -> None:
    path = Path(f"/dev/shm/remora-test-{os.getpid()}")
    before = leaks.census()
    command = [sys.executable, "-c", PARENT, STRANGER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.wait()
        assert parent.stdout.readline() == b"mapped\n"
        assert path.name in (leaks.census() - before).shared_files
        assert path.name not in leaks.leaked_since(before, timeout=0.0).shared_files
        parent.stdin.close()  # it ends
        assert parent.stdout.read() == b""
    try:
        eventually(lambda: path.name in leaks.leaked_since(before, timeout=0.0).shared_files)  # nobody uses it any more
    finally:
        path.unlink()


TRACKING = """
import sys
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
print("tracking", flush=True)
sys.stdin.read()
"""


def test_a_semaphore_that_no_process_has_yet_is_no_leak_of_ours_while_others_make_some() -> None:
    path = Path(f"/dev/shm/sem.mp-test-{os.getpid()}")
    before = leaks.census()
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, TRACKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.wait()
        assert parent.stdout.readline() == b"tracking\n"
        try:
            path.touch()
            assert path.name in (leaks.census() - before).shared_files
            assert path.name not in leaks.leaked_since(before, timeout=0.0).shared_files
        finally:
            path.unlink()
            parent.stdin.close()
        assert parent.stdout.read() == b""


def test_a_clean_check_takes_less_than_a_millisecond() -> None:
    def check() -> float:
        begun = time.perf_counter()
        assert not leaks.leaked_since(leaks.census(), timeout=1.0)
        return time.perf_counter() - begun

    assert min(check() for _ in range(20)) < 1e-3


LEAKY = """
import subprocess, sys
import pytest

def leak():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

def test_leaky():
    print("PID", leak().pid)

@pytest.mark.may_leak("shows that a reason is enough")
def test_excused():
    pass

@pytest.mark.may_leak
def test_excused_without_reason():
    pass
"""


def test_the_fixture_fails_a_leaky_test_and_ends_what_it_left(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.conftest.LEAK_TIMEOUT", 0.05)
    pytester.makepyfile(LEAKY)
    pytester.makeini("[pytest]\naddopts = --strict-markers")
    result = pytester.runpytest_inprocess("-p", "tests.conftest", "-p", "no:cacheprovider", "-s")
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(["*still there 0.05 s after the test:*", "*process *time.sleep(60)*"])
    result.stdout.fnmatch_lines(["*may_leak marker wants a reason*"])
    pid = int(next(line for line in result.outlines if "PID" in line).split("PID")[1].split()[0])
    assert not Path(f"/proc/{pid}").exists()
