"""What the front door before Ray's replicas counts, under the names of `serving/replicas/`."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from minifer.serving.ray_call import Accepted
from minifer.serving.replicas.metrics import COUNTERS, PREFIX, Pages

_NAMES = (
    "requests",
    "retries",
    "failures",
    "prompt_tokens",
    "cached_tokens_expected",
    "cached_tokens_reported",
    "cached_tokens_compared",
)


class RayMetrics:
    """Counters with a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters = {
            name: Counter(PREFIX + name, *COUNTERS[name], registry=self.registry) for name in _NAMES
        }
        self.num_replicas = Gauge(
            PREFIX + "replicas_healthy", "Replicas that take requests", registry=self.registry
        )

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        self._counters[name].labels(*labels).inc(by)

    def count_request(self, accepted: Accepted, num_tokens: int) -> None:
        """A replica has taken a request of so many prompt tokens."""
        self.count("requests", accepted.replica, accepted.reason)
        self.count("prompt_tokens", accepted.replica, by=num_tokens)
        self.count("cached_tokens_expected", accepted.replica, by=accepted.cached_tokens)

    def text(self, pages: Mapping[str, str]) -> bytes:
        """Prometheus' format. pages: replica → its own page, whose every sample gets its name."""
        registry = CollectorRegistry()
        registry.register(Pages(pages))
        return generate_latest(self.registry) + generate_latest(registry)
