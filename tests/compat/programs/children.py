"""Makes child processes in every way there is, and prints, for each, whose RPC it finds. Says nothing of Remora itself."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path


def whose(_rank: int, folder: str, way: str) -> None:
    import torch.distributed.rpc

    Path(folder, way).write_text(torch.distributed.rpc.init_rpc.__module__)


def by_multiprocessing(way: str, folder: str) -> multiprocessing.process.BaseProcess:
    child = multiprocessing.get_context(way).Process(target=whose, args=(0, folder, way))
    child.start()
    return child


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import children; "
        plain = subprocess.Popen([sys.executable, "-c", f"{code}children.whose(0, {folder!r}, 'subprocess')"])
        started = [by_multiprocessing(way, folder) for way in ("spawn", "forkserver")]
        import torch.multiprocessing

        started.append(by_multiprocessing("fork", folder))
        torch.multiprocessing.spawn(whose, args=(folder, "torch.multiprocessing"), nprocs=1)
        for child in started:
            child.join()
        plain.wait()
        print(json.dumps({path.name: path.read_text() for path in Path(folder).iterdir()}))


if __name__ == "__main__":
    main()
