"""Memory of CUDA devices between processes of one host: named by its owner, copied once by its receiver. No messages.

The owner of a tensor *exports* its memory: a reference of some hundred bytes, which goes with a message. The receiver
*fetches* it: a copy on the device into memory of its own, in the order of its current stream. In a tally of words that both
share, the owner's stream says when the memory is ready and the receiver's when it has been copied. So nobody waits for a
device, and the owner sees when it may let go. When one process dies, the other writes the missing words itself.

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
