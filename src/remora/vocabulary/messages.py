"""The specification of what goes over a link after the handshake: one class for each type of message.

The fields of a class are its payload; its docstring says which worker sends it, when, and what follows. Its layout says how
the payload becomes the body of a frame (`remora.wire.message_codec` is the one place that does it, `remora.wire.frames`
has the header). The codes are PyTorch's where it has the message; ours start at 0x40.

A **request** has 0x100 set and is answered by one message with 0x200 set: the one that `answered_by` names, or EXCEPTION.
What has neither is a **word** between the two ends of a session, and is not answered. Words that are not `numbered` belong
to one connection: they are not repeated on the next. Frames carry the type in clear, so that faults can be chosen by type.

The header says which call a message belongs to, and has flags that change the body (`Flag`).

The hot path packs and reads calls, replies and fetches as plain values, without making an object of their class: the class
says what they look like, and a test holds real traffic against it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, IntFlag
from typing import Any, ClassVar, TypeVar, dataclass_transform

from remora.vocabulary.effects import ForkId, RRefId
from remora.vocabulary.ids import GloballyUniqueId, WorkerKey

REQUEST = 0x100
RESPONSE = 0x200

PassId = tuple[int, int, int, bool, bool]  # context, worker that began the pass, its number there, SMART, retain_graph
Part = dict[int, list[int]]  # by message that was sent: the numbers of the tensors in it whose gradients will come
Owed = dict[int, tuple[int, list[str]]]  # by worker: how many gradients had come to it, and what it waited for then


class MessageType(IntEnum):
    """Every type of message, by the name PyTorch gives it."""

    SCRIPT_CALL = 0x100
    SCRIPT_RET = 0x201
    PYTHON_CALL = 0x102
    PYTHON_RET = 0x203
    SCRIPT_REMOTE_CALL = 0x104
    PYTHON_REMOTE_CALL = 0x105
    REMOTE_RET = 0x206
    SCRIPT_RREF_FETCH_CALL = 0x107
    PYTHON_RREF_FETCH_CALL = 0x108
    SCRIPT_RREF_FETCH_RET = 0x209
    PYTHON_RREF_FETCH_RET = 0x20A
    RREF_USER_DELETE = 0x10B
    RREF_FORK_REQUEST = 0x10C
    RREF_CHILD_ACCEPT = 0x10D
    RREF_ACK = 0x20E
    FORWARD_AUTOGRAD_REQ = 0x10F
    FORWARD_AUTOGRAD_RESP = 0x210
    BACKWARD_AUTOGRAD_REQ = 0x111
    BACKWARD_AUTOGRAD_RESP = 0x212
    CLEANUP_AUTOGRAD_CONTEXT_REQ = 0x113
    CLEANUP_AUTOGRAD_CONTEXT_RESP = 0x214
    RUN_WITH_PROFILING_REQ = 0x115
    RUN_WITH_PROFILING_RESP = 0x216
    RREF_BACKWARD_REQ = 0x117
    RREF_BACKWARD_RESP = 0x218
    EXCEPTION = 0x237
    # Ours.
    JOINED = 0x140
    LEAVING = 0x142
    LOST = 0x143
    GREETING = 0x144
    CONFIRM_DEATH = 0x145
    CONFIRM_LEAVE = 0x146
    LOSS_CONFIRMED = 0x147
    MEMBERSHIP_ACK = 0x241
    BACKWARD_PART_REQ = 0x150
    BACKWARD_PART_RESP = 0x251
    BACKWARD_END_REQ = 0x152
    BACKWARD_END_RESP = 0x253
    AUTOGRAD_CONTEXT_HELD_REQ = 0x154
    AUTOGRAD_CONTEXT_HELD_RESP = 0x255
    CANCEL = 0x40
    ACK = 0x41
    PING = 0x42
    PONG = 0x43
    GOODBYE = 0x44
    VOID = 0x45
    GIVE_BACK = 0x46
    FUNCTION = 0x47
    PROGRESS = 0x48


RESERVED = frozenset(
    {  # PyTorch's codes for what Remora says in another way; no worker sends them
        MessageType.FORWARD_AUTOGRAD_REQ,  # a call with the flag RECORDED
        MessageType.FORWARD_AUTOGRAD_RESP,
        MessageType.CLEANUP_AUTOGRAD_CONTEXT_RESP,  # the request is not answered
        MessageType.RUN_WITH_PROFILING_REQ,  # a call of a function that profiles another
        MessageType.RUN_WITH_PROFILING_RESP,
    }
)


class Flag(IntFlag):
    """A flag of the header. Parts of the body that flags put before and behind the payload do not belong to the payload."""

    FAILED = 1  # it is an EXCEPTION, whatever was asked
    ASYNC = 2  # of a call: the function returns a future, and the value of that is the result
    REFERENCES = 4  # it begins with a preamble: the references in it, and the value that it makes (`wire/ref_header.py`)
    RECORDED = 8  # the pickle of (payload, (autograd context, number of the message, whether grad mode is on))
    SHARED = 16  # it ends with where its buffers are, in memory of the sender (`agent/memory/shared.py`)
    DEVICE_BUFFERS = 32  # it ends with where the memory of its tensors on devices is (`wire/device_buffers.py`)
    TRACED = 64  # of a call: its first field is another one's, the trace of which it is a part (`agent/calls/call_trace.py`)


class Layout(Enum):
    """The way in which a payload becomes the body of a frame."""

    EMPTY = "no body"
    NONE = "the pickle of None"
    VALUE = "the pickle of the field"
    FIELDS = "the pickle of the tuple of fields"
    FIELDS_OR_NONE = "the pickle of the tuple of fields, or of None if both are empty"
    BINARY = "bytes of a fixed order, little endian"


@dataclass(frozen=True, slots=True)
class Message:
    """The base of all payloads. `payload` sets what is said here of a class."""

    type: ClassVar[MessageType]
    layout: ClassVar[Layout]
    answered_by: ClassVar[MessageType | None] = None
    order: ClassVar[str] = ""  # of the bytes, if the layout is BINARY; an id is two u64, its worker and its number
    numbered: ClassVar[bool] = True
    of_program: ClassVar[bool] = False  # it holds values of the program: what fails while they are unpickled is theirs


M = TypeVar("M", bound=Message)


@dataclass_transform(frozen_default=True)
def payload(
    code: MessageType,
    layout: Layout | None = None,
    *,
    answered_by: MessageType | None = None,
    numbered: bool = True,
    of_program: bool = False,
) -> Callable[[type[M]], type[M]]:
    """Make a class the payload of one type of message. Without a layout, it has the fields and the layout of its base."""

    def declare(kind: type[M]) -> type[M]:
        kind.type = code
        kind.layout = layout or kind.layout
        kind.answered_by = answered_by or kind.answered_by
        kind.numbered = numbered
        kind.of_program = of_program or kind.of_program
        return dataclass(frozen=True, slots=True)(kind)

    return declare


# Calls.


@payload(MessageType.PYTHON_CALL, Layout.FIELDS, answered_by=MessageType.PYTHON_RET, of_program=True)
class PythonCall(Message):
    """The caller has the callee run a Python function.

    In the place of the function may stand the number that a FUNCTION before it gave to it; a call of such a function without
    arguments is the pickle of the number alone. The callee answers with what the function returns."""

    function: Any  # a callable, or its number
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@payload(MessageType.PYTHON_RET, Layout.VALUE, of_program=True)
class PythonRet(Message):
    """The callee answers PYTHON_CALL: the function returned this value."""

    value: Any


@payload(MessageType.SCRIPT_CALL, Layout.FIELDS, answered_by=MessageType.SCRIPT_RET, of_program=True)
class ScriptCall(Message):
    """The caller has the callee run a function that torch compiled (`torch.<name>`), or one of TorchScript."""

    kind: str  # "operator" or "function"
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@payload(MessageType.SCRIPT_RET)
class ScriptRet(PythonRet):
    """The callee answers SCRIPT_CALL: the function returned this value."""


@payload(MessageType.EXCEPTION, Layout.FIELDS)
class Failure(Message):
    """The callee answers any request: it failed. The caller raises an exception of the original type, if it can be made."""

    worker: str  # on which it was raised
    summary: str  # its repr, which names the type
    traceback: str  # where it was raised, what caused it, and which workers it passed
    notes: tuple[str, ...]
    recipe: tuple[bytes, tuple[bytes, ...]] | None  # how to build it, packed; None if it cannot be packed


# References.


@payload(MessageType.PYTHON_REMOTE_CALL, answered_by=MessageType.REMOTE_RET)
class PythonRemoteCall(PythonCall):
    """The creator of a reference has the owner-to-be run a Python function, whose result becomes a value there.

    The preamble names the value and its first fork. The owner answers when the value is made, or the function failed."""


@payload(MessageType.SCRIPT_REMOTE_CALL, answered_by=MessageType.REMOTE_RET)
class ScriptRemoteCall(ScriptCall):
    """The creator of a reference has the owner-to-be run a function of torch, or of TorchScript, for a value there."""


@payload(MessageType.REMOTE_RET, Layout.NONE)
class RemoteRet(Message):
    """The owner answers its creator: the function has ended. If it failed, a fetch of the value says so."""


@payload(MessageType.PYTHON_RREF_FETCH_CALL, Layout.BINARY, answered_by=MessageType.PYTHON_RREF_FETCH_RET)
class PythonRRefFetchCall(Message):
    """A holder of a reference asks the owner for the value (`to_here`). The owner answers when the value is there."""

    order = "id of the value"
    rref: RRefId


@payload(MessageType.SCRIPT_RREF_FETCH_CALL, answered_by=MessageType.SCRIPT_RREF_FETCH_RET)
class ScriptRRefFetchCall(PythonRRefFetchCall):
    """A holder of a reference asks the owner for a value that SCRIPT_REMOTE_CALL made."""


@payload(MessageType.PYTHON_RREF_FETCH_RET)
class PythonRRefFetchRet(PythonRet):
    """The owner answers a fetch with the value."""


@payload(MessageType.SCRIPT_RREF_FETCH_RET)
class ScriptRRefFetchRet(PythonRet):
    """The owner answers a fetch with a value that SCRIPT_REMOTE_CALL made."""


@payload(MessageType.RREF_FORK_REQUEST, Layout.BINARY, answered_by=MessageType.RREF_ACK)
class RRefForkRequest(Message):
    """A worker that received a reference asks the owner to count its fork. The answer confirms the fork."""

    order = "id of the value, id of the fork"
    rref: RRefId
    fork: ForkId


@payload(MessageType.RREF_CHILD_ACCEPT, Layout.BINARY, answered_by=MessageType.RREF_ACK)
class RRefChildAccept(Message):
    """A worker that received a reference tells its sender that the owner counts the fork now. The sender need not keep its
    own fork for the sake of this one any longer."""

    order = "id of the fork"
    fork: ForkId


@payload(MessageType.RREF_USER_DELETE, Layout.BINARY, answered_by=MessageType.RREF_ACK)
class RRefUserDelete(Message):
    """A holder tells the owner that forks are gone. When no fork of a value is left, the owner frees it.

    `never_made`: the creator could not send the call that was to make the value, or the owner could not read it. The value
    will never be made, unless it was; then that is no news, and the fork that is named (the value's own number) is none."""

    order = "u8 never_made, then ids"
    never_made: bool
    ids: tuple[GloballyUniqueId, ...]  # of a value, of a fork of it, and so on in turn


@payload(MessageType.RREF_ACK, Layout.NONE)
class RRefAck(Message):
    """The answer to RREF_FORK_REQUEST, RREF_CHILD_ACCEPT and RREF_USER_DELETE: it was taken note of."""


# Distributed autograd.


@dataclass(frozen=True, slots=True)
class PassFailure:
    """A part of other payloads: an error of one worker, which ends a backward pass everywhere."""

    worker: int
    name: str
    failure: bytes  # the body of a `Failure`

    def __reduce__(self) -> "tuple[type[PassFailure], tuple[int, str, bytes]]":
        return PassFailure, (self.worker, self.name, self.failure)


@payload(MessageType.BACKWARD_PART_REQ, Layout.FIELDS, answered_by=MessageType.BACKWARD_PART_RESP)
class BackwardPartReq(Message):
    """A worker tells the sender of tensors which of them take part in a backward pass (SMART, first round).

    The receiver tells the senders of its own tensors in turn. It answers when all of those have answered."""

    key: PassId
    part: Part


@payload(MessageType.BACKWARD_PART_RESP, Layout.FIELDS_OR_NONE)
class BackwardPartResp(Message):
    """Every worker that was to be found has been found, or how that failed."""

    failure: PassFailure | None = None
    owed: Owed = field(default_factory=dict)


@payload(
    MessageType.BACKWARD_AUTOGRAD_REQ, Layout.FIELDS, answered_by=MessageType.BACKWARD_AUTOGRAD_RESP, of_program=True
)
class BackwardAutogradReq(Message):
    """A worker sends gradients to the sender of the tensors that they belong to (second round of a pass).

    The receiver runs its part of the graph with them and answers when everything that it set going is done. `part` is there
    if the pass goes to one worker and cannot come back: both rounds are one message then."""

    key: PassId
    part: Part | None
    gradients: dict[int, Any]  # by message that was sent: the gradients of its tensors


@payload(MessageType.BACKWARD_AUTOGRAD_RESP)
class BackwardAutogradResp(BackwardPartResp):
    """The work that the gradients caused is done, or it failed. FAST: `owed` says which gradients workers still wait for."""


@payload(MessageType.BACKWARD_END_REQ, Layout.FIELDS, answered_by=MessageType.BACKWARD_END_RESP)
class BackwardEndReq(Message):
    """A worker tells those that it gave a part in a backward pass that the pass failed. They stop, and pass it on."""

    key: PassId
    failure: PassFailure


@payload(MessageType.BACKWARD_END_RESP, Layout.NONE)
class BackwardEndResp(Message):
    """The worker that answers, and those that it has told, do not work on that pass any more."""


@payload(MessageType.RREF_BACKWARD_REQ, Layout.FIELDS, answered_by=MessageType.RREF_BACKWARD_RESP)
class RRefBackwardReq(Message):
    """A holder of a reference has the owner begin a backward pass at the value (`rref.backward`)."""

    rref: RRefId
    context_id: int
    retain_graph: bool


@payload(MessageType.RREF_BACKWARD_RESP, Layout.NONE)
class RRefBackwardResp(Message):
    """The pass that RREF_BACKWARD_REQ asked for is over."""


@payload(MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ, Layout.VALUE)
class CleanupAutogradContextReq(Message):
    """A worker that released an autograd context tells those that have a part of it. They release theirs, and do not
    answer."""

    context_id: int


@payload(MessageType.AUTOGRAD_CONTEXT_HELD_REQ, Layout.VALUE, answered_by=MessageType.AUTOGRAD_CONTEXT_HELD_RESP)
class AutogradContextHeldReq(Message):
    """A worker has a part of a context, and the worker from which it had it died: it asks the creator whether the context is
    still there, and releases its part if not."""

    context_id: int


@payload(MessageType.AUTOGRAD_CONTEXT_HELD_RESP, Layout.VALUE)
class AutogradContextHeldResp(Message):
    """The creator of a context answers whether it is still there."""

    held: bool


# Membership.


@payload(MessageType.GREETING, Layout.NONE, answered_by=MessageType.MEMBERSHIP_ACK)
class Greeting(Message):
    """A worker of a static group tells the next one in the ring of ids that it can talk to it. `init_rpc` returns when it
    has the answer, and has answered the worker before it."""


@payload(MessageType.JOINED, Layout.VALUE, answered_by=MessageType.MEMBERSHIP_ACK)
class Joined(Message):
    """A worker that joins a dynamic group tells every member that it is there. `init_rpc` returns when they answered."""

    record: bytes  # the sender's, as `WorkerRecord.to_json` writes it


@payload(MessageType.LEAVING, Layout.NONE, answered_by=MessageType.MEMBERSHIP_ACK)
class Leaving(Message):
    """A worker that is about to leave a dynamic group tells every member. The member answers, and removes it."""


@payload(MessageType.LOST, Layout.FIELDS, answered_by=MessageType.MEMBERSHIP_ACK)
class Lost(Message):
    """A worker whose neighbour died, or is silent, tells all others. Each sees for itself: the word of another worker is not
    enough."""

    worker: WorkerKey
    silent_for: float  # seconds in which nothing came from its host


@payload(MessageType.CONFIRM_DEATH, Layout.VALUE, answered_by=MessageType.MEMBERSHIP_ACK)
class ConfirmDeath(Message):
    """The owner of values lost a worker that died, and asks each other one to confirm the loss.

    The receiver gives the lost worker up, deals with all that came from it, says LOSS_CONFIRMED, and answers."""

    worker: WorkerKey


@payload(MessageType.CONFIRM_LEAVE)
class ConfirmLeave(ConfirmDeath):
    """The owner of values lost a worker that left of its own will, and asks each other one to confirm the loss.

    If that worker still talks to the receiver, its goodbye is awaited: its last answers come before that."""


@payload(MessageType.LOSS_CONFIRMED, Layout.VALUE, answered_by=MessageType.MEMBERSHIP_ACK)
class LossConfirmed(Message):
    """A worker tells the owner that asked: I have lost that worker, too, and everything that I had to say because of what
    came from it was sent before this. When all have said so, the owner drops the forks that the lost worker held."""

    worker: WorkerKey


@payload(MessageType.MEMBERSHIP_ACK, Layout.NONE)
class MembershipAck(Message):
    """The answer to all messages about membership: the receiver has acted on it."""


# Words. The field `call` of the header says which call, or which number, they are about.


@payload(MessageType.CANCEL, Layout.EMPTY)
class Cancel(Message):
    """The caller tells the callee that it does not wait for the call any more. A function that has not begun never will; a
    coroutine is cancelled."""


@payload(MessageType.PROGRESS, Layout.BINARY)
class Progress(Message):
    """The callee tells the caller of a call whose deadline is less than a second away, twice a second: whether the function
    has begun. The error of a timeout says so."""

    order = "u8 0x31 if it has begun, else nothing"
    begun: bool


@payload(MessageType.FUNCTION, Layout.BINARY)
class Function(Message):
    """The caller gives a function a number, before the first call that says the number in its place. The header's `call` is
    the number."""

    order = "module, newline, name, in UTF-8"
    module: str
    name: str


@payload(MessageType.GIVE_BACK, Layout.BINARY)
class GiveBack(Message):
    """A worker tells another which segments of its shared memory it does not use any more. Numbers with special bits set say
    other things of shared and of device memory (`transport/shm/lender.py`, `agent/memory/device.py`)."""

    order = "a u64 for each number"
    numbers: tuple[int, ...]


@payload(MessageType.GOODBYE, Layout.EMPTY)
class Goodbye(Message):
    """A worker leaves of its own will: its silence is no failure. It says so behind its last answers, and the receiver hangs
    up when it has those."""


@payload(MessageType.VOID, Layout.EMPTY)
class Void(Message):
    """It stands for a message that could not be repeated after a reconnect, and has its number. If that was a reply, the
    caller's call fails: the outcome is unknown."""


@payload(MessageType.ACK, Layout.EMPTY, numbered=False)
class Ack(Message):
    """An end of a session has much to acknowledge and nothing else to send: the acknowledgement is in the header."""


@payload(MessageType.PING, Layout.EMPTY, numbered=False)
class Ping(Message):
    """An end of a session that has heard nothing for a heartbeat asks for a sign of life. The other end sends PONG."""


@payload(MessageType.PONG, Layout.EMPTY, numbered=False)
class Pong(Message):
    """A sign of life: what PING asks for."""


MESSAGES: dict[MessageType, type[Message]] = {
    each.type: each
    for each in list(vars().values())
    if isinstance(each, type) and issubclass(each, Message) and each is not Message
}
