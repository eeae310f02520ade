"""Every setting of a worker, with its default, its check and the environment variable that sets it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from remora.clock import SYSTEM, Clock
from remora.errors import InvalidTimeout

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_INIT_METHOD = "env://"

TRANSPORTS = ("inproc", "unix", "tcp")


@dataclass(kw_only=True)
class Settings:
    """How a worker listens, proves itself, waits and gives up. All times are seconds."""

    transports: Sequence[str] | None = None  # which to use, best first; None: all that work (REMORA_TRANSPORTS)
    host: str | None = None  # address or name to listen on (REMORA_HOST)
    interface: str | None = None  # network interface to listen on (REMORA_INTERFACE)
    port: int | str | None = None  # port, or range "29600-29650", to listen on (REMORA_PORT)
    secret: str | bytes | None = field(default=None, repr=False)  # the group's secret (REMORA_SECRET)
    secret_file: str | None = None  # a file that holds it (REMORA_SECRET_FILE)
    insecure: bool = False  # talk to anyone who can reach the port (REMORA_INSECURE=1)
    bringup_timeout: float | None = None  # to find all workers of the group; None: as long as a call, 0: for ever
    connect_timeout: float = 10.0  # for one connection to be made, and for a caller to prove itself
    heartbeat: float = 1.0  # how long a link on which something is expected may be silent before it is asked
    suspect_after: float = 3.0  # how long a peer may be silent before it is suspected
    reconnect_timeout: float = 4.0  # how long a peer's host may not answer before the peer is given up
    silence_limit: float = 30.0  # how long a peer may be silent, though its host answers, before it is given up
    faults: str | None = None  # what shall go wrong, in tests: see docs/testing.md (REMORA_FAULTS)
    shared_memory: int = 1 << 30  # bytes to share with workers of the same host; 0: none (REMORA_SHARED_MEMORY)
    device_memory: int = 1 << 33  # bytes of a device to lend each worker of the same host at a time; 0: none
    auto_device_map: bool = False  # tensors on devices that no device map names go over the host
    clock: Clock = SYSTEM  # what its time is; in tests another one may be: see docs/testing.md
    watch: int = 2  # how many workers each keeps an eye on even if it has nothing to say to them

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "heartbeat", "suspect_after", "reconnect_timeout", "silence_limit"):
            if not check_timeout(getattr(self, name), name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.bringup_timeout is not None:
            check_timeout(self.bringup_timeout, "bringup_timeout")
        if isinstance(self.watch, bool) or not isinstance(self.watch, int) or self.watch < 0:
            raise ValueError(f"watch must be a number of workers, got {self.watch!r}")
        if isinstance(self.shared_memory, bool) or not isinstance(self.shared_memory, int) or self.shared_memory < 0:
            raise ValueError(f"shared_memory must be a number of bytes, got {self.shared_memory!r}")
        if isinstance(self.device_memory, bool) or not isinstance(self.device_memory, int) or self.device_memory < 0:
            raise ValueError(f"device_memory must be a number of bytes, got {self.device_memory!r}")
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
        if env.get("REMORA_SHARED_MEMORY"):
            values["shared_memory"] = int(env["REMORA_SHARED_MEMORY"])
        if values["transports"] is None and env.get("REMORA_TRANSPORTS"):
            values["transports"] = [name.strip() for name in env["REMORA_TRANSPORTS"].split(",")]
        values["insecure"] = self.insecure or env.get("REMORA_INSECURE", "") not in ("", "0")
        return Settings(**values)


def check_timeout(seconds: object, name: str) -> float:
    """A number of seconds to wait, as a float. Negative ones, NaN and what is no number are errors that
    name it."""
    if isinstance(seconds, bool) or not hasattr(type(seconds), "__float__"):
        raise TypeError(f"{name} must be a number of seconds, not {seconds!r}")
    checked = float(seconds)  # type: ignore[arg-type]
    if not checked >= 0:
        reason = "must not be negative" if checked < 0 else "is not a number"
        raise InvalidTimeout(f"{name} {reason}, got {seconds!r}")
    return checked
