"""The end of a process is heard, and what the program put in the same place runs, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from remora.introspection.endings import Endings
from remora.observer.dump import Cause

WITNESS = """
import multiprocessing, os, signal, sys, threading
from remora.introspection.endings import Endings

class Witness:
    def tell(self, cause, text): print("told", cause, text, flush=True)
    def last_words(self, error): print("last words", repr(error), flush=True)

endings = Endings()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    code = WITNESS + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ))


class Silent:
    def tell(self, cause: Cause, text: str) -> None: ...

    def last_words(self, error: BaseException) -> None: ...


def test_an_error_is_heard_once_and_reported_as_before() -> None:
    done = run("""
        sys.excepthook = lambda *error: print("the program's hook", flush=True)
        endings.add(Witness())
        raise ValueError("boom")
    """)
    assert done.stdout.splitlines() == ["last words ValueError('boom')", "the program's hook"]
    assert done.returncode == 1


@pytest.mark.parametrize(
    "end", ["pass", "sys.exit(3)", "os._exit(0)", "raise KeyboardInterrupt", "endings.remove(witness); 1 / 0"]
)
def test_an_end_without_an_error_is_none_of_our_business(end: str) -> None:
    done = run(f"""
        witness = Witness()
        endings.add(witness)
        {end}
    """)
    assert done.stdout == ""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("end", ["1 / 0", "exits()"])
def test_an_error_in_a_process_of_multiprocessing_is_heard(method: str, end: str, tmp_path: object) -> None:
    program = WITNESS + textwrap.dedent(f"""
        def exits():  # as torch.multiprocessing does
            try:
                1 / 0
            except Exception:
                sys.exit(1)

        def work():
            endings.add(Witness())
            {end}

        if __name__ == "__main__":
            process = multiprocessing.get_context("{method}").Process(target=work)
            process.start()
            process.join()
            print(process.exitcode)
    """)
    path = f"{tmp_path}/program.py"
    with open(path, "w") as file:
        file.write(program)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.stdout.splitlines() == ["last words ZeroDivisionError('division by zero')", "1"]


def test_a_forked_child_has_no_witness() -> None:
    done = run("""
        endings.add(Witness())
        if os.fork() == 0:
            endings.abandon()
            raise ValueError
        os.wait()
    """)
    assert done.stdout == ""


def test_the_signal_is_heard_and_a_handler_of_the_program_is_kept() -> None:
    done = run("""
        witness = Witness()
        endings.add(witness)
        signal.raise_signal(signal.SIGUSR2)
        endings.remove(witness)
        print(signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, lambda *_: print("mine"))
        endings.add(witness)
        signal.raise_signal(signal.SIGUSR2)
    """)
    assert done.stdout.splitlines() == ["told a signal came SIGUSR2", "True", "mine"]


def test_the_hooks_are_as_before_when_the_last_witness_is_gone() -> None:
    before = sys.excepthook, signal.getsignal(signal.SIGUSR2)
    endings, first, second = Endings(), Silent(), Silent()
    endings.add(first)
    endings.add(second)
    endings.remove(first)
    assert sys.excepthook != before[0]
    endings.remove(second)
    endings.remove(second)
    assert (sys.excepthook, signal.getsignal(signal.SIGUSR2)) == before
