"""The reference in a message to shared memory: the arena, and the place of each buffer. How buffers share segments."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

from remora.transport.shm.mapping import PAGE

# Buffers smaller than this share a segment, which is no larger than that: what is kept of a message keeps little else.
ALONE, TOGETHER = 1 << 16, 1 << 17  # bytes
# What has just been given back is still in the cache of the borrower's core, and to write there takes three times as long
# as where it is not. So several segments of a size take turns, until that is as much as such a cache holds.
TURNS, IN_TURN = 4, 1 << 21  # segments, bytes
ALIGNED = 64  # bytes: where a buffer begins
HEAD = 64  # bytes at the beginning of a segment: for `LateFill`
# Number, process, descriptor and size of the arena; bytes lent; what `LateFill` counts (0: all is there); number of places.
REFERENCE = struct.Struct("<QIIQQII")
# Among the numbers of loans that are given back: the borrower has no descriptors or memory at present,
SHORT = 1 << 60
UNUSABLE = SHORT + 1  # or cannot use what we lend at all.
PLACE = struct.Struct("<QQQ")  # number of the loan, offset in the arena, bytes


@lru_cache(maxsize=1024)
def size_class(size: int) -> tuple[int, int]:
    """Return a size that messages of about the same size share, and how many segments of it take turns. The size is a number
    of whole pages, and at most an eighth more than is needed, or a page."""
    step = max(1 << max(size.bit_length() - 4, 0), PAGE)
    rounded = -(-size // step) * step
    return rounded, max(min(IN_TURN // rounded, TURNS), 1)


def bytes_in(message: bytes | bytearray | memoryview, at: int) -> int:
    """Return the number of bytes that a reference in a message of ours has lent."""
    found: int = REFERENCE.unpack_from(message, at)[4]
    return found


def places_in(reference: bytes | bytearray | memoryview) -> list[tuple[int, int, int]]:
    """Return the places of a message's buffers: number of the loan, offset, bytes."""
    size = len(reference)
    if size < REFERENCE.size or size != REFERENCE.size + REFERENCE.unpack_from(reference)[-1] * PLACE.size:
        raise ValueError("a reference to shared memory has not the length it should have")
    return list(PLACE.iter_unpack(reference[REFERENCE.size :]))


def loans_in(reference: bytes | bytearray | memoryview) -> list[int]:
    """Return the numbers of the loans of a message; none if the reference is not valid."""
    try:
        return list(dict.fromkeys(number for number, _, _ in places_in(reference)))
    except ValueError:
        return []


def shared_out(buffers: Sequence[memoryview]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the sizes of the segments that these need, and for each buffer the index of its segment and the offset in
    it."""
    if len(buffers) == 1:  # (most have one)
        return [HEAD + buffers[0].nbytes], [(0, HEAD)]
    sizes: list[int] = []
    places: list[tuple[int, int]] = []
    shared = -1  # the segment that small ones share
    for buffer in buffers:
        room = -(-buffer.nbytes // ALIGNED) * ALIGNED
        if room < ALONE and shared >= 0 and sizes[shared] + room <= TOGETHER:
            places.append((shared, sizes[shared]))
            sizes[shared] += room
            continue
        if room < ALONE:
            shared = len(sizes)
        places.append((len(sizes), HEAD))
        sizes.append(HEAD + room)
    return sizes, places
