"""A remote value made and fetched: `remote()` of a no-op and `to_here()` of what it returned."""

from __future__ import annotations

from benchmarks.measure import Reading, Setting, Skipped, latencies, time_each
from benchmarks.suite.noop import nothing


def measure(setting: Setting) -> list[Reading]:
    rpc, (peer, *_) = setting.rpc, setting.peers

    def make_and_fetch() -> None:
        rpc.remote(peer, nothing).to_here()

    try:
        make_and_fetch()
    except (AttributeError, NotImplementedError) as error:
        raise Skipped(f"{setting.contestant.name} has no remote references yet") from error
    time_each(make_and_fetch, setting.effort(200, 50))
    return latencies(time_each(make_and_fetch, setting.effort(1500, 400)))
