"""A process beside the test, with device memory of its own, that does what it is told line by line."""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

import torch

from remora.transport import cuda_ipc

CYCLES = 1_800_000_000  # a second of torch.cuda._sleep, about
DEVICE = torch.device("cuda", 0)


def busy(seconds: float) -> None:
    """Keep the current stream busy."""
    if seconds:
        torch.cuda._sleep(int(seconds * CYCLES))


class Neighbour:
    """The process, seen from the test. `with Neighbour() as other: other.ask("held")`"""

    def __init__(self, **environment: str) -> None:
        command = [sys.executable, "-m", "tests.gpu.neighbour"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | environment)

    def __enter__(self) -> Neighbour:
        return self

    def ask(self, *words: object) -> str:
        """Its answer."""
        self.tell(*words)
        return self.answer()

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert not line.startswith("failed"), line
        assert line, "it is gone"
        return line

    def export(self, size: int, value: int, seconds: float = 0.0) -> bytes:
        """Memory that will have been filled with the value in so many seconds."""
        return bytes.fromhex(self.ask("export", size, value, seconds))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.stdout.close()


class Life:
    """What it does."""

    def __init__(self) -> None:
        self.exporter = cuda_ipc.Exporter()
        self.importer = cuda_ipc.Importer()
        self.fetched = torch.empty(0)

    def export(self, size: str, value: str, seconds: str) -> str:
        tensor = torch.zeros(int(size), dtype=torch.uint8, device=DEVICE)
        busy(float(seconds))
        tensor.fill_(int(value))
        reference = self.exporter.export([(tensor.untyped_storage(), 0, int(size))])
        return "refused" if reference is None else reference.hex()

    def fetch(self, reference: str) -> str:
        (storage,) = self.importer.fetch(bytes.fromhex(reference), DEVICE)
        self.fetched = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage)
        return "fetched"

    def value(self) -> str:
        return f"{int(self.fetched.min())} {int(self.fetched.max())}"

    def busy(self, seconds: str) -> str:
        busy(float(seconds))
        return "busy"

    def held(self) -> str:
        self.exporter.collect()
        return str(self.exporter.outstanding[0])

    def free(self) -> str:
        torch.cuda.empty_cache()
        return str(torch.cuda.memory_reserved())

    def available(self) -> str:
        return cuda_ipc.available(DEVICE) or "yes"


def main() -> None:
    life = Life()
    for line in sys.stdin:
        word, *rest = line.split()
        try:
            print(getattr(life, word)(*rest), flush=True)
        except Exception as error:
            print(f"failed: {error!r}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
