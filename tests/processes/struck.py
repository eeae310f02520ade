"""A worker whose main thread is struck by alarms while it calls another one. Prints what came of it, as JSON.

`python -m tests.processes.struck RANK MEETING SECONDS SEED KIND`. The alarm comes a random moment after each call began,
and raises an exception, so that it strikes anywhere.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
import time
from typing import Any

import torch

from remora import rpc
from remora.rpc import RemoraRpcBackendOptions

LONGEST = 30.0  # seconds for one call: none takes long
LARGE = torch.arange(32768.0)


class Struck(BaseException):
    """What most programs do not catch."""


class StruckInTime(TimeoutError):
    """What an alarm of a program raises."""


KINDS: dict[str, type[BaseException]] = {"base": Struck, "time": StruckInTime}
ran: dict[Any, int] = {}
armed = False


def plus_one(key: Any, n: int) -> int:
    ran[key] = ran.get(key, 0) + 1
    return n + 1


def twice(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def ran_twice() -> list[Any]:
    return [key for key, times in ran.items() if times > 1]


def call(n: int) -> None:
    assert rpc.rpc_sync("w1", plus_one, args=(n, n), timeout=LONGEST) == n + 1


def call_and_wait(n: int) -> None:
    assert rpc.rpc_async("w1", plus_one, args=(n, n), timeout=LONGEST).wait() == n + 1


def follow(n: int) -> None:
    assert rpc.rpc_async("w1", plus_one, args=(n, n), timeout=LONGEST).then(lambda done: done.wait() + 1).wait() == n + 2


def wait_for_all(n: int) -> None:
    futures = [rpc.rpc_async("w1", plus_one, args=((n, i), i), timeout=LONGEST) for i in range(4)]
    assert torch.futures.wait_all(futures) == [1, 2, 3, 4]  # type: ignore[arg-type]


def send_large(n: int) -> None:
    assert torch.equal(rpc.rpc_sync("w1", twice, args=(LARGE,), timeout=LONGEST), 2 * LARGE)


def make_and_fetch(n: int) -> None:
    assert rpc.remote("w1", plus_one, args=(n, n)).to_here(timeout=LONGEST) == n + 1


WORK = [call, call_and_wait, follow, wait_for_all, send_large, make_and_fetch]


def strike_at(seconds: float, seed: int, kind: type[BaseException]) -> dict[str, Any]:
    chance = random.Random(seed)
    struck, errors, n = 0, [], 0

    def handler(*_: object) -> None:
        global armed
        if armed:
            armed = False
            raise kind("an alarm")

    global armed
    signal.signal(signal.SIGALRM, handler)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        n += 1
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 10 ** chance.uniform(-5, -2.7))
                chance.choice(WORK)(n)
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except kind:
            struck += 1
        except BaseException as error:  # a strike in a callback is an error of its future
            if "an alarm" not in str(error):
                errors.append(f"{n}: {error!r}")
        if n % 10 == 0:
            chance.choice(WORK)(-n)  # what comes after is right
    again = rpc.rpc_sync("w1", ran_twice, timeout=LONGEST)
    began = time.monotonic()
    rpc.shutdown(timeout=LONGEST)
    return {"calls": n, "struck": struck, "errors": errors, "twice": again, "shutdown": time.monotonic() - began}


def main(rank: int, meeting: str, seconds: float, seed: int, kind: str) -> None:
    faulthandler.dump_traceback_later(seconds + 60.0, exit=True)
    options = RemoraRpcBackendOptions(init_method=meeting)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank:
        rpc.shutdown(timeout=600.0)
    else:
        print(json.dumps(strike_at(seconds, seed, KINDS[kind])))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
