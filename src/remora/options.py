"""Every setting of a worker, with its default, its check and the environment variable that sets it; and the fast paths.

No other module reads a variable whose name begins with REMORA_ (but for the start-up hook of `remora.compat`, which runs
before anything is imported).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from remora.clock import SYSTEM, Clock
from remora.errors import InvalidTimeout

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_INIT_METHOD = "env://"

TRANSPORTS = ("inproc", "unix", "tcp")


def _switch(variable: str, off: str = "0") -> Any:
    """A fast path that is taken unless the environment has `off` in that variable."""
    return field(default=True, metadata={"variable": variable, "off": off})


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPaths:
    """The fast paths that are taken. Only speed depends on them, so workers with different ones understand each other.

    docs/performance.md says what each is worth.
    """

    # A thread polls for a moment before it sleeps (transport/spin.py).
    spin: bool = _switch("REMORA_LOOK")
    # Threads wait in epoll, and one of them leads (transport/poller.py); else one thread at a time waits in `poll`.
    epoll: bool = _switch("REMORA_POLLER", off="select")
    # A link on which requests come stays armed in the poller (transport/poller.py).
    lasting_arm: bool = _switch("REMORA_LASTING_ARM")
    # A thread that waits for replies again and again reads them all, and writes calls in batches (channel/waiter_owned.py).
    waiter_owned: bool = _switch("REMORA_ATTEND")
    # A low-priority message waits up to 2 ms to share a write (channel/delayed_flush.py).
    delayed_flush: bool = _switch("REMORA_DELAYED_FLUSH")
    # A function goes by number once the callee was told its name; a call without arguments is that number, which neither
    # side pickles (channel/function_table.py).
    function_numbers: bool = _switch("REMORA_FUNCTION_NUMBERS")
    # Tensors of the plain kind, and references, are pickled by stencil, also in containers (wire/fast_pickle.py).
    stencils: bool = _switch("REMORA_STENCILS")
    # Large tensors go through shared memory on one host (agent/memory/shared.py). A number of bytes is the setting's.
    shared_memory: bool = _switch("REMORA_SHARED_MEMORY")
    # Shared memory is filled while the message about it is on its way (transport/shm/lender.py).
    late_fill: bool = _switch("REMORA_LATE_FILL")
    # Large tensors arrive in memory that was used before (wire/buffer_pool.py). Another number limits its bytes.
    buffer_pool: bool = _switch("REMORA_WARM_MEMORY")
    # In the midst of something large over TCP a reader is woken for 256 KiB at a time (transport/link.py).
    gather: bool = _switch("REMORA_GATHER")
    # A backward pass that ends on one other worker takes one message instead of two (autograd/engine.py).
    one_way_pass: bool = _switch("REMORA_ONE_WAY_PASS")
    # A worker with one source of gradients in a pass keeps no ledger of segments (autograd/schedule.py).
    single_source: bool = _switch("REMORA_SINGLE_SOURCE")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> FastPaths:
        """Those that no variable turns off."""
        return cls(**{name: environment.get(variable) != off for name, (variable, off) in cls.turned_off().items()})

    @classmethod
    def turned_off(cls) -> dict[str, tuple[str, str]]:
        """By the name of a fast path: the variable that turns it off, and its value."""
        return {each.name: (each.metadata["variable"], each.metadata["off"]) for each in fields(cls)}


FAST_PATHS = FastPaths.from_environment()  # of this process, read once: a worker that has begun does not change its mind
BUFFER_POOL_BYTES = int(os.environ.get("REMORA_WARM_MEMORY") or 512 << 20)  # that `wire.buffer_pool` keeps in all
RECORDER_EVENTS = int(os.environ.get("REMORA_RECORDER") or 2048)  # that a worker remembers; 0: it records nothing


def fault_plan_of_environment() -> str | None:
    """Return the fault plan in the environment, if there is one (docs/testing.md)."""
    return os.environ.get("REMORA_FAULTS")


def secret_of_environment(environment: Mapping[str, str] = os.environ) -> tuple[str | None, str | None]:
    """The group's secret, and a file that holds it, where the environment has them."""
    return environment.get("REMORA_SECRET"), environment.get("REMORA_SECRET_FILE")


class SettingsByName(TypedDict, total=False):
    """The settings of a worker as keyword arguments: the fields of `Settings`, which says what each of them means."""

    transports: Sequence[str] | None
    host: str | None
    interface: str | None
    port: int | str | None
    secret: str | bytes | None
    secret_file: str | None
    insecure: bool
    bringup_timeout: float | None
    connect_timeout: float
    heartbeat: float
    suspect_after: float
    reconnect_timeout: float
    silence_limit: float
    faults: str | None
    shared_memory: int
    device_memory: int
    auto_device_map: bool
    clock: Clock
    watch: int
    observers: bool
    record_sites: bool
    dump_folder: str | None


@dataclass(kw_only=True)
class Settings:
    """The settings of a worker: for listening, proving itself, waiting and giving up. All times are seconds.

    Where it listens:
        transports: which to use, best first, of "inproc", "unix" and "tcp"; None: all that work (REMORA_TRANSPORTS)
        host: address or name to listen on (REMORA_HOST)
        interface: network interface to listen on (REMORA_INTERFACE)
        port: port, or range "29600-29650", to listen on (REMORA_PORT)

    The peers that may talk to it:
        secret: the group's secret (REMORA_SECRET)
        secret_file: a file that holds it (REMORA_SECRET_FILE)
        insecure: talk to any process that can reach the port (REMORA_INSECURE=1)

    How long it waits:
        bringup_timeout: to find all workers of the group; None: as long as a call, 0: for ever
        connect_timeout: for one connection to be made, and for a caller to prove itself
        heartbeat: how long a link on which something is expected may be silent before it is asked
        suspect_after: how long a peer may be silent before it is suspected
        reconnect_timeout: how long a peer's host may not answer before the peer is given up
        silence_limit: how long a peer may be silent, though its host answers, before it is given up
        watch: how many workers each keeps an eye on even if it has nothing to say to them

    What it shares:
        shared_memory: bytes to share with workers of the same host; 0: none (REMORA_SHARED_MEMORY)
        device_memory: bytes of a device to lend each worker of the same host at a time; 0: none
        auto_device_map: tensors on devices that no device map names go over the host

    What it shows of itself (docs/observing.md):
        observers: answer observers, who know the secret and can change nothing (REMORA_OBSERVERS=0: do not)
        record_sites: note in which line each reference is made, which takes 1 µs (REMORA_RECORD_SITES=1)
        dump_folder: where to write dumps by itself when something fails; None: nowhere (REMORA_DUMP_DIR)

    For tests (docs/testing.md):
        faults: what shall go wrong (REMORA_FAULTS)
        clock: what its time is
    """

    transports: Sequence[str] | None = None
    host: str | None = None
    interface: str | None = None
    port: int | str | None = None
    secret: str | bytes | None = field(default=None, repr=False)
    secret_file: str | None = None
    insecure: bool = False
    bringup_timeout: float | None = None
    connect_timeout: float = 10.0
    heartbeat: float = 1.0
    suspect_after: float = 3.0
    reconnect_timeout: float = 4.0
    silence_limit: float = 30.0
    faults: str | None = None
    shared_memory: int = 1 << 30
    device_memory: int = 1 << 33
    auto_device_map: bool = False
    clock: Clock = SYSTEM
    watch: int = 2
    observers: bool = True
    record_sites: bool = False
    dump_folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "heartbeat", "suspect_after", "reconnect_timeout", "silence_limit"):
            if not check_timeout(getattr(self, name), name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.bringup_timeout is not None:
            check_timeout(self.bringup_timeout, "bringup_timeout")
        for name, things in (("watch", "workers"), ("shared_memory", "bytes"), ("device_memory", "bytes")):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name} must be a number of {things}, got {number!r}")
        for name in self.transports or ():
            if name not in TRANSPORTS:
                raise ValueError(f"unknown transport {name!r}: choose from {', '.join(TRANSPORTS)}")

    def time_to_meet(self, call_timeout: float) -> float:
        """Seconds to find all workers of the group, where a call may take that long; 0: for ever."""
        return call_timeout if self.bringup_timeout is None else self.bringup_timeout

    def with_environment(self) -> Settings:
        """These settings, where they are silent, completed from the environment."""
        env = os.environ
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("host", "interface", "port", "faults"):
            if values[name] is None:
                values[name] = env.get(f"REMORA_{name.upper()}") or None
        if not FAST_PATHS.shared_memory:
            values["shared_memory"] = 0
        elif env.get("REMORA_SHARED_MEMORY"):
            values["shared_memory"] = int(env["REMORA_SHARED_MEMORY"])
        if values["transports"] is None and env.get("REMORA_TRANSPORTS"):
            values["transports"] = [name.strip() for name in env["REMORA_TRANSPORTS"].split(",")]
        values["insecure"] = self.insecure or env.get("REMORA_INSECURE", "") not in ("", "0")
        values["observers"] = self.observers and env.get("REMORA_OBSERVERS") != "0"
        values["record_sites"] = self.record_sites or env.get("REMORA_RECORD_SITES", "") not in ("", "0")
        values["dump_folder"] = self.dump_folder or env.get("REMORA_DUMP_DIR") or None
        return Settings(**values)


def check_timeout(seconds: object, name: str) -> float:
    """A number of seconds to wait, as a float. Negative ones, NaN and what is no number are errors that name it."""
    if isinstance(seconds, bool) or not hasattr(type(seconds), "__float__"):
        raise TypeError(f"{name} must be a number of seconds, not {seconds!r}")
    checked = float(seconds)  # type: ignore[arg-type]
    if not checked >= 0:
        reason = "must not be negative" if checked < 0 else "is not a number"
        raise InvalidTimeout(f"{name} {reason}, got {seconds!r}")
    return checked
