"""A destructor that the garbage collector runs in the midst of something may even end the worker."""

from __future__ import annotations

import threading
from contextlib import suppress

from remora import rpc
from remora.errors import RemoraError
from tests.agent.alone import worker_alone
from tests.systematic.tracing import AtPlace, Place, places_of

STEPS = (
    "rref/ref_table.py", "rref/owned_values.py", "rref/held_refs.py", "rref/effect_runner.py", "rref/create.py",
    "agent/runtime/serial_queue.py",
)  # fmt: skip


def double(x: int) -> int:
    return 2 * x


def work() -> None:
    """What this thread does, it does not wait for: a thread that reads holds a lock of the link."""
    rpc.remote("alone", double, args=(2,))
    future = rpc.rpc_async("alone", double_of, args=(rpc.RRef(1),))
    future.exception()  # nobody need hear of it


def double_of(rref: rpc.RRef[int]) -> int:
    return 2 * rref.to_here()


def end(place: Place) -> None:
    rpc.shutdown(graceful=False)


def test_a_worker_may_be_shut_down_in_the_midst_of_any_step() -> None:
    with worker_alone():
        rpc.rpc_sync("alone", double, args=(1,))
        places = [place for place in places_of(work) if place.file in STEPS]
    assert len(places) > 20
    for place in places[::2]:
        strike = AtPlace(place, end)
        with worker_alone(graceful=False):
            rpc.rpc_sync("alone", double, args=(1,))
            with suppress(RemoraError), strike:
                work()  # what is under way fails
        assert strike.place == place
        assert not rpc._is_current_rpc_agent_set()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("remora-alone")]
