"""What the engine counts anyway, read when Prometheus asks.

These are plain numbers that the engine's thread writes: reading them from another thread is safe
and costs the engine nothing, but they are not all of one instant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minifer.engine import Engine
from minifer.execution.speculation.proposer import SpeculationStats
from minifer.kv.tiers.stats import TierStats

PREFIX = "minifer:"


class EngineCollector:
    """Queue lengths, cache use and hits, KV tiers, guards. Names are vLLM's where it has them."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for every scrape."""
        scheduler, kv = self._engine.scheduler, self._engine.kv
        yield self._gauge("num_requests_running", "Sequences being run", len(scheduler.running))
        waiting = len(scheduler.waiting) + len(scheduler.loading)
        yield self._gauge("num_requests_waiting", "Requests in the queue, or for the disk", waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", kv.usage)
        count = self._counter
        yield count("num_preemptions", "Preemptions", scheduler.num_preemptions)
        yield count("prefix_cache_queries", "Tokens looked up on the device", kv.stats.num_queries)
        yield count("prefix_cache_hits", "Tokens found on the device", kv.stats.num_hits)
        loops = getattr(getattr(self._engine, "runner", None), "stats", None)
        if loops is not None:  # a loop model; a closed engine has no runner
            text = "Times the core's weights were read"
            yield count("core_applications", text, loops.core_applications)
            yield count("token_loops", "Iterations of all tokens", loops.token_loops)
        if self._engine.proposer is not None:
            yield from self._speculation(self._engine.speculation_stats)
        trips = dict(self._engine.guard_trips)
        yield self._labelled("guard_trips", "Alarms of guards", ("guard",), by_one(trips))
        if kv.tiers is not None:
            yield from self._tiers(kv.tiers.stats)

    def _speculation(self, stats: SpeculationStats) -> Iterator[Metric]:
        count = self._counter
        yield count("spec_decode_num_drafts", "Guesses of one or more tokens", stats.num_drafts)
        yield count("spec_decode_num_draft_tokens", "Tokens guessed", stats.num_draft_tokens)
        text = "Tokens guessed right"
        yield count("spec_decode_num_accepted_tokens", text, stats.num_accepted_tokens)
        by_place = {str(i): float(n) for i, n in enumerate(stats.num_accepted_tokens_per_pos)}
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._labelled(name, text, ("position",), by_one(by_place))

    def _tiers(self, stats: TierStats) -> Iterator[Metric]:
        count = self._counter
        hits = sum(stats.hits.values())
        yield count("external_prefix_cache_queries", "Tokens asked of the tiers", stats.num_queries)
        yield count("external_prefix_cache_hits", "Tokens loaded from a tier", hits)
        ways = {"load": stats.loads, "store": stats.stores}
        for name, text in (("blocks", "Blocks moved"), ("bytes", "Bytes"), ("seconds", "Time")):
            values: dict[tuple[str, ...], float] = {
                (way, tier): float(getattr(transfer, name))
                for way, transfers in ways.items()
                for tier, transfer in transfers.items()
            }
            yield self._labelled(f"kv_offload_{name}", text, ("direction", "tier"), values)
        evicted = by_one(stats.evicted)
        yield self._labelled("kv_offload_evicted_blocks", "Blocks thrown out", ("tier",), evicted)
        refused = by_one(stats.refused)
        text = "Tokens computed although a tier had them"
        yield self._labelled("kv_offload_refused_tokens", text, ("tier",), refused)
        for name, text in (
            ("dropped", "Blocks not written: the disk was too slow"),
            ("rejected", "Blocks not stored: not finite"),
            ("corrupt", "Files that failed a check"),
            ("write_errors", "Files that could not be written"),
            ("timeouts", "Waits for the disk that were given up"),
        ):
            yield count(f"kv_offload_{name}", text, getattr(stats, name))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(name, text, (), {(): value})

    def _labelled(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Mapping[tuple[str, ...], float],
    ) -> Metric:
        counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name", *labels])
        for extra, value in values.items():
            counter.add_metric([self._model, *extra], value)
        return counter


def by_one(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Keys of one label."""
    return {(key,): value for key, value in values.items()}
