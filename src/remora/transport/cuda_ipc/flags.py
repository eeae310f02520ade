"""A page of flags that two processes and their devices share: which memory is ready, which has been copied. No tensors.

Streams of either process write a word when they get there, and wait for one. So do the processes, at once: that is how a
process that outlives the other releases streams that wait for it. The page has no name, and is gone with its last user.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from enum import IntEnum

import torch

from remora.transport.cuda_ipc.driver import Driver
from remora.transport.cuda_ipc.reference import SLOTS
from remora.transport.shm.sealed_memory import open_sealed, seal

EVERY = 1 << 32  # words count to here, and begin anew

_SIZE = 4096
_NUMBER = struct.Struct("<Q")  # at the beginning; by it a page is known to be the right one
_GUEST = struct.Struct("<I")  # then the process that has opened it
_WORDS_AT = 64


class Word(IntEnum):
    """The words of a slot count how often it was ready, was copied, and a stream of its owner went on after that."""

    READY = 0
    COPIED = 1
    PASSED = 2


_WORDS = len(Word)


class FlagPage:
    """The page. Devices can use it from `attach` on."""

    def __init__(self, page: mmap.mmap, made: tuple[int, int] | None = None) -> None:
        self._page = page
        self._made = made  # number and descriptor, if it was made here
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        self._words = (ctypes.c_uint32 * (_WORDS * SLOTS)).from_address(self._address + _WORDS_AT)
        self._attached: tuple[Driver, torch.device, int] | None = None

    @classmethod
    def create(cls) -> FlagPage:
        descriptor = os.memfd_create("remora-flags", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            seal(descriptor, _SIZE)
            os.posix_fallocate(descriptor, 0, _SIZE)  # or a write would end the process when memory is short
            page = mmap.mmap(descriptor, _SIZE)
        except BaseException:
            os.close(descriptor)
            raise
        number = int.from_bytes(os.urandom(_NUMBER.size), "little")
        _NUMBER.pack_into(page, 0, number)
        return cls(page, (number, descriptor))

    @property
    def name(self) -> tuple[int, int, int]:
        """Return number, process and descriptor, by which another process opens it."""
        assert self._made is not None, "only its maker can name it"
        number, descriptor = self._made
        return number, os.getpid(), descriptor

    @classmethod
    def open(cls, number: int, process: int, descriptor: int) -> FlagPage:
        """Open a page that another process has made. OSError or ValueError if that fails."""
        opened = open_sealed(process, descriptor, _SIZE)
        try:
            page = mmap.mmap(opened, _SIZE)
        finally:
            os.close(opened)
        if _NUMBER.unpack_from(page)[0] != number:
            page.close()
            raise OSError("it does not have the number that was named")
        _GUEST.pack_into(page, _NUMBER.size, os.getpid())
        return cls(page)

    @property
    def guest(self) -> int:
        """Return the process that has opened it; 0 if none has."""
        process: int = _GUEST.unpack_from(self._page, _NUMBER.size)[0]
        return process

    def attach(self, driver: Driver, device: torch.device) -> None:
        """Let devices use it. Called on a device; repeated calls do no harm."""
        if self._attached is None:
            self._attached = (driver, device, driver.register(self._address, _SIZE))

    def place(self, slot: int, word: Word) -> int:
        """Return the address of a word for devices."""
        assert self._attached is not None, "attached"
        return self._attached[2] + _WORDS_AT + 4 * (_WORDS * slot + word)

    def has_reached(self, slot: int, word: Word, value: int) -> bool:
        """Return True if the word has the value, or a later one."""
        return (self._words[_WORDS * slot + word] - value) % EVERY < EVERY // 2

    def mark(self, slot: int, word: Word, value: int) -> None:
        """Write a word now, in the place of a stream that will not."""
        if not self.has_reached(slot, word, value):
            self._words[_WORDS * slot + word] = value

    def close(self) -> None:
        """Unmap it. No stream of this process may be about to use it."""
        if self._attached is not None:
            driver, device, _ = self._attached
            with driver.on(device):
                driver.unregister(self._address)
        if self._made is not None:
            os.close(self._made[1])
        else:
            self._page.close()
