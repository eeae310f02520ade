"""Functions by number: a callee is told the name of a function once, and calls of it say no more than its number.

The name goes ahead of the first call, as a word of the same session (FUNCTION), which keeps the order and loses nothing. So
it is known when a call is run. The callee looks the name up for each call, as pickle would: what a program puts in the
place of a function counts from then on. A call without arguments is the number and nothing else: neither side has to
pickle it, because both know what that looks like.

Both sides keep a bounded number of names, of bounded length (`MOST`, `MOST_BYTES`, `LONGEST`). Beyond that, a caller sends
the function with each call as pickle does, and a callee keeps no more names.
"""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable
from struct import Struct
from types import FunctionType
from typing import Any

from remora.agent.channel.outbox import Outbox
from remora.errors import ProtocolError
from remora.options import FAST_PATHS
from remora.vocabulary.messages import MessageType
from remora.wire import code_by_value
from remora.wire.message_codec import read_name, write_name
from remora.wire.packed import Packed
from remora.wire.pickler import unpack

FUNCTION = int(MessageType.FUNCTION)
MOST = 1024  # a program with more functions than this makes them as it goes
LONGEST = 1024  # bytes of a name; a longer one is sent with each call
MOST_BYTES = 256 * 1024  # of all names
SLACK = 64  # threads that announce functions at the same time may pass MOST by one each
BARE_SIZE = 16  # bytes; a number has fewer

Target = Callable[..., Any] | int  # a function, or its number


class Announced:
    """The names that the callee of a channel was told."""

    __slots__ = ("_bytes", "_known", "_next", "_outbox", "bare")

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox  # carries the names
        self._bytes = 0  # of names, about: two threads may count at the same time
        self.bare: dict[int, Packed] = {}  # calls without arguments, by the number of the function
        self._next = itertools.count(1).__next__  # no two threads get the same
        self._known: dict[FunctionType, tuple[dict[str, Any], str, int]] = {}  # where it is, under which name, its number

    def target(self, function: Callable[..., Any], shares_main: bool = True) -> Target:
        """Return what a call says that is about to be sent: the number of a function, if it has one, or the
        function."""
        if type(function) is not FunctionType:
            return function
        known = self._known.get(function)
        if known is None:
            return self._announce(function, shares_main)
        namespace, name, number = known
        # since it was announced
        if code_by_value.registered and code_by_value.goes_by_value(function.__module__, shares_main):
            return function
        return number if namespace.get(name) is function else function

    def _announce(self, function: FunctionType, shares_main: bool) -> Target:
        module, name = function.__module__, function.__qualname__
        if not FAST_PATHS.function_numbers or code_by_value.goes_by_value(module, shares_main):
            return function
        namespace = vars(sys.modules[module]) if module in sys.modules else {}
        said = write_name(module, name)
        if len(said) > LONGEST or self._bytes + len(said) > MOST_BYTES:
            return function
        if namespace.get(name) is not function or len(self._known) >= MOST:
            return function
        self._bytes += len(said)
        number = self._next()
        self.bare[number] = Packed(_bare(number), [], [], [])
        self._outbox.enqueue(FUNCTION, number, said)
        self._known[function] = namespace, name, number  # last: who sees it sends behind the name
        return number


class Heard:
    """The names that the caller of a channel told."""

    __slots__ = ("_bytes", "_names", "bare")

    def __init__(self) -> None:
        self._bytes = 0  # of names
        self._names: dict[int, tuple[str, str]] = {}
        self.bare: dict[bytes, int] = {}  # calls without arguments, as they look, and of which function

    def listen(self, number: int, name: bytes) -> None:
        """The caller gave a function a number, which keeps its first meaning. No name is left out of a caller that keeps to
        the limits, as `Announced` does."""
        room = len(self._names) < MOST + SLACK and self._bytes + len(name) <= MOST_BYTES + SLACK * LONGEST
        if number in self._names or len(name) > LONGEST or not room:
            return
        self._bytes += len(name)
        self._names[number] = read_name(name)
        self.bare[_bare(number)] = number

    def find(self, number: int) -> Any:
        """Return the function that a call means."""
        try:
            module, name = self._names[number]
        except KeyError:
            raise ProtocolError(
                f"a call of function {number} came, and that number has no name here: the caller gave none, or more than "
                f"{MOST} names, or one of more than {LONGEST} bytes"
            ) from None
        try:
            return getattr(sys.modules[module], name)
        except (KeyError, AttributeError):
            return unpack(_global(module, name))  # what pickle does, and says if it cannot


def _global(module: str, name: str) -> bytes:
    """The pickle of what has that name. The texts go by their lengths: a newline in a damaged name does not end it, with the
    rest of it read as opcodes."""
    texts = module.encode(), name.encode()
    return pickle.PROTO + b"\5" + b"".join(pickle.BINUNICODE + _SIZE.pack(len(text)) + text for text in texts) + _FOUND


_SIZE, _FOUND = Struct("<I"), pickle.STACK_GLOBAL + pickle.STOP


def _bare(number: int) -> bytes:
    return pickle.dumps(number, 5)
