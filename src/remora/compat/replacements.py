"""The table of torch's modules and the modules of ours that replace them, and lookups in it. Replaces nothing."""

from __future__ import annotations

import pkgutil

# With all that is below them.
PACKAGES = {
    "torch.distributed.rpc": "remora.rpc",
    "torch.distributed.autograd": "remora.autograd",
}

# In packages that hold other things, too. What the package itself offers of them: see OFFERED.
MODULES = {
    "torch.distributed.optim.optimizer": "remora.optim.optimizer",
    "torch.distributed.nn.api.remote_module": "remora.nn.api.remote_module",
}
OFFERED = {
    "torch.distributed.optim": ("DistributedOptimizer", "torch.distributed.optim.optimizer"),
    "torch.distributed.nn": ("RemoteModule", "torch.distributed.nn.api.remote_module"),
}

# Compiled modules, whose names programs use, too; and where ours are, the first that has it.
COMPILED = {
    "torch._C._distributed_rpc": ("remora.rpc", "remora.rpc.api", "remora.rpc.constants"),
    "torch._C._distributed_rpc_testing": ("remora.rpc._testing",),
    "torch._C._distributed_autograd": ("remora.autograd",),
}

# What torch._C has if torch was built with RPC, and torch's own modules look for; and the module it makes.
SIGNS_OF_RPC = {
    "_rpc_init": "torch._C._distributed_rpc",
    "_faulty_agent_init": "torch._C._distributed_rpc_testing",
    "_dist_autograd_init": "torch._C._distributed_autograd",
}


def counterpart(module: str) -> str | None:
    """Return the name of our module in the place of torch's (it may not exist); None if that module stays torch's."""
    for theirs, ours in PACKAGES.items():
        if module == theirs or module.startswith(f"{theirs}."):
            return ours + module[len(theirs) :]
    return MODULES.get(module)


def is_replaced(dotted: str) -> bool:
    """Return True if a dotted name of torch, of a module or of something in one, is ours after the redirection."""
    parts = dotted.split(".")
    prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    offered = {f"{package}.{name}" for package, (name, _) in OFFERED.items()}
    return any(counterpart(prefix) or prefix in COMPILED or prefix in offered for prefix in prefixes)


def find(dotted: str) -> object:
    """Return our object for a dotted name of torch that `is_replaced`. LookupError if there is none."""
    for candidate in _candidates(dotted):
        try:
            return pkgutil.resolve_name(candidate)
        except (ImportError, AttributeError):
            continue
    raise LookupError(dotted)


def _candidates(dotted: str) -> list[str]:
    for module, homes in COMPILED.items():
        if dotted == module:
            return [homes[0]]
        if dotted.startswith(f"{module}."):
            return [home + dotted[len(module) :] for home in homes]
    for package, (name, module) in OFFERED.items():
        if dotted == f"{package}.{name}" or dotted.startswith(f"{package}.{name}."):
            return [MODULES[module] + dotted[len(package) :]]
    for theirs, ours in (PACKAGES | MODULES).items():
        if dotted == theirs or dotted.startswith(f"{theirs}."):
            return [ours + dotted[len(theirs) :]]
    return []
