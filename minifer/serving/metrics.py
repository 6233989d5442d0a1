"""What a monitor wants to know, under vLLM's names: `minifer:num_requests_running` and so on.

Times of requests are observed as their outputs come by; what the engine counts anyway is read when
somebody asks (`engine_metrics.py`). Each app has its own registry: no global state.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from minifer.async_llm import AsyncLLM
from minifer.outputs import RequestMetrics, RequestOutput
from minifer.request import SamplingParams
from minifer.serving.engine_metrics import PREFIX, EngineCollector

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_ITL = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_TOKENS = tuple(m * 10**e for e in range(5) for m in (1, 2, 5))
# name → explanation and buckets
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token", _TTFT),
    "inter_token_latency_seconds": ("Between two outputs of a request", _ITL),
    "request_time_per_output_token_seconds": ("Mean over a request, after its first token", _ITL),
    "e2e_request_latency_seconds": ("From arrival to the end", _LATENCY),
    "request_queue_time_seconds": ("From arrival to the first step", _LATENCY),
    "request_prefill_time_seconds": ("From the first step to the first token", _LATENCY),
    "request_decode_time_seconds": ("From the first token to the last", _LATENCY),
    "request_inference_time_seconds": ("From the first step to the last token", _LATENCY),
    "request_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer", _TOKENS),
    "request_params_n": ("n of a request", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("max_tokens of a request that sets it", _TOKENS),
    "iteration_tokens_total": ("Tokens computed in a step", _STEP),
}


class ServerMetrics:
    """Counters and histograms of one server, and the collector of its engine's numbers."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._histograms = {
            name: Histogram(PREFIX + name, text, ["model_name"], registry=None, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        label = ["model_name"]
        self._prompt_tokens = Counter(
            PREFIX + "prompt_tokens", "Prefill tokens", label, registry=None
        )
        self._generation_tokens = Counter(
            PREFIX + "generation_tokens", "Generated tokens", label, registry=None
        )
        self._success = Counter(
            PREFIX + "request_success",
            "Answers that ended, by finish_reason",
            ["model_name", "finished_reason"],
            registry=None,
        )
        own = [*self._histograms.values(), self._prompt_tokens, self._generation_tokens]
        for metric in [*own, self._success, EngineCollector(llm.engine, model_name)]:
            self.registry.register(metric)  # type: ignore[arg-type]
        for metric in own:  # a counter that begins with its first event hides that one from rate()
            metric.labels(model_name)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, reason)
        llm.on_step = lambda tokens: self.observe("iteration_tokens_total", tokens)

    def observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].labels(self._model).observe(value)

    def count_tokens(self, prompt: int, generated: int) -> None:
        self._prompt_tokens.labels(self._model).inc(prompt)
        self._generation_tokens.labels(self._model).inc(generated)

    def count_end(self, finish_reason: str) -> None:
        self._success.labels(self._model, finish_reason).inc()

    def text(self) -> bytes:
        """Prometheus' exposition format."""
        return generate_latest(self.registry)


class RequestTimer:
    """Follows one request from its admission to its end."""

    def __init__(
        self, metrics: ServerMetrics, num_prompt_tokens: int, params: SamplingParams
    ) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._last_token_time: float | None = None
        self._num_open = params.n
        self._num_tokens = 0
        metrics.observe("request_prompt_tokens", num_prompt_tokens)
        metrics.observe("request_params_n", params.n)
        metrics.observe("request_params_max_tokens", params.max_tokens)

    def observe(self, output: RequestOutput) -> None:
        """Take the next output, of `OutputKind.DELTA`."""
        new = sum(len(one.token_ids) for one in output.outputs)
        times = output.metrics
        first = self._last_token_time is None
        if first and times.first_token_time is not None:
            self._metrics.observe("time_to_first_token_seconds", times.ttft)
            self._metrics.count_tokens(self._num_prompt_tokens, 0)
        elif new and times.last_token_time is not None and self._last_token_time is not None:
            gap = times.last_token_time - self._last_token_time
            self._metrics.observe("inter_token_latency_seconds", gap)
        self._last_token_time = times.last_token_time
        self._metrics.count_tokens(0, new)
        self._num_tokens += new
        for one in output.outputs:
            if one.finish_reason is not None:
                self._num_open -= 1
                self._metrics.count_end(one.finish_reason)
        if output.finished:
            self._end(times)

    def _end(self, times: RequestMetrics) -> None:
        observe = self._metrics.observe
        self._num_open = 0
        observe("request_generation_tokens", self._num_tokens)
        observe("request_time_per_output_token_seconds", times.tpot)
        observe("request_queue_time_seconds", times.queue_time)
        observe("e2e_request_latency_seconds", _between(times.arrival_time, times.finished_time))
        start, first, last = (
            times.first_scheduled_time,
            times.first_token_time,
            times.last_token_time,
        )
        observe("request_prefill_time_seconds", _between(start, first))
        observe("request_decode_time_seconds", _between(first, last))
        observe("request_inference_time_seconds", _between(start, last))

    def close(self) -> None:
        """The caller is gone: what had not ended was aborted."""
        for _ in range(self._num_open):
            self._metrics.count_end("abort")
        self._num_open = 0


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
