"""What the router before replicas on this machine shows, beside what every front counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from minifer.routing.router import Router
from minifer.serving.front.metrics import PREFIX, FrontMetrics
from minifer.serving.replicas.replica import Replica


class RouterMetrics(FrontMetrics):
    """Of one router."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        super().__init__()
        self.registry.register(_States(replicas, router))
        for replica in replicas:
            self.show(replica.name)


def is_exact(router: Router, name: str) -> bool:
    """Does the router know from events what a replica holds?"""
    index = router.index
    return name in index.replicas and not index.is_approximate(name)


class _States:
    """Read when somebody asks."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self._replicas = replicas
        self._router = router

    def collect(self) -> Iterator[Metric]:
        healthy = sum(replica.is_available for replica in self._replicas)
        yield GaugeMetricFamily(PREFIX + "replicas_healthy", "Replicas that take requests", healthy)
        rows: Mapping[str, tuple[str, Callable[[Replica], float]]] = {
            "open_requests": ("Requests at a replica", lambda r: r.num_open),
            "restarts": ("Processes of a replica that were replaced", lambda r: r.num_restarts),
            "kv_is_exact": (
                "1 where a replica's KV events come, 0 where its content is guessed",
                lambda r: is_exact(self._router, r.name),
            ),
        }
        for name, (text, value) in rows.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["replica"])
            for replica in self._replicas:
                gauge.add_metric([replica.name], float(value(replica)))
            yield gauge
