"""Remora: call functions, hold objects and backpropagate across machines. The successor to `torch.distributed.rpc`.

    from remora import rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)  # and "worker1" in another process
    print(rpc.rpc_sync("worker1", max, args=(3, 4)))
    rpc.shutdown()

What is where:

    remora.rpc          the names of torch.distributed.rpc: start a worker, call functions, hold references
    remora.autograd     backpropagation through calls (torch.distributed.autograd)
    remora.optim        DistributedOptimizer
    remora.nn           RemoteModule
    remora.errors       every exception that is not the program's own
    remora.supervision  start worker processes, and restart those that fail; `python -m remora.launch` does the same
    remora.observe      what the workers do, from inside a program; remora.observer: from outside
    remora.testing      workers in one process or in many, and faults on purpose, for tests
    remora.compat       run programs that import torch.distributed.rpc as they are
"""

__version__ = "0.1.0"

_PUBLIC = ("autograd", "compat", "errors", "nn", "observe", "observer", "optim", "rpc", "supervision", "testing")


def __dir__() -> list[str]:
    """Return what programs use, for a user who looks around in a notebook. The rooms of the house are there, too."""
    return [name for name in globals() if name in _PUBLIC or name.startswith("__")]
