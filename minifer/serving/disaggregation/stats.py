"""What the links did, counted where it happens; the event loop's thread writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric

from minifer.kv.tiers.stats import Transfer
from minifer.serving.engine_metrics import PREFIX


@dataclass
class TransferStats:
    """sent, received: whole blocks, their bytes, and the seconds that links were open for them,
    waiting for the prompt to be computed included.

    prefills: prompts computed to be handed over. pulls: of prompts, begun by either side.
    tokens: prompt tokens that came and were taken into the tier. recomputed_tokens: prompt
    tokens that should have come and did not.
    corrupt: blocks that were not what they should be, by checksum, tokens or model. refused: pulls
    that the other side had reasons to refuse, another model above all. broken: links that ended
    too early. timeouts: waits that were given up.
    """

    sent: Transfer = field(default_factory=Transfer)
    received: Transfer = field(default_factory=Transfer)
    prefills: int = 0
    pulls: int = 0
    tokens: int = 0
    recomputed_tokens: int = 0
    corrupt: int = 0
    refused: int = 0
    broken: int = 0
    timeouts: int = 0


_COUNTERS = {
    "prefills": "Prompts computed to be handed over",
    "pulls": "Hand-overs begun",
    "tokens": "Prompt tokens that came from another worker",
    "recomputed_tokens": "Prompt tokens that should have come and did not",
    "corrupt": "Blocks that were not what they should be",
    "refused": "Hand-overs that one side refused",
    "broken": "Links that ended too early",
    "timeouts": "Hand-overs that were given up",
}


class TransferCollector:
    """The same for Prometheus, as `minifer:kv_transfer_…`."""

    def __init__(self, stats: TransferStats, model_name: str) -> None:
        self._stats = stats
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(
                f"{PREFIX}kv_transfer_{name}", text, labels=["model_name"]
            )
            counter.add_metric([self._model], getattr(self._stats, name))
            yield counter
        ways = {"sent": self._stats.sent, "received": self._stats.received}
        for name, text in (("blocks", "Blocks moved"), ("bytes", "Bytes"), ("seconds", "Time")):
            labels = ["model_name", "direction"]
            counter = CounterMetricFamily(f"{PREFIX}kv_transfer_{name}", text, labels=labels)
            for way, transfer in ways.items():
                counter.add_metric([self._model, way], getattr(transfer, name))
            yield counter
