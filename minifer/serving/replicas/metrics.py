"""What a router counts, and the numbers of all its replicas on one page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from minifer.routing.router import Router
from minifer.serving.replicas.replica import Replica

log = logging.getLogger("minifer.serving.replicas")

PREFIX = "minifer_router_"
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # name → explanation and labels
    "requests": ("Requests sent to a replica, by the policy's reason", ("replica", "reason")),
    "retries": ("Requests that were sent to another replica, and why", ("replica", "cause")),
    "failures": ("Requests that ended because of their replica, and how", ("cause",)),
    "cached_tokens_expected": ("Prompt tokens that a replica was believed to hold", ("replica",)),
    "cached_tokens_reported": (
        "Prompt tokens that it did hold; of answers that said so",
        ("replica",),
    ),
    "cached_tokens_compared": (
        "Of cached_tokens_expected, those of answers that said so",
        ("replica",),
    ),
    "prompt_tokens": ("Prompt tokens sent to a replica", ("replica",)),
    "kv_events": ("KV events of a replica", ("replica",)),
    "hand_overs": (
        "Prompts that a prefill worker was to compute, and what came of it",
        ("outcome",),
    ),
    "kv_snapshots": ("Times all that a replica holds was asked for anew", ("replica",)),
}


class RouterMetrics:
    """Counters of one router; each has its own registry."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self.registry = CollectorRegistry()
        self._counters = {
            name: Counter(PREFIX + name, text, labels, registry=self.registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self.registry.register(_States(replicas, router))
        for replica in replicas:
            for name, (_, labels) in COUNTERS.items():
                if labels == ("replica",):  # a counter that begins with its first event hides it
                    self._counters[name].labels(replica.name)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        self._counters[name].labels(*labels).inc(by)

    def value(self, name: str, **labels: str) -> float:
        """Of one counter; 0 before its first event."""
        return self.registry.get_sample_value(f"{PREFIX}{name}_total", labels) or 0.0

    def text(self, pages: Mapping[str, str]) -> bytes:
        """Prometheus' format. pages: replica → its own page, whose every sample gets its name."""
        registry = CollectorRegistry()
        registry.register(Pages(pages))
        return generate_latest(self.registry) + generate_latest(registry)


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


class Pages:
    """The replicas' pages, merged: a name once, with the samples of all."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in _families(replica, page):
                into = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {"replica": replica, **sample.labels}
                    into.samples.append(sample._replace(labels=labels))
        yield from merged.values()


def _families(replica: str, page: str) -> list[Metric]:
    """What a page says; nothing if it cannot be read."""
    try:
        return list(text_string_to_metric_families(page))
    except ValueError as error:
        log.warning("the metrics of %s cannot be read: %s", replica, error)
        return []
