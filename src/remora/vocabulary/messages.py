"""The types of message two workers exchange. The codes are PyTorch's where it has the message; ours start at 0x40.

A request has 0x100 set and is answered by one message with 0x200 set. What has neither is a word between the two ends
of a session and is not answered. Frames carry the type in clear, so that faults can be chosen by type.
"""

from __future__ import annotations

from enum import IntEnum

REQUEST = 0x100
RESPONSE = 0x200


class MessageType(IntEnum):
    """Every message, by the name PyTorch gives it."""

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
    MEMBERSHIP = 0x140  # who joined or left
    MEMBERSHIP_ACK = 0x241
    AUTOGRAD_CONTEXT_HELD_REQ = 0x154  # I have a part of this context of yours: is it still there?
    AUTOGRAD_CONTEXT_HELD_RESP = 0x255
    BACKWARD_PART_REQ = 0x150  # these of your messages take part in a backward pass
    BACKWARD_PART_RESP = 0x251
    BACKWARD_END_REQ = 0x152  # a backward pass failed: forget it
    BACKWARD_END_RESP = 0x253
    CANCEL = 0x40  # caller to callee: nobody waits for this call any more
    ACK = 0x41  # "I have everything up to here"; sent when no other frame carries the news
    PING = 0x42
    PONG = 0x43
    GOODBYE = 0x44  # this worker leaves of its own will; its silence is no failure
    GIVE_BACK = 0x46  # these segments of shared memory are not used any more; none: they cannot be used at all
    FUNCTION = 0x47  # calls of the function of this name will say this number in its place
    PROGRESS = 0x48  # callee to caller, as its deadline comes near: whether the function of this call has begun
    VOID = 0x45  # stands for a message that could not be repeated after a reconnect
