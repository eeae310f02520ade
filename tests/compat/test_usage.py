"""What a program uses of torch's RPC is seen under whatever name it uses it."""

from __future__ import annotations

import pytest

from remora.compat import replacements
from remora.compat.usage import Use, uses

RPC = "torch.distributed.rpc"


def found(text: str) -> list[str]:
    return [use.name for use in uses(text)]


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed.rpc\ntorch.distributed.rpc.RRef",
        "import torch.distributed.rpc as r\nr.RRef",
        "import torch.distributed as dist\ndist.rpc.RRef",
        "import torch\ntorch.distributed.rpc.RRef",
        "from torch.distributed import rpc as other\nother.RRef",
        "import torch\nrpc = torch.distributed.rpc\nrpc.RRef",
        "from torch.distributed.rpc import RRef",
        "def later(): return r.RRef\nimport torch.distributed.rpc as r",
    ],
)
def test_every_way_to_say_it(text: str) -> None:
    assert f"{RPC}.RRef" in found(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.distributed.init_process_group",
        "from torch.distributed.optim import ZeroRedundancyOptimizer",
        "from torch.distributed.nn.functional import all_reduce",
        "from . import rpc\nrpc.RRef",
        "rpc.RRef",
        "import torch.distributed.rpcx",
    ],
)
def test_what_is_not_replaced_is_none_of_our_business(text: str) -> None:
    assert found(text) == []


def test_the_whole_name_once_and_with_its_line() -> None:
    assert uses(f"import {RPC} as rpc\nrpc.RRef.to_here\n") == [Use(RPC, 1, False), Use(f"{RPC}.RRef.to_here", 2, False)]


def test_everything_of_a_module() -> None:
    assert found(f"from {RPC} import *") == [RPC]


def test_torchscript_is_told_from_python() -> None:
    text = f"""
import torch
from {RPC} import RRef, rpc_sync, functions
@functions.async_execution
@torch.jit.script
def compiled(x: RRef[int]):
    return rpc_sync("a", compiled, (x,))
def plain():
    return rpc_sync("a", compiled, (1,))
"""
    scripted = {(use.name.rpartition(".")[2], use.line) for use in uses(text) if use.in_script}
    assert scripted == {("RRef", 6), ("rpc_sync", 7)}


def test_the_tables_agree() -> None:
    """Every module that is replaced has its counterpart; every class offered is in one of them."""
    for theirs in (*replacements.PACKAGES, *replacements.MODULES, *replacements.COMPILED):
        assert replacements.is_replaced(theirs)
        assert replacements.find(theirs) is not None
    for package, (name, module) in replacements.OFFERED.items():
        assert replacements.find(f"{package}.{name}") is replacements.find(f"{module}.{name}")
    with pytest.raises(LookupError):
        replacements.find(f"{RPC}.not_a_name")
    with pytest.raises(LookupError):
        replacements.find("torch.nn.Linear")
