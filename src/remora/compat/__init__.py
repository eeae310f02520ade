"""Lets programs that were written for torch.distributed.rpc run on Remora, with no line of them changed.

    python -m remora.compat train.py --epochs 3           # or: -m package.train --epochs 3
    REMORA_COMPAT=1 torchrun --nproc-per-node 2 train.py
    python -m remora.compat --check train.py              # what it uses, and whether Remora has it

or, as the first line of a program, `import remora.compat; remora.compat.install()`. All of them reach the processes that
the program starts, too. Importing this module imports neither torch nor the rest of Remora.
"""

from __future__ import annotations


def install(*, children: bool = True) -> None:
    """Make torch.distributed.rpc, .autograd, .optim.DistributedOptimizer and .nn.RemoteModule Remora's from now on.

    Names that modules imported before are replaced, too. With `children` the same holds in the processes that this one
    starts from now on. An error if RPC is running; does nothing the second time.
    """
    from remora.compat import children as ours
    from remora.compat import redirection

    redirection.install()
    if children:
        ours.include()


def uninstall() -> None:
    """Restore torch's names. Modules that took names of Remora's meanwhile keep them, unless they are torch's own."""
    from remora.compat import children as ours
    from remora.compat import redirection

    redirection.uninstall()
    ours.exclude()


def installed() -> bool:
    """Return True if torch's names are Remora's now."""
    import sys

    redirection = sys.modules.get("remora.compat.redirection")
    return redirection is not None and redirection.installed()


__all__ = ["install", "installed", "uninstall"]
