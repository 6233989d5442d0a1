"""What the front door before Ray's replicas counts, under the names of every front."""

from __future__ import annotations

from prometheus_client import Gauge

from minifer.serving.front.metrics import PREFIX, FrontMetrics

_NAMES = (
    "requests",
    "retries",
    "failures",
    "prompt_tokens",
    "cached_tokens_expected",
    "cached_tokens_reported",
    "cached_tokens_compared",
)


class RayMetrics(FrontMetrics):
    """Ray's replicas come and go: how many there are was counted when they were last asked."""

    def __init__(self) -> None:
        super().__init__(_NAMES)
        self.num_replicas = Gauge(
            PREFIX + "replicas_healthy", "Replicas that take requests", registry=self.registry
        )
