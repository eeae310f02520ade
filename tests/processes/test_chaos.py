"""Everything at once: calls of all kinds while links break, deadlines pass and callers give up. Each call ends, once."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

from remora import rpc
from remora.errors import CallCancelled, CallNotSent, CallTimeout
from tests.chaos import fate
from tests.eventually import eventually
from tests.processes import targets
from tests.workers import Workers


def note(key: int, tensor: torch.Tensor | None, pause: float) -> tuple[int, float]:
    """What all calls do: count themselves, perhaps take a while, and give back what they were given."""
    times = targets.count(key)
    if pause:
        time.sleep(pause)
    return times, -1.0 if tensor is None else float(tensor[-1])


def cut_links(chance: random.Random, until: float) -> None:
    """Break this worker's links, now one and now another."""
    while time.monotonic() < until:
        peers = rpc._get_current_rpc_agent().agent.peers.all()
        peer = chance.choice(peers)
        channel = chance.choice([peer.outgoing, peer.incoming])
        if channel is not None:
            channel.cut(OSError("chaos"))
        time.sleep(chance.uniform(0.0, 0.01))


def make_calls(chance: random.Random, first_key: int, until: float, others: list[str], said: list[str]) -> int:
    """Calls of all kinds until the time is up; what was wrong goes into `said`. How many calls were made."""
    key, unsent = first_key, unsent_here
    while time.monotonic() < until:
        size = chance.choice([0, 0, 1, 1000, 100_000])
        tensor = torch.full((size,), float(key), dtype=torch.float64) if size else None
        pause = chance.choice([0.0, 0.0, 0.0, 0.02])
        timeout = chance.choice([20.0, 20.0, 20.0, 0.01])
        args = (key, tensor, pause)
        try:
            if chance.random() < 0.4:
                outcome = rpc.rpc_sync(chance.choice(others), note, args=args, timeout=timeout)
            else:
                future = rpc.rpc_async(chance.choice(others), note, args=args, timeout=timeout)
                if tensor is not None:
                    tensor.fill_(-7.0)  # later changes are not seen
                if chance.random() < 0.1:
                    future.cancel()
                outcome = future.wait()
            if outcome != (1, float(key) if size else -1.0):
                said.append(f"call {key} of size {size} returned {outcome}")
        except CallTimeout:
            if timeout > 1.0:
                said.append(f"call {key} timed out after {timeout} s")
        except CallCancelled:
            pass
        except CallNotSent as error:
            # Its link broke while it was sent, and it cannot be said again: an honest answer, if it is true. Or it was
            # not sent in time.
            if "its tensors were changed" not in str(error) and timeout > 1.0:
                said.append(f"call {key} of size {size}: {error}")
            unsent.append(key)
        except Exception as error:
            said.append(f"call {key} of size {size}: {type(error).__name__}: {error}")
        key += 1
    return key - first_key


unsent_here: list[int] = []  # calls of this worker of which it was told that they did not run


def sent_in_vain() -> list[int]:
    return unsent_here


def live_in_chaos(seed: int, seconds: float) -> tuple[int, list[str]]:
    """Four threads call the other workers while a fifth breaks links; (calls made, complaints)."""
    me = rpc.get_worker_info().id
    others = [info.name for info in rpc._get_current_rpc_agent().get_worker_infos() if info.id != me]
    until = time.monotonic() + seconds
    said: list[str] = []
    made: list[int] = []

    def caller(k: int) -> None:
        first_key = (me * 10 + k) * 1_000_000
        made.append(make_calls(random.Random(f"{seed} {me} {k}"), first_key, until, others, said))

    threads: list[Any] = [threading.Thread(target=caller, args=(k,)) for k in range(4)]
    threads.append(threading.Thread(target=cut_links, args=(random.Random(f"{seed} {me}"), until)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(made), said


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_every_call_ends_once_and_right(transport: str) -> None:
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    with Workers(3, options={"transports": [transport], "num_worker_threads": 4}) as workers:
        found = workers.run_all(live_in_chaos, seed, 2.0)
        complaints = [complaint for _, said in found for complaint in said]
        assert not complaints, f"{len(complaints)} of {sum(made for made, _ in found)} calls: {complaints[:5]}"
        assert all(made > 20 for made, _ in found)
        ran = workers.run_all(targets.counted)
        assert all(set(counted.values()) <= {1} for counted in ran), "no call ran twice"
        in_vain = {key for keys in workers.run_all(sent_in_vain) for key in keys}
        assert not in_vain & {key for counted in ran for key in counted}, "what is said not to have run has not"
        # Quiet again: nothing is left of it.
        for rank in range(3):
            eventually(lambda rank=rank: workers.run(rank, busy) == (0, 0))  # type: ignore[misc]


def test_workers_are_killed_frozen_cut_off_and_restarted() -> None:
    """The short version of `make chaos`."""
    seed = random.randrange(10_000)
    account = fate.run(8.0, seed)
    print(account)
    assert not account.complaints(), account.complaints()[:10]
    assert account.ledger.verdicts()["right"] > 100
    assert sum(account.faults.values()) >= 2


def busy() -> tuple[int, int]:
    agent = rpc._get_current_rpc_agent().agent
    return agent.peers.active_calls(), agent.dispatch.counts()
