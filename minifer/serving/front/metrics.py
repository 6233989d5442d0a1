"""What a front counts, and the numbers of all its replicas on one page."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from minifer.serving.front.errand import Chosen

log = logging.getLogger("minifer.serving.front")

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


class FrontMetrics:
    """Counters of one front, with a registry of their own. names: of `COUNTERS`."""

    def __init__(self, names: Iterable[str] = COUNTERS) -> None:
        self.registry = CollectorRegistry()
        self._counters = {
            name: Counter(PREFIX + name, *COUNTERS[name], registry=self.registry) for name in names
        }

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        self._counters[name].labels(*labels).inc(by)

    def count_request(self, chosen: Chosen, num_tokens: int) -> None:
        """A request of so many prompt tokens goes to a replica."""
        self.count("requests", chosen.replica, chosen.reason)
        self.count("prompt_tokens", chosen.replica, by=num_tokens)
        self.count("cached_tokens_expected", chosen.replica, by=chosen.cached_tokens)

    def show(self, name: str) -> None:
        """Have a replica's counters begin at 0: one that begins with its first event hides it."""
        for counter, (_, labels) in COUNTERS.items():
            if labels == ("replica",) and counter in self._counters:
                self._counters[counter].labels(name)

    def value(self, name: str, **labels: str) -> float:
        """Of one counter; 0 before its first event."""
        return self.registry.get_sample_value(f"{PREFIX}{name}_total", labels) or 0.0

    def text(self, pages: Mapping[str, str]) -> bytes:
        """Prometheus' format. pages: replica → its own page, whose every sample gets its name."""
        registry = CollectorRegistry()
        registry.register(_Pages(pages))
        return generate_latest(self.registry) + generate_latest(registry)


class _Pages:
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
