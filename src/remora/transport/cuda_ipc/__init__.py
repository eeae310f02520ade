"""Passes memory of CUDA devices between processes of one host: the owner names it, the receiver copies it once. No messages.

The owner of a tensor *exports* its memory: a reference of some hundred bytes, which goes with a message. The receiver
*fetches* it: a copy on the device into memory of its own, in the order of its current stream. In flags that both share, the
owner's stream writes when the memory is ready and the receiver's when it has been copied. So no thread waits for a device,
and the owner sees when it may free the memory. When one process dies, the other writes the missing flags itself.

Importing this neither needs nor initialises CUDA.
"""

from remora.transport.cuda_ipc.availability import available, identity, reachable
from remora.transport.cuda_ipc.deferred_free import sweep
from remora.transport.cuda_ipc.exporter import Exporter
from remora.transport.cuda_ipc.importer import Importer
from remora.transport.cuda_ipc.reference import Region, Unreachable, number_of

__all__ = [
    "Exporter", "Importer", "Region", "Unreachable", "available", "identity", "number_of", "reachable", "sweep",
]  # fmt: skip
