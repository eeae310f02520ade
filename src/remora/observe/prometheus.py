"""The metrics of this process's worker for `prometheus_client`, computed when they are scraped.

    from remora.observe import prometheus
    prometheus.register()       # then prometheus_client.start_http_server(8000), or what the program has already

For the metrics of a whole group, scrape `/metrics` of `remora dashboard`.
"""

from __future__ import annotations

from collections.abc import Iterator

from remora.errors import NotInitialized
from remora.observe.snapshots import snapshot
from remora.observer.model import GroupSnapshot
from remora.observer.openmetrics import QUERY, Distribution, Family, families

try:
    from prometheus_client import REGISTRY, Metric
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:
    raise ImportError("remora.observe.prometheus needs prometheus_client: pip install prometheus_client") from error


class WorkerCollector(Collector):
    """Takes a snapshot of the worker for each scrape. While there is no worker, there are no metrics."""

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this moment."""
        try:
            worker = snapshot(QUERY)
        except NotInitialized:
            return
        for family in families(GroupSnapshot(group=worker.group, time=worker.time, workers=(worker,))):
            yield _metric(family)

    def describe(self) -> list[Metric]:
        """Return nothing: which metrics there are is known when they are computed."""
        return []


def register(registry: CollectorRegistry = REGISTRY) -> WorkerCollector:
    """Add the metrics of this process's worker to a registry; `registry.unregister` takes them out."""
    collector = WorkerCollector()
    registry.register(collector)
    return collector


def _metric(family: Family) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    for labels, value in family.samples:
        if isinstance(value, Distribution):
            for limit, count in value.at_most:
                metric.add_sample(f"{family.name}_bucket", {**labels, "le": f"{limit:.9g}"}, count)
            metric.add_sample(f"{family.name}_bucket", {**labels, "le": "+Inf"}, value.count)
            metric.add_sample(f"{family.name}_count", labels, value.count)
            metric.add_sample(f"{family.name}_sum", labels, value.total)
        else:
            metric.add_sample(family.name + ("_total" if family.kind == "counter" else ""), labels, value)
    return metric
