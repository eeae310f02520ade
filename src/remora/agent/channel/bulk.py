"""The sending half of a channel for messages with tensors: in shared memory, from the program's own, or as they come.

A large message leaves from the memory of the program, and what comes from a device as soon as a piece of it is on the host.
So its sender waits for the turn (`Outbox.writing`), no longer than its call may, and holds it until the message is with the
kernel or copied aside. What is small, or could not leave now in any case, is copied and goes the way of all others.
"""

from __future__ import annotations

import threading

from remora.agent.calls.call import Call
from remora.agent.channel.outbox import STALL, Large, Outbox
from remora.agent.memory.shared import SHARED_FROM, Lent
from remora.errors import SerializationError
from remora.transport.link import Part, is_of_socket
from remora.vocabulary.messages import RESPONSE, MessageType
from remora.wire import raw_memory
from remora.wire.frames import MAX_BUFFERS, MAX_BYTES, SHARED, encode, lengths
from remora.wire.packed import Packed

VOID = int(MessageType.VOID)
LARGE = 1 << 17  # bytes from which on a message is not copied


def send_packed(
    outbox: Outbox, kind: int, call: Call | int, packed: Packed, flags: int, timeout: float, until: float
) -> None:
    """Send a message that may have buffers. A large one blocks while the peer takes it, until the given time at most;
    what the kernel has not taken by then is copied, so that the message is a value in any case. Raises CallNotSent if
    a call could not be sent by then, and SerializationError if its tensors cannot be had from their device, or not be
    copied."""
    number = call if isinstance(call, int) else call.id
    if outbox.closed:
        return
    if not packed.buffers:
        outbox.send(kind, number, packed.body, flags, timeout)
        return
    size = sum(map(len, packed.buffers))
    if size >= SHARED_FROM and outbox.shared_memory is not None:
        before = outbox.session.sent
        lent = outbox.shared_memory.lend(packed)
        if lent is not None:
            try:
                _send_shared(outbox, kind, number, lent, flags | SHARED, timeout)
            except BaseException:
                if not outbox.has_sent(number, before):
                    outbox.shared_memory.retract(lent)
                raise
            return
    if len(packed.buffers) > MAX_BUFFERS or size > MAX_BYTES:
        raise SerializationError(
            f"a message for {outbox.peer} has {len(packed.buffers)} buffers of {size} bytes in all. The limit is "
            f"{MAX_BUFFERS} buffers and {MAX_BYTES} bytes"
        )
    body = packed.body + lengths(packed.buffers)
    size += len(body)
    link = outbox.link
    if size < LARGE or link is None or link.outbox_bytes:  # small, or it has to wait, and its memory may change
        _postpone(outbox, kind, flags, number, timeout, body, packed)
    # A call waits for the turn as long as it may take, a reply a moment (it is copied then).
    elif outbox.writing.wait(STALL if kind & RESPONSE else max(min(until - link.now(), threading.TIMEOUT_MAX), 0.0)):
        try:
            _write_large(outbox, kind, flags, number, timeout, body, packed, until)
        finally:
            outbox.writing.free[0] = True
        outbox.writing.waiters.notify()
    elif kind & RESPONSE or isinstance(call, int) or outbox.writing.mine():
        _postpone(outbox, kind, flags, number, timeout, body, packed)
    else:
        raise outbox.not_sent(call)
    outbox.flush()


def _send_shared(outbox: Outbox, kind: int, call: int, lent: Lent, flags: int, timeout: float) -> None:
    """Send a message whose tensors are in shared memory, or will be there (`fill`) before its receiver looks."""
    try:
        outbox.send(kind, call, lent.body, flags, timeout)
    finally:
        if lent.fill is not None:
            lent.fill()  # (if an exception strikes before it has begun, the tick has it made)


def _postpone(outbox: Outbox, kind: int, flags: int, call: int, timeout: float, body: bytes, packed: Packed) -> None:
    """Copy a message and let the next writer write it."""
    try:
        packed.complete()
        data = b"".join((body, *packed.buffers))
    except MemoryError:
        size = sum(map(len, packed.buffers))
        why = f"this worker has no memory for a copy of the {size} bytes that go to {outbox.peer}: send less at a time"
        raise SerializationError(why) from None
    outbox.batched_bytes += len(data)
    outbox.batched.append((kind, flags, call, timeout, len(packed.buffers), len(body), data))


def _write_large(
    outbox: Outbox, kind: int, flags: int, call: int, timeout: float, body: bytes, packed: Packed, until: float
) -> None:
    """Write a message from the memory of the program. Holds `writing`."""
    while outbox.batched:
        outbox.write_batched()
    session = outbox.session
    number, ack = session.sent + 1, session.received
    head = encode(kind, flags, len(packed.buffers), call, number, ack, timeout, len(body), body)
    parts: tuple[Part, ...] = (head, *packed.buffers)
    size = sum(map(len, parts))
    large = Large(call, parts, packed, raw_memory.fingerprint(packed))
    link = outbox.link
    try:
        session.keep(number, ack, size, large)
        if packed.loading is None:
            outbox.put(parts, until)
        else:
            _put_as_it_comes(outbox, number, head, packed, until)
    except BaseException as error:
        session.recover()
        outbox.struck(link, error)


def _put_as_it_comes(outbox: Outbox, number: int, head: bytes, packed: Packed, until: float) -> None:
    """Write a message while its tensors come from a device. If the link fails, they are waited for all the same: the
    message is said again. If they do not come, it is as if it had not been said, and the link is of no use."""
    link = outbox.link
    try:
        for ready in packed.pieces(head):
            try:
                outbox.put(ready, until)
                if link is not None and link.outbox_bytes and not link.failed:
                    link.flush()  # what the kernel did not take at once: a device copies more meanwhile
            except OSError as error:
                if not is_of_socket(error):
                    raise
                outbox.break_off(link, error)
    except BaseException:
        outbox.session.amend(number, encode(VOID, 0, 0, 0, number, 0, 0.0, 0, b""))
        raise
