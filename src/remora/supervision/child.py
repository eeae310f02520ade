"""Starts, signals and ends one process together with its descendants. Knows no policy.

Each child leads a session of its own, so that its descendants can be ended with it, and so that Ctrl-C in the terminal
reaches only the supervisor, which passes it on.
"""

from __future__ import annotations

import ctypes
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import cloudpickle  # type: ignore[import-untyped]

_PR_SET_PDEATHSIG = 1

DESCENDANT_TIMEOUT = 1.0  # seconds; where no init process reaps orphans, they stay in the list of processes as zombies

Target = Callable[..., Any] | Sequence[str]
Streams = tuple[int, int]  # descriptors for what a process prints, and for its errors


def check_target(name: str, target: object) -> None:
    """Raise TypeError, with what was meant, if `target` is neither a function nor a command."""
    if callable(target) or (isinstance(target, Sequence) and not isinstance(target, (str, bytes))):
        return
    if isinstance(target, str):
        meant = f"a command is a list: did you mean {shlex.split(target)!r}?"
    else:
        meant = f"pass the function, and its arguments after it, and not what it returns: start({name!r}, function, x)."
    raise TypeError(f"process {name!r} needs a function or a command, got {type(target).__name__} {target!r}: {meant}")


class Child:
    """A running process."""

    def __init__(
        self, target: Target, args: tuple[Any, ...], env: Mapping[str, str], streams: Streams | None = None
    ) -> None:
        _check_not_loading()
        self.started = time.monotonic()
        if callable(target):
            self._process = _start_function(target, args, env, streams)
        else:
            self._process = _start([*target, *map(str, args)], env, streams)
        self.pid = self._process.pid
        # A descriptor that becomes readable when the process ends; None where the system has none.
        self.descriptor = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None  # type: ignore[attr-defined,unused-ignore]

    @property
    def ended(self) -> bool:
        """Return True if the process has ended. This does not reap it: no other process gets its id."""
        if self._process.returncode is not None:
            return True
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # another thread reaps it
            return True
        return found is not None

    def signal(self, number: int) -> None:
        """Send a signal to the process and its descendants, unless it has ended."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):  # none left; or (macOS) only the dead
                pass

    def reap(self) -> int:
        """End the process and its descendants, and reap it. Return its exit code; negative for a signal."""
        self.signal(signal.SIGKILL)
        code = self._process.wait()
        self._await_descendants()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        return code

    def _await_descendants(self) -> None:
        """Wait until its descendants are gone, too: they were killed, but a process can only wait for its own children."""
        end = time.monotonic() + DESCENDANT_TIMEOUT
        while time.monotonic() < end:
            try:
                os.killpg(self.pid, 0)
            except OSError:
                return
            time.sleep(0.002)


def _start(
    command: Sequence[str], env: Mapping[str, str], streams: Streams | None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    out, err = streams or (None, None)
    return subprocess.Popen(
        command,
        env=dict(env),
        stdout=out,
        stderr=err,
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=_tie_to_parent(),
    )


def _tie_to_parent() -> Callable[[], None] | None:
    """Return what a new process does first, so that it does not outlive a supervisor that is killed (Linux).

    The kernel watches the thread that started it, and only the main thread lives as long as its process.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up before the fork

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it is dead already

    return tie


def _start_function(
    target: Callable[..., Any], args: tuple[Any, ...], env: Mapping[str, str], streams: Streams | None
) -> subprocess.Popen[bytes]:
    """Run a function in a new interpreter: a fork would inherit locks that are held and a worker that is not its own."""
    with tempfile.TemporaryFile() as luggage:
        pickle.dump(sys.path, luggage)
        main = _main_module()
        parcels = _by_name_and_by_value(target, args) if main else (None, _by_value(target, args))
        pickle.dump((main, *parcels), luggage)
        luggage.seek(0)
        number = luggage.fileno()
        return _start([sys.executable, "-c", _UNPACK, str(number)], env, streams, [number])


def _main_module() -> dict[str, Any]:
    """Return what multiprocessing needs to load our main module in the child, under the name `__mp_main__`. Empty if it
    cannot: then names of `__main__` mean nothing there."""
    main: Any = sys.modules["__main__"]
    name, path = getattr(getattr(main, "__spec__", None), "name", None), getattr(main, "__file__", None)
    if hasattr(sys, "ps1") or path is None or not os.path.isfile(path):  # what is there was typed in
        return {}
    if name is not None and name.rpartition(".")[2] == "__main__":  # `python -m package`, which multiprocessing leaves out
        return {}
    found = {"init_main_from_path": os.path.abspath(path)} if name is None else {"init_main_from_name": name}
    return {**found, "sys_argv": sys.argv}


def _by_name_and_by_value(target: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes | None, bytes | None]:
    """Pickle function and arguments by name and by value, where possible: the child knows the names only after it has loaded
    the main module. (It lacks those defined under `if __name__ == "__main__"`.)"""
    with suppress(Exception):
        by_name = pickle.dumps((target, args))
        with suppress(Exception):
            return by_name, cloudpickle.dumps((target, args))
        return by_name, None
    return None, _by_value(target, args)


def _by_value(target: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps((target, args))
    except Exception as error:
        error.add_note(f"{_culprit(target, args)} cannot be sent to a new process: make it there.")
        raise
    return packed


def _culprit(target: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return in words which part of a function and its arguments cannot be pickled."""
    for number, each in enumerate(args):
        try:
            cloudpickle.dumps(each)
        except Exception:
            return f"args[{number}] of {_name(target)}, of type {type(each).__qualname__},"
    return f"What {_name(target)} uses"


def _name(target: Callable[..., Any]) -> str:
    return str(getattr(target, "__qualname__", type(target).__qualname__))


# The path comes first: the child may need it to find this very module.
_UNPACK = """
import os, pickle, sys
luggage = os.fdopen(int(sys.argv.pop()), "rb")
sys.path[:] = pickle.load(luggage)
from remora.supervision.child import run
run(luggage)
"""


def run(luggage: IO[bytes]) -> None:
    """Run the function, in the child. An exception is printed, and ends the process with exit code 1."""
    with luggage:
        main, by_name, by_value = pickle.load(luggage)
    this: Any = multiprocessing.process.current_process()
    this._inheriting = True  # as multiprocessing says it: a program that starts processes when it is loaded never ends
    try:
        multiprocessing.spawn.prepare(main)
    finally:
        del this._inheriting
    target, args = _load(by_name, by_value)
    target(*args)


def _load(by_name: bytes | None, by_value: bytes | None) -> Any:
    if by_name is not None:
        try:
            return pickle.loads(by_name)
        except (AttributeError, ImportError):
            if by_value is None:
                raise
    assert by_value is not None, "one of the two was sent"
    return pickle.loads(by_value)


def _check_not_loading() -> None:
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise RuntimeError(
            "the main program starts a process while it is loaded into a process that a Supervisor or multiprocessing "
            'started. That would never end. Start processes under `if __name__ == "__main__":`.'
        )
