"""A worker in the middle of it: it calls and shares at random, and writes down what it asked for and what came of it.

What is written is written at once (a system call each), so that it is there when the process is killed a moment later.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from typing import Any

import torch

from remora import rpc
from remora.errors import CallCancelled, CallError, CallNotSent, RemoraError, RemoteError
from tests import hosts

TIMEOUT = 15.0
THREADS = 3

_book = -1
_stop = threading.Event()
_threads: list[threading.Thread] = []


def begin(rank: int, life: int, book: str, method: str, place: tuple[str, str] | None, seed: int) -> None:
    """Join the group, on a host of our own if there are any, and live."""
    global _book
    _book = os.open(book, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    settings: dict[str, Any] = {"init_method": method, "rpc_timeout": TIMEOUT, "num_worker_threads": 8}
    if place is not None:
        hosts.enter(place[0])
        settings |= {"host": place[1], "secret": "chaos" * 8}
    rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=rpc.RemoraRpcBackendOptions(**settings))
    for number in range(THREADS):
        prefix = f"{rank}.{life}.{number}"
        thread = threading.Thread(target=_live, args=(prefix, random.Random(f"{seed} {prefix}")), name=f"life-{number}")
        _threads.append(thread)
        thread.start()


def end() -> None:
    """Make no more calls, and wait for those under way."""
    _stop.set()
    for thread in _threads:
        thread.join(2 * TIMEOUT)
        assert not thread.is_alive(), f"{thread.name} waits for something that does not come"


def leave() -> None:
    rpc.shutdown()
    os.close(_book)


def left_over() -> dict[str, int]:
    """What should be nothing when nobody does anything any more."""
    gc.collect()
    worker = rpc._get_current_rpc_agent()
    counts = worker.references.table.counts()
    return {
        "calls": worker.agent.peers.active_calls(),
        "requests": worker.agent.dispatch.counts(),
        "values": counts["num_owner_rrefs"],
        "forks": counts["num_forks"],
        "unconfirmed": counts["num_pending_users"],
    }


def break_links(seed: int) -> int:
    """Drop some of the links of this worker; how many."""
    chance, broken = random.Random(seed), 0
    for peer in rpc._get_current_rpc_agent().agent.peers.all():
        for channel in peer.channels():
            if channel.link is not None and chance.random() < 0.5:
                channel.cut(OSError("chaos"))
                broken += 1
    return broken


# What is called.


def write(*words: object) -> None:
    os.write(_book, (" ".join(map(str, words)) + "\n").encode())


def note(key: str, tensor: torch.Tensor | None) -> tuple[str, float]:
    """What most calls do."""
    write("ran", key)
    return key, 0.0 if tensor is None else float(tensor.sum())


def make(key: str) -> dict[str, str]:
    write("ran", key)
    return {"key": key}


def use(key: str, reference: rpc.RRef[dict[str, str]]) -> str:
    """Somebody else's value, by a third hand."""
    write("ran", key)
    return reference.to_here(timeout=TIMEOUT)["key"]


# What is done.


def _live(prefix: str, chance: random.Random) -> None:
    number = 0
    while not _stop.is_set():
        others = [info.name for info in rpc.get_worker_infos() if info != rpc.get_worker_info()]
        if not others:
            time.sleep(0.05)
            continue
        number += 1
        deed = chance.choice([_call, _call, _many, _share])
        deed(f"{prefix}.{number}", others, chance)
        time.sleep(chance.choice([0.0, 0.0, 0.001, 0.01]))


def _call(key: str, others: list[str], chance: random.Random) -> None:
    size = chance.choice([0, 10, 100_000])
    tensor = torch.ones(size) if size else None
    to = chance.choice(others)
    write("asked", key, to)
    _settle(key, lambda: rpc.rpc_sync(to, note, args=(key, tensor)), (key, float(size)))


def _many(key: str, others: list[str], chance: random.Random) -> None:
    futures = {}
    for i in range(chance.randint(2, 20)):
        to, each = chance.choice(others), f"{key}.{i}"
        write("asked", each, to)
        futures[each] = rpc.rpc_async(to, note, args=(each, None))
        if chance.random() < 0.05:
            futures[each].cancel()
    for each, future in futures.items():
        _settle(each, future.wait, (each, 0.0))


def _share(key: str, others: list[str], chance: random.Random) -> None:
    """Have one worker make a value and another one use it."""
    owner, user = chance.choice(others), chance.choice(others)
    write("asked", key, owner)
    try:
        reference = rpc.remote(owner, make, args=(key,))
    except RemoraError as error:
        write("got", key, *_verdict(error))
        return
    using = f"{key}.use"
    write("asked", using, user)
    _settle(using, lambda: rpc.rpc_sync(user, use, args=(using, reference)), key)
    _settle(key, lambda: reference.to_here(timeout=TIMEOUT)["key"], key)


def _settle(key: str, outcome: Any, right: object) -> None:
    try:
        value = outcome()
    except CallError as error:
        write("got", key, *_verdict(error))
    except BaseException as error:
        write("got", key, "wrong", f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
    else:
        write("got", key, *(("right",) if value == right else ("wrong", f"{value!r} instead of {right!r}")))


def _verdict(error: RemoraError) -> tuple[str, str]:
    """What the caller can know. What the called function met with on its own calls is its outcome: it ran."""
    if isinstance(error, RemoteError):
        return "failed", type(error).__name__
    if isinstance(error, CallNotSent):
        return "unsent", type(error).__name__
    if isinstance(error, CallCancelled):
        return "cancelled", type(error).__name__
    return "lost", type(error).__name__
