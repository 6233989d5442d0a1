"""`minifer bench serve`: a workload, sent to a server as often as asked, and one result."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx

from minifer.perf.bench import BenchmarkResult, run_benchmark
from minifer.perf.load import metrics
from minifer.perf.load.client import ENDPOINTS, OpenAIClient
from minifer.perf.load.generator import LoadRun, generate_load
from minifer.perf.load.traces import Trace
from minifer.perf.load.workload import WORDS, Session, Vocabulary, Workload, with_arrivals

ARM = "serve"
UNITS: Mapping[str, str] = {
    **{f"{name}_{key}": "s" for name in metrics.LATENCIES for key in metrics.STATISTICS},
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "total_throughput": "tokens/s",
    "goodput": "requests/s",
}


@dataclass(frozen=True)
class ServeBenchmark:
    """What to send where, and how often.

    source: a `Workload`, or a `Trace` that brings its arrivals. request_rate, burstiness: open
    loop, sessions a second, see `arrivals.py`; max_concurrency: closed loop; one of the two with a
    workload, neither with a trace. speed_up: of a trace. seed: of the first run; each further run
    adds 1, so that no run finds the prompts of another in a cache. warmup: sessions sent before,
    with prompts of their own. vocab_size: prompts are drawn from all ids below it; None: from
    those that the server's /tokenize gives common words. extra: further fields of each request.

    Raises `ValueError` for what does not go together.
    """

    source: Workload | Trace
    endpoint: str = "completions"
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    speed_up: float = 1.0
    seed: int = 0
    runs: int = 1
    warmup: int = 1
    model: str | None = None
    api_key: str | None = None
    vocab_size: int | None = None
    timeout: float = 600.0
    slo: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ValueError(
                f"endpoint must be one of {', '.join(ENDPOINTS)}, got {self.endpoint!r}"
            )
        for name, least in (("runs", 1), ("warmup", 0), ("vocab_size", 1), ("max_concurrency", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("request_rate", "burstiness", "speed_up", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        given = (self.request_rate is not None) + (self.max_concurrency is not None)
        if isinstance(self.source, Trace) and given:
            raise ValueError("a trace says when requests come: no request_rate or max_concurrency")
        if isinstance(self.source, Workload):
            if given != 1:
                raise ValueError(
                    "request_rate (open loop) and max_concurrency (closed loop) exclude each "
                    "other: a capped open loop hides the queue it is there to show"
                )
            if self.source.turns > 1 and self.endpoint != "chat":
                raise ValueError(
                    "a conversation goes on from the answer's text: turns above 1 need the "
                    "endpoint chat"
                )

    def sessions(self, vocabulary: Vocabulary, seed: int) -> list[Session]:
        """What one run sends."""
        if isinstance(self.source, Trace):
            return self.source.sessions(vocabulary, seed, self.speed_up)
        sessions = self.source.sessions(vocabulary, seed)
        if self.request_rate is None:
            return sessions
        return with_arrivals(sessions, self.request_rate, self.burstiness, seed)


def bench_serve(
    bench: ServeBenchmark,
    base_url: str,
    *,
    settings: Mapping[str, Any] | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> tuple[BenchmarkResult, list[LoadRun]]:
    """Run it against the server at `base_url` (with or without /v1).

    settings: recorded in the result beside the benchmark's own. transport, loop_factory: the
    network and the clock; a test brings its own. Raises `ValueError` when no vocabulary is known,
    `RuntimeError` when no server answers or it completes nothing.
    """
    result, seen = bench_servers(
        bench,
        {ARM: base_url},
        settings={"server": base_url, **(settings or {})},
        transport=transport,
        loop_factory=loop_factory,
    )
    return result, seen[ARM]


def bench_servers(
    bench: ServeBenchmark,
    servers: Mapping[str, str],
    *,
    name: str = "serve",
    summarize: Callable[[LoadRun], dict[str, float]] | None = None,
    units: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> tuple[BenchmarkResult, dict[str, list[LoadRun]]]:
    """Run it against several servers, which take turns: in each round all get the same sessions.

    servers: arm → base URL; the first is the baseline. summarize: one run → what is reported of
    it; None: all of `metrics`. units: of what that adds. Otherwise as `bench_serve`.
    """
    summarize = summarize or (lambda run: metrics.summarize(run, bench.slo))
    seen: dict[str, list[LoadRun]] = {arm: [] for arm in servers}
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        prepared: dict[str, tuple[OpenAIClient, Vocabulary]] = {}
        clients = {arm: _http(bench, url, transport) for arm, url in servers.items()}

        def arm_of(arm: str) -> Callable[[], dict[str, float]]:
            def call() -> dict[str, float]:
                client, vocabulary = prepared[arm]
                sessions = bench.sessions(vocabulary, bench.seed + len(seen[arm]))
                run = runner.run(generate_load(client, sessions, bench.max_concurrency))
                seen[arm].append(run)
                return summarize(run)

            return call

        try:
            for arm, http in clients.items():
                prepared[arm] = runner.run(_prepare(bench, http))
            models = list(dict.fromkeys(client.model for client, _ in prepared.values()))
            result = run_benchmark(
                name,
                {arm: arm_of(arm) for arm in servers},
                runs=bench.runs,
                warmup=0,  # `_prepare` has sent them
                units={**UNITS, **(units or {})},
                settings={**_settings(bench), "model": models[0], **(settings or {})},
            )
        finally:
            for http in clients.values():
                runner.run(http.aclose())
    details = {
        arm: [_details(bench, i, run) for i, run in enumerate(runs)] for arm, runs in seen.items()
    }
    only = details[ARM] if list(details) == [ARM] else details
    return replace(result, details={"runs": only}), seen


def _http(
    bench: ServeBenchmark, base_url: str, transport: httpx.AsyncBaseTransport | None
) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {bench.api_key}"} if bench.api_key else {},
        timeout=None,  # `OpenAIClient` has one for the whole request
        limits=httpx.Limits(max_connections=None),  # httpx's 100 would cap an open loop
        trust_env=False,  # a proxy would be measured too
        transport=transport,
    )


def _settings(bench: ServeBenchmark) -> dict[str, Any]:
    """JSON-ready, without the key; of a trace only what it was and how much of it."""
    out = asdict(replace(bench, api_key=None))
    del out["api_key"]
    source = out.pop("source")
    for name in ("request_rate", "burstiness", "timeout"):
        if out[name] == math.inf:  # which JSON does not have
            out[name] = "inf"
    if isinstance(bench.source, Trace):
        rows = source.pop("rows")
        return {"trace": {**source, "requests": len(rows)}, **out}
    return {"workload": source, **out}


def _details(bench: ServeBenchmark, number: int, run: LoadRun) -> dict[str, Any]:
    return {
        "seed": bench.seed + number,
        "failures": metrics.failures([run]),
        "unsent_turns": run.num_unsent,
        "requests": [metrics.to_dict(record, run.start) for record in run.records],
    }


async def _prepare(
    bench: ServeBenchmark, http: httpx.AsyncClient
) -> tuple[OpenAIClient, Vocabulary]:
    """The model's name, the pieces of prompts, and requests to warm up."""
    try:
        model = bench.model or await _first_model(http)
        vocabulary = await _vocabulary(bench, http)
    except httpx.TransportError as error:
        raise RuntimeError(f"no answer from {http.base_url}: {error}") from None
    client = OpenAIClient(
        http, endpoint=bench.endpoint, model=model, timeout=bench.timeout, extra=bench.extra
    )
    if bench.warmup:
        source = bench.source
        few: Workload | Trace
        if isinstance(source, Trace):
            few = replace(source, rows=source.rows[: bench.warmup])
        else:
            few = replace(source, num_prompts=bench.warmup)
        sessions = replace(bench, source=few).sessions(vocabulary, -1)
        await generate_load(client, [replace(s, arrival=None) for s in sessions], 1)
    return client, vocabulary


async def _first_model(http: httpx.AsyncClient) -> str | None:
    """What the server serves; None when it does not say."""
    response = await http.get("/v1/models")
    if response.status_code in (401, 403):
        raise RuntimeError(f"the server refuses the API key: HTTP {response.status_code}")
    models = response.json().get("data", []) if response.status_code == 200 else []
    return models[0]["id"] if models else None


async def _vocabulary(bench: ServeBenchmark, http: httpx.AsyncClient) -> Vocabulary:
    if bench.endpoint == "chat":
        return WORDS
    if bench.vocab_size is not None:
        return range(bench.vocab_size)
    response = await http.post("/tokenize", json={"prompt": " ".join(WORDS)})
    tokens = response.json().get("tokens") if response.status_code == 200 else None
    if not tokens:
        raise ValueError("the server has no /tokenize: give vocab_size, or the endpoint chat")
    return sorted(set(tokens))
