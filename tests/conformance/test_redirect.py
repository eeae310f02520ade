"""After the redirection, whoever asks torch for RPC gets Remora's, and nobody gets torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

CHECKS = """
from tests.conformance import redirect
import torch.distributed.rpc
stock = torch.distributed.rpc
redirect.install()

import importlib
import remora.autograd, remora.rpc
import torch.distributed.autograd as autograd
import torch.distributed.rpc.api as api
from torch.distributed.rpc import RRef, init_rpc
from torch.distributed.rpc.backend_registry import BackendType

assert torch.distributed.rpc is remora.rpc is not stock
assert autograd is torch.distributed.autograd is remora.autograd
assert api is remora.rpc.api
assert (RRef, init_rpc, BackendType) == (remora.rpc.RRef, remora.rpc.init_rpc, remora.rpc.BackendType)
assert torch._jit_internal.RRef is torch.jit.annotations.RRef is remora.rpc.RRef
assert torch.nn.parallel.distributed.RRef is remora.rpc.RRef

for name in ("torch.distributed.rpc.rref_proxy", "torch.distributed.rpc._utils"):  # torch has them, Remora does not
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} can be imported")

try:
    torch._C._distributed_rpc.TensorPipeAgent(None, "worker0", 0, 1, None, {}, [])
except AssertionError as error:
    assert "torch's own RPC agent" in str(error), error
else:
    raise AssertionError("torch's own agent was started")
"""


def test_the_names_of_torch_are_those_of_remora(tmp_path: Path) -> None:
    checks = tmp_path / "checks.py"
    checks.write_text(CHECKS)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(checks)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
