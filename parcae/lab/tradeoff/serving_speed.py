"""How fast a loop model is through the server, at which depth: tokens a second, and loops counted.

A real server (uvicorn, HTTP, the engine on its thread) and a client in one process: every answer
comes in one piece, so that the client sleeps while the engine works. Each way to ask (`Setting`)
takes its turn in every round, and speeds are compared within a round (`minifer.perf.bench`).
Core applications and loops are the engine's own count, and no clock decides them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from minifer.async_llm import AsyncLLM
from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.perf.bench import BenchmarkResult, run_benchmark
from minifer.serving.app import create_app
from minifer.serving.run import GracefulServer, bind, url_of

UNITS = {"tokens_per_second": "tokens/s", "tokens_per_cpu_second": "tokens/s"}


@dataclass(frozen=True)
class Setting:
    """One way to ask, and to answer.

    workload: what is asked, by name. depths: num_loops of the requests, in turn. batching:
    `loop_batching` of the engine.
    """

    workload: str
    depths: tuple[int, ...]
    exit_threshold: float | None = None
    batching: str = EngineConfig.loop_batching

    @property
    def name(self) -> str:
        """The workload; with the batching where it is not the engine's default."""
        usual = self.batching == EngineConfig.loop_batching
        return self.workload if usual else f"{self.workload}, {self.batching}"


@dataclass(frozen=True)
class Traffic:
    """prompts: token ids, one a request, no two alike. max_tokens: of each answer, which is never
    shorter. concurrency: requests that are open at once."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    concurrency: int


def measure(
    loaded: Any, traffic: Traffic, settings: Sequence[Setting], *, runs: int = 3, warmup: int = 1
) -> BenchmarkResult:
    """Every setting under one traffic; the first one is what the others are compared with.

    Metrics of an arm: seconds, tokens_per_second (generated), tokens_per_cpu_second (of this
    process, client and server together: what other programs do changes it less), steps of the
    engine (each runs prelude, coda and head once), core_applications, mean_loops (of the generated
    tokens that were computed). Raises `RuntimeError` for an answer that fails.
    """
    deepest = max(depth for setting in settings for depth in setting.depths)
    with ExitStack() as stack:
        servers: dict[str, _Server] = {}
        for batching in dict.fromkeys(setting.batching for setting in settings):
            config = EngineConfig(
                loop_batching=batching,
                max_num_loops=deepest,
                max_num_seqs=traffic.concurrency,
                enable_prefix_caching=False,  # a second round would find the first one's prompts
            )
            llm = stack.enter_context(AsyncLLM(engine=Engine.from_loaded(loaded, config)))
            servers[batching] = _Server(llm, stack.enter_context(serving(llm)))

        def arm(setting: Setting) -> Callable[[], dict[str, float]]:
            return lambda: _run(servers[setting.batching], traffic, setting)

        return run_benchmark(
            "loop depth through the server",
            {setting.name: arm(setting) for setting in settings},
            runs=runs,
            warmup=warmup,
            units=UNITS,
            settings={
                "requests": len(traffic.prompts),
                "concurrency": traffic.concurrency,
                "prompt_tokens": sum(map(len, traffic.prompts)),
                "max_tokens": traffic.max_tokens,
            },
        )


class _Server:
    """An engine that is served at a URL, and what it has counted since its start."""

    def __init__(self, llm: AsyncLLM, url: str) -> None:
        self.url = url
        self.stats = llm.engine.runner.stats  # type: ignore[attr-defined]
        self.steps = 0
        self._on_step = llm.on_step  # the server's own
        llm.on_step = self._count

    def _count(self, num_tokens: int) -> None:
        self.steps += 1
        if self._on_step is not None:
            self._on_step(num_tokens)


def _run(server: _Server, traffic: Traffic, setting: Setting) -> dict[str, float]:
    bodies: list[dict[str, Any]] = []
    prompt_loops = 0
    for number, prompt in enumerate(traffic.prompts):
        depth = setting.depths[number % len(setting.depths)]
        prompt_loops += depth * len(prompt)
        body = {"prompt": list(prompt), "max_tokens": traffic.max_tokens, "num_loops": depth}
        bodies.append({**body, "temperature": 0, "ignore_eos": True})
        if setting.exit_threshold is not None:
            bodies[-1]["exit_threshold"] = setting.exit_threshold
    stats, steps = server.stats, server.steps
    applications, loops = stats.core_applications, stats.token_loops
    cpu = time.process_time()
    seconds, tokens = asyncio.run(_send(server.url, bodies, traffic.concurrency))
    cpu = time.process_time() - cpu
    computed = tokens - len(bodies)  # the last token of an answer is not read any more
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu,
        "steps": server.steps - steps,
        "core_applications": stats.core_applications - applications,
        "mean_loops": (stats.token_loops - loops - prompt_loops) / max(1, computed),
    }


async def _send(
    url: str, bodies: Sequence[Mapping[str, Any]], concurrency: int
) -> tuple[float, int]:
    """Seconds until all are answered, and the tokens that were generated."""
    queue = iter(bodies)
    tokens = 0
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:

        async def worker() -> None:
            nonlocal tokens
            for body in queue:
                response = await http.post("/v1/completions", json=body)
                if response.status_code != 200:
                    raise RuntimeError(f"HTTP {response.status_code}: {response.text[:300]}")
                tokens += response.json()["usage"]["completion_tokens"]

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
        return time.perf_counter() - start, tokens


@contextmanager
def serving(llm: AsyncLLM) -> Iterator[str]:
    """The server of an engine on a free port, in a thread; its base URL."""
    app = create_app(llm)
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none")
    config.timeout_graceful_shutdown = 2
    server = GracefulServer(config, app.state.server)
    listener.listen(64)
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listener]),))
    thread.start()
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join()
