"""What tests of the rendezvous share: a disk that is full, and what native code sets up once per process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests import leaks


@pytest.fixture(scope="session", autouse=True)
def native_code_is_warm() -> None:
    """The first TCPStore of a process opens descriptors that stay: they are libuv's, and no leak of a test."""
    with leaks.kept():
        TCPStore("127.0.0.1", 0, None, True)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system that has inodes left and not a byte."""
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k,nr_inodes=32", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode or not os.path.ismount(place):
        pytest.skip("cannot mount a small file system here")
    try:
        fill(place)
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> None:
    with open(place / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
