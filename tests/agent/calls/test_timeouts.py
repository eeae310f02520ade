"""Every place that takes a timeout refuses what is none: negative numbers, NaN, and what is no number. -1 is "not set"
where PyTorch says so, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remora import rpc
from remora.errors import InvalidTimeout
from remora.rpc import RRef
from remora.rpc.constants import UNSET_RPC_TIMEOUT
from remora.rpc.rref_proxy import RRefProxy
from remora.supervision import Supervisor
from remora.testing.processes import Processes
from remora.testing.world import World

Use = Callable[[Any], object]

# With a worker that has "worker1" beside it. What PyTorch takes -1 for "not set" in:
CALLS: dict[str, Use] = {
    "rpc_sync": lambda timeout: rpc.rpc_sync("worker1", abs, args=(-1,), timeout=timeout),
    "rpc_sync to itself": lambda timeout: rpc.rpc_sync("worker0", abs, args=(-1,), timeout=timeout),
    "rpc_async": lambda timeout: rpc.rpc_async("worker1", abs, args=(-1,), timeout=timeout).wait(),
    "remote": lambda timeout: rpc.remote("worker1", abs, args=(-1,), timeout=timeout).to_here(),
    "remote to itself": lambda timeout: rpc.remote("worker0", abs, args=(-1,), timeout=timeout).to_here(),
    "to_here": lambda timeout: rpc.remote("worker1", abs, args=(-1,)).to_here(timeout),
    "to_here of its own": lambda timeout: RRef(1).to_here(timeout),
    "to_here_async": lambda timeout: rpc.remote("worker1", abs, args=(-1,)).to_here_async(timeout).wait(),
    "to_here_async of its own": lambda timeout: RRef(1).to_here_async(timeout).wait(),
    "RRef.rpc_sync": lambda timeout: rpc.remote("worker1", abs, args=(-1,)).rpc_sync(timeout).bit_length(),
    "RRef.rpc_async": lambda timeout: rpc.remote("worker1", abs, args=(-1,)).rpc_async(timeout).bit_length().wait(),
    "RRef.remote": lambda timeout: rpc.remote("worker1", abs, args=(-1,)).remote(timeout).bit_length().to_here(),
    "RRefProxy": lambda timeout: RRefProxy(rpc.remote("worker1", abs, args=(-1,)), rpc.rpc_sync, timeout).bit_length(),
    "_get_type": lambda timeout: rpc.remote("worker1", abs, args=(-1,))._get_type(timeout),
    "_all_gather": lambda timeout: rpc._all_gather(1, {"worker0"}, timeout),
}

# And where it is as wrong as -2.
OTHERS: dict[str, Use] = {
    "future.wait": lambda timeout: rpc.rpc_async("worker1", abs, args=(-1,)).wait(timeout),
    "future.wait that is done": lambda timeout: settled().wait(timeout),
    "shutdown": lambda timeout: rpc.shutdown(timeout=timeout),
    "shutdown at once": lambda timeout: rpc.shutdown(graceful=False, timeout=timeout),
    "_set_rpc_timeout": lambda timeout: rpc._set_rpc_timeout(timeout),
    "delete_all": lambda timeout: rpc._delete_all_user_and_unforked_owner_rrefs(timeout),
}

# PyTorch takes -1 here, too, but nothing comes of it in a world where the others do not take part.
GROUPS: dict[str, Use] = {"_wait_all_workers": lambda timeout: rpc.api._wait_all_workers(timeout)}

# Without any.
SETTINGS: dict[str, Use] = {
    "rpc_timeout": lambda timeout: rpc.RpcBackendOptions(rpc_timeout=timeout),
    "rpc_timeout set later": lambda timeout: setattr(rpc.TensorPipeRpcBackendOptions(), "rpc_timeout", timeout),
    "bringup_timeout": lambda timeout: rpc.RemoraRpcBackendOptions(bringup_timeout=timeout),
    "connect_timeout": lambda timeout: rpc.RemoraRpcBackendOptions(connect_timeout=timeout),
    "silence_limit": lambda timeout: rpc.RemoraRpcBackendOptions(silence_limit=timeout),
    "grace": lambda timeout: Supervisor(grace=timeout),
    "Supervisor.wait": lambda timeout: Supervisor().wait(timeout),
    "World": lambda timeout: World(1, timeout=timeout),
    "Processes": lambda timeout: Processes(1, timeout=timeout),
}

NO_TIMES: list[object] = [-3.0, -0.5, -2, float("nan"), float("-inf"), "3", [1]]


@pytest.fixture
def world() -> Iterator[World]:
    with World(2) as made, made.acting(0):
        yield made


def settled() -> rpc.Future[int]:
    future = rpc.rpc_async("worker1", abs, args=(-1,))
    future.wait()
    return future


def check_refusal(use: Use, timeout: object) -> None:
    assert repr(timeout) in error_of(use, timeout)


def error_of(use: Use, timeout: object) -> str:
    """Not by `pytest.raises`, which keeps the frames, and so the references in them, until the next collection."""
    try:
        use(timeout)
    except (InvalidTimeout, TypeError) as error:
        return str(error)
    return "none was raised"


@pytest.mark.parametrize("place", [*CALLS, *OTHERS, *GROUPS])
def test_a_call_refuses_what_is_no_time(world: World, place: str) -> None:
    default = rpc.get_rpc_timeout()
    for timeout in NO_TIMES:
        check_refusal((CALLS | OTHERS | GROUPS)[place], timeout)
    assert rpc.get_rpc_timeout() == default
    world.wait_until(lambda: not rpc.references().held)  # nothing was made that cannot be let go
    assert rpc.rpc_sync("worker1", abs, args=(-1,)) == 1


@pytest.mark.parametrize("place", SETTINGS)
def test_a_setting_refuses_what_is_no_time(place: str) -> None:
    for timeout in [*NO_TIMES, -1, -1.0]:
        check_refusal(SETTINGS[place], timeout)


@pytest.mark.parametrize("place", CALLS)
def test_what_is_a_time_or_not_set_is_taken(world: World, place: str) -> None:
    for timeout in (-1, -1.0, UNSET_RPC_TIMEOUT, 5, 5.0, 0, float("inf"), 1e300):
        CALLS[place](timeout)


@pytest.mark.parametrize("place", OTHERS)
def test_not_set_is_no_time_elsewhere(world: World, place: str) -> None:
    with pytest.raises(InvalidTimeout, match=r"got -1"):
        OTHERS[place](-1)


def test_a_number_that_is_no_float_is_a_number(world: World) -> None:
    numpy = pytest.importorskip("numpy")
    assert rpc.rpc_sync("worker1", abs, args=(-1,), timeout=numpy.float32(5)) == 1


def test_the_error_names_the_call_and_is_what_programs_catch(world: World) -> None:
    with pytest.raises(RuntimeError, match=r"timeout of the call of builtins.abs on worker1 must not be negative, got -3"):
        rpc.rpc_sync("worker1", abs, args=(-1,), timeout=-3)
    with pytest.raises(ValueError, match="got nan"):
        rpc.rpc_sync("worker1", abs, args=(-1,), timeout=float("nan"))
