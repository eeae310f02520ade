"""Passes on what processes print: line by line, each with the name of its process before it.

A traceback that ends in KeyboardInterrupt becomes one line: after Ctrl-C every process prints one, which is no news.
One thread for each stream reads a pipe; it ends when the launcher and all processes have closed the other end.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Iterable, Iterator
from io import FileIO
from types import TracebackType
from typing import BinaryIO

TRACEBACK = b"Traceback (most recent call last):"
INTERRUPT = b"KeyboardInterrupt"
LAST_WORDS = 2.0  # seconds for what has been printed to be passed on
PAUSE = 0.2  # seconds that the rest of a line may take
_LINE_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?!$)")  # (behind a last carriage return, a line feed may follow)
_OURS, _PYTHONS = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__) + "/"
_LIBRARIES = (b"site-packages", b"<frozen", _OURS.encode(), _PYTHONS.encode())
_LAST_LINE = re.compile(rb"[\w.]+(:|\s*$)")  # of a traceback: the exception's type, and its text if it has one
_PLACE = re.compile(rb'  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?')


class Output:
    """The output of the processes of one name. `streams` are the descriptors to give them, for as long as this is open."""

    def __init__(self, prefix: str, out: BinaryIO, err: BinaryIO) -> None:
        self._readers: list[threading.Thread] = []
        self.streams = (self._open(prefix, out), self._open(prefix, err))

    def _open(self, prefix: str, target: BinaryIO) -> int:
        ours, theirs = os.pipe()
        reader = threading.Thread(target=_pass_on, args=(ours, prefix.encode(), target), daemon=True)
        reader.start()
        self._readers.append(reader)
        return theirs

    def close(self) -> None:
        """Close the descriptors, and pass on what was printed. No process may be started with them any more."""
        for descriptor in self.streams:
            os.close(descriptor)
        for reader in self._readers:
            reader.join(LAST_WORDS)

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
    moment (a prompt, for example) is passed on without; after the last piece the line is ended."""
    poll = select.poll()  # (`select.select` knows descriptors below 1024 only)
    poll.register(pipe, select.POLLIN)
    rest = b""
    unended = False  # what was passed on last has no end
    while True:
        if rest and not poll.poll(PAUSE * 1000):
            yield rest
            rest, unended = b"", not rest.endswith(b"\r")
        data = pipe.read(1 << 16)
        if not data:
            break
        *lines, rest = _LINE_ENDS.split((rest + data).replace(b"\r\n", b"\n"))
        unended = unended and not lines
        yield from lines
    if rest or unended:
        yield rest.rstrip(b"\r") + b"\n"


def folded(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines, but replace a traceback of KeyboardInterrupt by one line that names the place. Another thread may
    print a line in the midst of a traceback. That line is passed on at once, and the traceback goes on behind it."""
    held: list[bytes] = []
    for line in lines:
        if held and not line.strip():  # the end of a line that another thread has broken
            held.append(line)
        elif held and not line.startswith(b" ") and not _LAST_LINE.match(line):
            yield line
        elif held and not line.startswith(b" "):
            yield from [_fold(held, line)] if line.startswith(INTERRUPT) else [*held, line]
            held = []
        elif held or line.startswith(TRACEBACK):
            held.append(line)
        else:
            yield line
    yield from held


def _fold(traceback: list[bytes], last: bytes) -> bytes:
    places = [match for match in map(_PLACE.match, traceback) if match]
    if not places:
        return last
    place = places[0]  # where the program was; what it called there may be anything
    for each in places:
        if not any(part in each["file"] for part in _LIBRARIES):
            place = each
    return b"%s in %s (%s, line %s)\n" % (last.rstrip(), place["function"] or b"?", place["file"], place["line"])
