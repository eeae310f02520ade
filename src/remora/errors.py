"""Every exception class of Remora, sorted by what the caller can know.

RemoraError (RuntimeError)            programs written for torch.distributed.rpc catch RuntimeError
├── NotInitialized                    there is no worker in this process (init_rpc was not called, or shutdown was)
├── WorkerNotFound                    no worker of that name or id in the group
├── RendezvousError                   the group could not be formed: names, ids, addresses, the store
│   └── MeetingUnknown (ValueError)   rank, world size or address of the store were not given, or are not valid
├── AuthenticationError               a peer does not know the group's secret, or there is none to prove
├── ProtocolError                     a peer broke the rules of the wire; its link is closed
├── SerializationError                a value could not be turned into bytes, or bytes into a value
├── ObserverError                     a worker could not be observed, or a question to it had no answer
│   └── NothingFound                  there is no such group, worker or address
└── CallError                         one call did not yield a value
    ├── CallNotSent                   it never left this worker: safe to retry
    ├── CallCancelled                 given up by its caller
    ├── CallOutcomeUnknown            it may or may not have run
    │   ├── CallTimeout (TimeoutError)    its deadline passed
    │   └── WorkerLost                    the callee died, or its connection could not be restored
    ├── OwnerDied                     the owner of a remote reference is gone, and its value with it
    └── RemoteError                   it ran on the callee and raised

An exception of a remote function arrives with its original type and is *also* a `RemoteError`; see `remora.wire.exceptions`.
"""

from __future__ import annotations

FORKED = (
    "This process was forked from the process of {name}, and a forked process has no worker. Call init_rpc here, with "
    "another name. In a worker process of a DataLoader: set num_workers=0, or make the calls where the batches arrive."
)


class RemoraError(RuntimeError):
    """Base of all errors below."""


class NotInitialized(RemoraError):
    """This process has no worker."""


class WorkerNotFound(RemoraError):
    """The group has no worker of that name or id."""


class RendezvousError(RemoraError):
    """The group could not be formed."""


class MeetingUnknown(RendezvousError, ValueError):
    """Rank, world size or address of the store were not given, or are not valid. Nothing has been done."""


class AuthenticationError(RemoraError):
    """A peer could not prove that it knows the group's secret, or there is no secret to prove."""


class ProtocolError(RemoraError):
    """A peer broke the rules of the wire protocol."""


class SerializationError(RemoraError):
    """A value could not be packed, or could not be rebuilt."""


class ObserverError(RemoraError):
    """A worker could not be observed, or did not answer a question. `worker` names it, `reason` says why."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"{worker}: {reason}" if worker else reason)
        self.worker = worker
        self.reason = reason


class NothingFound(ObserverError):
    """There is no group, worker or address that was asked for."""


class InvalidTimeout(RemoraError, ValueError):
    """A timeout is negative, or not a number. Nothing has been done."""


class CallError(RemoraError):
    """One call did not yield a value."""


class CallNotSent(CallError):
    """The call never left this worker. It is safe to try again."""


class CallCancelled(CallError):
    """The caller gave the call up."""


class CallOutcomeUnknown(CallError):
    """The call was sent and no answer came. It may have run, may be running, or may never run."""


class CallTimeout(CallOutcomeUnknown, TimeoutError):
    """The deadline of the call passed. The callee may still be running it."""


class WorkerLost(CallOutcomeUnknown):
    """The callee died, or could not be reached any more, while the call was under way."""


class OwnerDied(CallError):
    """The worker that owned a value died, and the value with it."""


class RemoteError(CallError):
    """The function ran on the callee and raised. `worker` names the callee, `remote_traceback` is its printed stack."""

    worker: str = ""
    remote_traceback: str = ""
