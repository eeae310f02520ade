"""One end of the conversation between two workers: numbers, acknowledgements, what to say again. No I/O, no clock.

A session outlives the connections that carry it. Each end numbers the messages it sends from 1, keeps each until the
other end has said that it arrived, and after a reconnect says again what was kept and did not arrive:

    S1  a message is delivered at most once           `is_repeated` knows the numbers that were delivered
    S2  messages are delivered in the order sent      `is_repeated` allows no gap
    S3  nothing is forgotten before it arrived        `acknowledged` drops up to the number told, `resume` returns the rest
    S4  what is kept is bounded                       beyond `limit`, the sender waits; the receiver tells early: `owes`

An acknowledgement rides in the header of any message that goes the other way; `owes` says when it must travel alone.
Sending and receiving may run on two threads. Each field is written by one of them, except that `acknowledged` (receiving)
removes from the left of `kept` while `keep` (sending) adds to its right: each is one operation on a deque, which is atomic.
Other parts read the fields, and change them by these methods only.

An exception from a signal handler may strike a thread in the midst of a step. So each step has one point, a single
operation, before which nothing has happened and after which any thread can do the rest: a message is sent when it is in
`kept` (`recover` derives the counts), and one has arrived when `received` says so.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from remora.errors import ProtocolError

M = TypeVar("M")

OWED_MESSAGES = 256
OWED_BYTES = 8 << 20  # less goes with the next message that is sent anyway, a reply most often


class Session(Generic[M]):
    """Counts what is sent and received. `M` is what the transport needs to say a message again."""

    __slots__ = ("acked", "acked_bytes", "kept", "kept_total", "limit", "owed_bytes", "received", "sent", "told")

    def __init__(self, limit: int = 64 << 20) -> None:
        self.limit = limit  # of `kept_bytes`: beyond, the peer is slow, or away
        # (number, bytes ever kept with it, message): sent, not known to have arrived.
        self.kept: deque[tuple[int, int, M]] = deque()
        # Written by the thread that sends.
        self.sent = 0  # the number of the last message sent
        self.kept_total = 0  # bytes ever kept
        self.told = 0  # the last message of the peer that we acknowledged
        # Written by the thread that receives.
        self.acked = 0  # the last of ours that the peer says arrived
        self.acked_bytes = 0  # bytes ever acknowledged; `kept_total` less these is what is kept now
        self.received = 0  # the last message of the peer that arrived
        # Bytes received since `told`. Written by both threads: an acknowledgement comes a little early or late for that.
        self.owed_bytes = 0

    # Sending.

    def keep(self, number: int, ack: int, size: int, message: M) -> None:
        """Send a message: it has the next number, says that `ack` messages arrived, and is remembered until it is
        acknowledged."""
        total = self.kept_total + size
        self.kept.append((number, total, message))  # from here on it is sent: see `recover`
        self.sent = number
        self.kept_total = total
        self.told = ack
        self.owed_bytes = 0

    def recover(self) -> bool:
        """Put the counts right after an exception struck a sender. Return True if that was in the midst of `keep`: the
        message is sent."""
        kept = self.kept
        if not kept or kept[-1][0] <= self.sent:
            return False
        self.sent, self.kept_total, _ = kept[-1]
        return True

    def amend(self, number: int, message: M) -> None:
        """Keep another message in the place of the last one, which could not be sent whole."""
        if self.kept and self.kept[-1][0] == number:
            self.kept[-1] = (number, self.kept[-1][1], message)

    @property
    def kept_bytes(self) -> int:
        """Return the number of bytes that the peer has not acknowledged."""
        return self.kept_total - self.acked_bytes

    def resume(self, arrived: int) -> list[tuple[int, M]]:
        """Return what must be said again, in order, to a peer that is back and has everything up to `arrived`.

        It may have more by now: an acknowledgement on the old link can overtake what it said on the new one.
        """
        if arrived > self.sent:
            raise ProtocolError(f"peer claims to have {arrived} messages of a session with {self.sent}")
        self.acknowledged(arrived)
        return [(number, message) for number, _, message in self.kept]

    # Receiving.

    def is_repeated(self, number: int) -> bool:
        """Return True if message `number` was delivered before. ProtocolError if it is not the next one either."""
        if number <= self.received:
            return True
        if number != self.received + 1:
            raise ProtocolError(f"message {number} arrived after {self.received}: one is missing")
        return False

    def accept(self, number: int, size: int) -> bool:
        """Count message `number` as delivered. It is the next one (`is_repeated`). Return True if an acknowledgement is due
        by itself now, as `owes` does."""
        self.received = number
        self.owed_bytes = owed = self.owed_bytes + size
        return owed >= OWED_BYTES or number - self.told >= OWED_MESSAGES

    def expect(self, upto: int) -> None:
        """Check that everything up to `upto`, which the peer says it has sent, is here. ProtocolError if some of it was lost
        on the way."""
        if upto > self.received:
            raise ProtocolError(f"message {upto} was sent, but only {self.received} arrived: some are missing")

    def acknowledged(self, upto: int) -> None:
        """Drop what the peer has: everything up to `upto`. To do it again does no harm."""
        if upto < self.acked:
            return
        if upto > self.sent:
            raise ProtocolError(f"peer acknowledges message {upto}, but only {self.sent} were sent")
        self.acked = upto
        kept = self.kept
        while kept and kept[0][0] <= upto:
            self.acked_bytes = kept[0][1]
            kept.popleft()

    @property
    def owes(self) -> bool:
        """Return True if an acknowledgement is due by itself, because nothing else carried it for long."""
        return self.received - self.told >= OWED_MESSAGES or self.owed_bytes >= OWED_BYTES

    def telling(self) -> int:
        """Return the acknowledgement for the header of what has no number."""
        self.told = self.received
        self.owed_bytes = 0
        return self.received

    def end(self) -> None:
        """Drop what is kept: the peer will not hear it."""
        self.kept.clear()

    def check(self) -> None:
        """Assert what must hold between any two steps."""
        numbers = [number for number, _, _ in self.kept]
        assert numbers == list(range(self.acked + 1, self.sent + 1)), (numbers, self.acked, self.sent)
        assert self.told <= self.received
        totals = [total for _, total, _ in self.kept]
        assert totals == sorted(totals)
        assert self.kept_total == (totals[-1] if totals else self.acked_bytes)

    def __repr__(self) -> str:
        return f"<Session sent={self.sent} acked={self.acked} received={self.received} kept={self.kept_bytes}B>"
