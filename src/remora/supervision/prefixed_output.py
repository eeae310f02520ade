"""Passes on what processes print: line by line, each with the name of its process before it.

A traceback that ends in KeyboardInterrupt becomes one line: after Ctrl-C every process prints one, and none says more.
One thread for each stream reads a pipe; it ends when the launcher and all processes have closed the other end.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from typing import BinaryIO

TRACEBACK = b"Traceback (most recent call last):"
IGNORED = b"Exception ignored in"  # the line before the traceback of what a destructor or an atexit function raised
LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")
INTERRUPT = b"KeyboardInterrupt"
LAST_WORDS = 2.0  # seconds for what has been printed to be passed on
PAUSE = 0.2  # seconds that the rest of a line may take
QUIET = 1.0  # seconds that the next traceback of a chain may take
_LINE_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?!$)")  # (behind a last carriage return, a line feed may follow)
_OURS, _PYTHONS = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__) + "/"
_LIBRARIES = (b"site-packages", b"<frozen", _OURS.encode(), _PYTHONS.encode())
_LAST_LINE = re.compile(rb"[\w.]+(:|\s*$)")  # of a traceback: the exception's type, and its text if it has one
_PLACE = re.compile(rb'  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?')


@contextmanager
def prefixed(prefix: str, out: BinaryIO, err: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield two descriptors, to which the processes of one name are to print. What was printed when the block ends is still
    passed on; no process may be started with the descriptors any more."""
    descriptors, readers = [], []
    for target in (out, err):
        ours, theirs = os.pipe()
        descriptors.append(theirs)
        readers.append(threading.Thread(target=_pass_on, args=(ours, prefix.encode(), target), daemon=True))
        readers[-1].start()
    try:
        yield descriptors[0], descriptors[1]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        for reader in readers:
            reader.join(LAST_WORDS)


def _pass_on(descriptor: int, prefix: bytes, target: BinaryIO) -> None:
    at_start = True
    with open(descriptor, "rb", buffering=0) as pipe:
        for line in folded(pieces(pipe)):
            text = prefix + line if at_start else line
            at_start = line.endswith((b"\n", b"\r"))
            try:
                target.write(text)  # in one go: other processes print there, too
                target.flush()
            except (OSError, ValueError):
                pass  # the terminal is gone: the processes must not block for that


def pieces(pipe: FileIO) -> Iterator[bytes]:
    """Yield lines, with their ends: a line feed, or the carriage return of a progress bar. Text that has no end after a
    moment (a prompt, for example) is passed on without; after the last piece the line is ended. Where nothing more comes
    for some time, an empty piece says so."""
    poll = select.poll()  # (`select.select` knows descriptors below 1024 only)
    poll.register(pipe, select.POLLIN)
    rest = b""
    unended = False  # what was passed on last has no end
    while True:
        if rest and not poll.poll(PAUSE * 1000):
            yield rest
            rest, unended = b"", not rest.endswith(b"\r")
        if not poll.poll(QUIET * 1000):
            yield b""
        data = pipe.read(1 << 16)
        if not data:
            break
        *lines, rest = _LINE_ENDS.split((rest + data).replace(b"\r\n", b"\n"))
        unended = unended and not lines
        yield from lines
    if rest or unended:
        yield rest.rstrip(b"\r") + b"\n"


def folded(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines, but replace a traceback of KeyboardInterrupt by one line that names the place."""
    tracebacks = _Tracebacks()
    for line in lines:
        yield from tracebacks.add(line)
    yield from tracebacks.release()


class _Tracebacks:
    """Holds a traceback until its last line tells whether it is of an interrupt.

    Where an interrupt strikes code that handles another exception, Python prints the traceback of that one first: a chain.
    Another thread may print a line in the midst of a traceback. That line is passed on at once.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._ended = False  # the last line of a traceback is here; the next one of a chain may follow

    def add(self, line: bytes) -> Iterator[bytes]:
        """Take the next line, and yield what can be passed on. An empty line says that the process is quiet."""
        if self._ended:
            yield from self._after_a_traceback(line)
        elif self._held:
            yield from self._within(line)
        elif line.startswith((TRACEBACK, IGNORED)):
            self._held.append(line)
        elif line:
            yield line

    def _within(self, line: bytes) -> Iterator[bytes]:
        if not line:
            if self._held[-1].startswith(IGNORED):  # no traceback follows
                yield from self.release()
        elif line.startswith((b" ", TRACEBACK)) or not line.strip():  # (or the end of a line that another thread has broken)
            self._held.append(line)
        elif not _LAST_LINE.match(line):
            yield line
        else:
            self._held.append(line)
            self._ended = True
            if line.startswith(INTERRUPT):
                yield from self.release()

    def _after_a_traceback(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(LINKS) or (line and not line.strip()):
            self._held.append(line)
            self._ended = not line.strip()
        else:
            yield from self.release()
            yield from self.add(line)

    def release(self) -> Iterator[bytes]:
        """Yield what is held, folded if it is of an interrupt."""
        held, self._held = self._held, []
        ended, self._ended = self._ended, False
        yield from _fold(held) if ended and held[-1].startswith(INTERRUPT) else held


def _fold(chain: list[bytes]) -> list[bytes]:
    """Return the one line for a chain that ends in an interrupt; all of it, if the program was handling another exception:
    that is news."""
    tracebacks: list[list[re.Match[bytes]]] = [[]]  # the places of each; where it was handled is the first
    for line in chain:
        if line.startswith(TRACEBACK):
            tracebacks.append([])
        elif place := _PLACE.match(line):
            tracebacks[-1].append(place)
    *handled, places = tracebacks
    if not all(_is_library(each[0]) for each in handled if each):
        return chain
    if not places:
        return chain[-1:]
    inside = [place for place in places if not _is_library(place)]
    place = inside[-1] if inside else places[0]  # where the program was; what it called there may be anything
    text = chain[-1].rstrip(b": \r\n")
    return [b"%s in %s (%s, line %s)\n" % (text, place["function"] or b"?", place["file"], place["line"])]


def _is_library(place: re.Match[bytes]) -> bool:
    return any(part in place["file"] for part in _LIBRARIES)
