"""The errors of a call in words: why there is no answer, or none that can be used."""

from __future__ import annotations

from remora.agent.calls.peer_info import PeerInfo
from remora.errors import CallOutcomeUnknown, CallTimeout, RemoraError, SerializationError, WorkerLost
from remora.wire.enclosed import Missing, Reason
from remora.wire.frames import Frame

GIVEN, DEFAULT, INHERITED = "given", "default", "inherited"  # where a deadline comes from


def name_of(target: object) -> str:
    """Return the name of a function as people say it."""
    if isinstance(target, str):
        return target
    try:
        name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
        module = getattr(target, "__module__", None)
    except Exception:  # of the program
        name = module = None
    if name is None:  # not its `repr`, which is the program's: this may be the thread of the timers
        name, module = type(target).__qualname__, type(target).__module__
    name = str(name).removeprefix("_VariableFunctionsClass.")  # where torch keeps its functions
    return f"{module}.{name}" if module else name


def tensors_missing(what: str, peer: PeerInfo, problem: str) -> RemoraError:
    """The reply is here, and its tensors are not."""
    if peer.gone:
        return WorkerLost(f"{what}: it was answered, but its tensors did not come: {problem}")
    return CallOutcomeUnknown(f"{what}: it ran and was answered, but its tensors did not come: {problem}")


def result_missing(what: str, peer: PeerInfo, frame: Frame, missing: Missing) -> RemoraError:
    """The reply is here, and cannot be unpacked."""
    if missing.reason is Reason.NO_MEMORY:
        return too_large(what, peer, frame)
    if missing.reason is Reason.DAMAGED:
        return SerializationError(f"{what}: it was answered, but {missing.details}")
    return WorkerLost(
        f"{what}: it was answered, but the answer is in shared memory of {peer.name} that {peer.me} could not map"
    )


def too_large(what: str, peer: PeerInfo, frame: Frame) -> SerializationError:
    """This worker has no memory for the reply."""
    size, me = frame.size, peer.me
    return SerializationError(f"{what}: the result ({size} bytes) does not fit into the memory of {me}, the caller")


def unreadable(what: str, peer: PeerInfo, error: SerializationError) -> SerializationError:
    """The reply cannot be unpickled."""
    return SerializationError(
        f"{what}: it was answered, but the result makes no sense: {error}. The function ran; the fault is in "
        f"{peer.name} or on the way from it to {peer.me}"
    )


def timed_out(what: str, peer: PeerInfo, allowance: tuple[float, str], progress: tuple[bool, float] | None) -> CallTimeout:
    """The deadline of a call passed. The words are those programs match on."""
    allowed, source = allowance
    return CallTimeout(
        f"RPCErr:1:RPC ran for more than set timeout ({allowed * 1000:g} ms) and will now be marked with an error: "
        f"{what}. {source}{_begun(peer, progress)} Pass a longer timeout, or 0 to wait for ever."
        + (f" ({peer.name} is suspected: {peer.suspicion})" if peer.suspicion else "")
    )


def describe_allowance(peer: PeerInfo, timeout: float, source: str, deadline: float) -> tuple[float, str]:
    """Return the seconds a call was allowed to take, and the origin of that limit, in words."""
    if source is GIVEN:
        return timeout, ""
    if source is DEFAULT:
        return timeout, "That is the default of this worker (rpc_timeout). "
    served = peer.served_until(deadline)
    left = f"of which {timeout * 1000:.0f} ms were left when this call began. "
    if served is None:
        return timeout, f"It had the deadline of the call that it was made for, {left}"
    function, caller, allowed = served
    outer = f"{name_of(function)}, which {caller} called with {allowed * 1000:.0f} ms"
    return allowed, f"It had the deadline of {outer}, {left}"


def _begun(peer: PeerInfo, progress: tuple[bool, float] | None) -> str:
    """Return the callee's last report on the call, made as its deadline came near, in words."""
    if progress is None:
        return f"Whether it had begun on {peer.name} is not known."
    begun, at = progress
    if begun:
        return f"It had begun on {peer.name}, and may still be running."
    ago = max(peer.now() - at, 0.0)
    return f"It had not begun on {peer.name} {ago:.1f} s before: it waited for a thread there."
