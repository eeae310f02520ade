"""Rest: the share of a core that a worker uses which is connected to others and has nothing to do."""

from __future__ import annotations

import time

from benchmarks.calls import nothing
from benchmarks.measure import Reading, Setting, Unit

SETTLING = 2.0


def measure(setting: Setting) -> list[Reading]:
    """Every peer is a process of its own, and has been called; what counts is the time of worker0's process."""
    rpc = setting.rpc
    for answer in [rpc.rpc_async(peer, nothing) for peer in setting.peers]:
        answer.wait()
    time.sleep(SETTLING)
    used, begun = time.process_time(), time.perf_counter()
    time.sleep(setting.effort(20.0, 5.0))
    share = (time.process_time() - used) / (time.perf_counter() - begun)
    return [Reading("CPU", share, Unit.SHARE_OF_CORE)]
