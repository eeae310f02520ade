"""After install(), whoever asks torch for RPC gets Remora's, whatever was imported before; after uninstall(), torch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.fresh import TIMEOUT, run

pytestmark = pytest.mark.timeout(TIMEOUT + 30)

BEFORE = """
import torch, torch.distributed.rpc, torch.distributed.autograd as autograd
import torch.distributed.optim, torch.distributed.nn
import torch.distributed.rpc as rpc
import torch.distributed.rpc.api as api
from torch._C._distributed_rpc import PyRRef, _is_current_rpc_agent_set
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import BackendType, RRef, WorkerInfo, rpc_sync
import sys, os
names = "rpc api autograd PyRRef RRef BackendType WorkerInfo rpc_sync RemoteModule DistributedOptimizer".split()
names.append("_is_current_rpc_agent_set")
stock = {name: globals()[name] for name in names}
modules = {name: module for name, module in sys.modules.items() if name.startswith(("torch.distributed.", "_remote_mod"))}
finders, environment = list(sys.meta_path), dict(os.environ)
compiled = dict(vars(torch._C._distributed_rpc))

import remora.compat
remora.compat.install()
remora.compat.install()  # does nothing
"""

IS_OURS = """
import importlib
import remora.autograd, remora.nn, remora.optim, remora.rpc
assert rpc is torch.distributed.rpc is remora.rpc and api is remora.rpc.api
assert autograd is torch.distributed.autograd is remora.autograd
assert RRef is PyRRef is torch._C._distributed_rpc.PyRRef is remora.rpc.RRef
assert torch._jit_internal.RRef is torch.jit.annotations.RRef is torch.nn.parallel.distributed.RRef is remora.rpc.RRef
assert (BackendType, WorkerInfo, rpc_sync) == (remora.rpc.BackendType, remora.rpc.WorkerInfo, remora.rpc.rpc_sync)
assert _is_current_rpc_agent_set is remora.rpc._is_current_rpc_agent_set
assert RemoteModule is torch.distributed.nn.RemoteModule is remora.nn.RemoteModule
assert DistributedOptimizer is torch.distributed.optim.DistributedOptimizer is remora.optim.DistributedOptimizer
for name in ("backend_registry", "constants", "functions", "internal", "options", "rref_proxy", "_testing",
             "server_process_global_profiler", "_testing.faulty_agent_backend_registry"):
    assert importlib.import_module(f"torch.distributed.rpc.{name}") is importlib.import_module(f"remora.rpc.{name}"), name
assert remora.rpc.api.__spec__.name == remora.rpc.api.__name__ == "remora.rpc.api"  # an alias leaves no trace
import torch.distributed.nn.api.remote_module as remote_module
assert remote_module is remora.nn.api.remote_module
"""

ABSENT = """
try:
    importlib.import_module("torch.distributed.rpc._utils")  # torch has it, Remora does not
except ModuleNotFoundError as error:
    assert "Remora" in str(error) and error.name == "torch.distributed.rpc._utils", error
else:
    raise AssertionError("found")
try:
    torch._C._distributed_rpc._invoke_rpc_builtin()  # would reach torch's own agent
except NotImplementedError as error:
    assert "torch's own RPC" in str(error), error
else:
    raise AssertionError("torch's own agent was reached")
"""

AND_BACK = """
remora.compat.uninstall()
assert not remora.compat.installed()
for name in names:
    assert globals()[name] is stock[name], name
now = {name: module for name, module in sys.modules.items() if name.startswith(("torch.distributed.", "_remote_mod"))}
assert all(now[name] is module for name, module in modules.items())
assert not [name for name, module in now.items() if module.__name__.startswith("remora")]
assert vars(torch._C._distributed_rpc) == compiled
assert sys.meta_path == finders and dict(os.environ) == environment
assert torch.distributed.rpc is stock["rpc"] and torch._jit_internal.RRef is stock["RRef"]
"""


def test_what_was_imported_before_is_ours_and_can_be_put_back(tmp_path: Path) -> None:
    run(BEFORE + IS_OURS + ABSENT + AND_BACK, tmp_path)


def test_what_is_imported_afterwards_is_ours_and_can_be_put_back(tmp_path: Path) -> None:
    """torch.distributed.optim and .nn take a while to import: the redirection does not, and waits for them instead."""
    run(
        """
import sys
import remora.compat
remora.compat.install()
assert "torch.distributed.optim" not in sys.modules and "torch.distributed.nn" not in sys.modules
import remora.nn, remora.optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer, ZeroRedundancyOptimizer
assert RemoteModule is remora.nn.RemoteModule and DistributedOptimizer is remora.optim.DistributedOptimizer
remora.compat.uninstall()
import torch.distributed.optim, torch.distributed.nn
assert torch.distributed.optim.DistributedOptimizer.__module__.startswith("torch.")
assert torch.distributed.nn.RemoteModule.__module__.startswith("torch.")
assert torch.distributed.optim.optimizer.__name__ == "torch.distributed.optim.optimizer"
""",
        tmp_path,
    )


REFUSED = """
import os, sys, tempfile
import remora.compat, remora.rpc, torch.distributed.rpc
folder = tempfile.mkdtemp()

def refused(what, rpc):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/{rpc.__name__}{what.__name__}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        what()
    except RuntimeError as error:
        assert "was initialized" in str(error) and "shutdown()" in str(error), error
    else:
        raise AssertionError("not refused")
    finally:
        rpc.shutdown()

stock = torch.distributed.rpc
refused(remora.compat.install, stock)
refused(remora.compat.install, remora.rpc)
assert torch.distributed.rpc is stock and not remora.compat.installed()  # nothing half done
remora.compat.install()
refused(remora.compat.uninstall, torch.distributed.rpc)
assert torch.distributed.rpc is remora.rpc
"""


def test_not_while_rpc_runs(tmp_path: Path) -> None:
    run(REFUSED, tmp_path)


WITHOUT_RPC = """
import sys
from importlib.abc import MetaPathFinder

class Hide(MetaPathFinder):
    '''Takes RPC out of torch before torch looks for it: what a torch built without it is like.'''
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.rpc":
            sys.meta_path.remove(self)
            for sign in ("_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                delattr(sys.modules["torch._C"], sign)
        return None

sys.meta_path.insert(0, Hide())
import torch
assert not torch.distributed.rpc.is_available() and not torch.distributed.autograd.is_available()
assert "torch._C._distributed_rpc" not in sys.modules and not hasattr(torch.distributed.rpc, "init_rpc")

import remora.compat
remora.compat.install()
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import PyRRef, WorkerInfo, _is_current_rpc_agent_set
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
import torch.distributed.autograd as autograd
assert rpc.is_available() and PyRRef is rpc.RRef and not _is_current_rpc_agent_set()

@torch.jit.script
def script(x: torch.Tensor, n: int = 1) -> torch.Tensor:  # its annotations are looked at with RPC in mind
    return x + n

rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
    init_method=f"file://{sys.argv[0]}.rendezvous"))
assert rpc.rpc_sync("alone", torch.add, (torch.ones(1), 1)).item() == 2
assert rpc.rpc_sync("alone", script, (torch.ones(1),)).item() == 2
with autograd.context() as context:
    x = torch.ones(2, requires_grad=True)
    autograd.backward(context, [rpc.rpc_sync("alone", torch.mul, (x, 3.0)).sum()])
    assert autograd.get_gradients(context)[x].tolist() == [3.0, 3.0]
assert RemoteModule("alone", torch.nn.Linear, (2, 2)).forward(torch.ones(1, 3)[:, :2]).shape == (1, 2)
rpc.shutdown()
remora.compat.uninstall()
assert not hasattr(torch._C, "_rpc_init") and not torch.distributed.rpc.is_available()
assert "torch._C._distributed_rpc" not in sys.modules
"""


def test_a_torch_that_was_built_without_rpc(tmp_path: Path) -> None:
    run(WITHOUT_RPC, tmp_path)
