"""The process before the replicas: starts them, listens, routes, and ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import httpx

from minifer.config import EngineConfig, with_engine_loops
from minifer.routing.index import KVIndex
from minifer.routing.policies import make_policy
from minifer.routing.router import Router
from minifer.serving.front.prompt import PromptReader
from minifer.serving.front.routes import create_front_app
from minifer.serving.replicas.fleet import Before, Fleet
from minifer.serving.replicas.front import FleetFront
from minifer.serving.replicas.kv_feed import KVFeed
from minifer.serving.replicas.metrics import RouterMetrics
from minifer.serving.replicas.process import ReplicaProcess
from minifer.serving.replicas.replica import Process, Replica
from minifer.serving.replicas.settings import ReplicaSettings
from minifer.serving.replicas.supervisor import Supervisor
from minifer.serving.run import CLOSING_SECONDS, GracefulServer, listen, uvicorn_config
from minifer.serving.settings import ServerSettings
from minifer.weights.resolve import load_tokenizer, read_config

# An idle connection is closed before uvicorn does so after 5 seconds: who reuses one in that moment
# would take a healthy replica for a dead one.
KEEPALIVE_SECONDS = 2.0


def run_replicas(
    replicas: Sequence[Replica],
    config: EngineConfig,
    settings: ServerSettings,
    replica_settings: ReplicaSettings,
    listener: socket.socket,
    on_ready: Callable[[], None],
    before: Before | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish as a single server does; SIGHUP restarts one
    replica after the other.

    replicas: with the arguments of their `minifer serve`. config: of their engines. listener:
    bound; clients are let in when all replicas are healthy, and `on_ready` is called. before: of
    the `Fleet`. Raises `RuntimeError` when one of them does not start, `ValueError` for an unknown
    policy.
    """
    serving = _serve(replicas, config, settings, replica_settings, listener, on_ready, before)
    asyncio.run(serving)


async def _serve(
    replicas: Sequence[Replica],
    config: EngineConfig,
    settings: ServerSettings,
    replica_settings: ReplicaSettings,
    listener: socket.socket,
    on_ready: Callable[[], None],
    before: Before | None,
) -> None:
    async with open_deployment(
        replicas, config, settings, replica_settings, before=before
    ) as server:
        app = create_front_app(server)
        listen(listener)
        on_ready()
        with _restarting_on_hangup(server.supervisor):
            await GracefulServer(uvicorn_config(app), server).serve(sockets=[listener])


@asynccontextmanager
async def open_deployment(
    replicas: Sequence[Replica],
    config: EngineConfig,
    settings: ServerSettings,
    replica_settings: ReplicaSettings,
    start: Callable[[Replica], Awaitable[Process]] | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    before: Before | None = None,
) -> AsyncIterator[FleetFront]:
    """All of it but the socket: processes, health checks, KV events, router. Raises as
    `run_replicas` does; at the end no process is left.

    start, transport: how a process is made, and spoken to; tests bring their own.
    """
    router = Router(make_policy(replica_settings.router, replica_settings.seed), KVIndex())
    reading = asyncio.create_task(asyncio.to_thread(prompt_reader, config, settings.max_prompts))
    key = secrets.token_urlsafe(32)  # nobody but us speaks to a replica

    async def start_process(replica: Replica) -> Process:
        return await ReplicaProcess.start(
            replica.name,
            replica.arguments,
            key,
            {**environment(replicas.index(replica), len(replicas)), **replica.environment},
            replica_settings.start_timeout,
        )

    limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS)
    timeout = httpx.Timeout(None, connect=5.0)
    async with httpx.AsyncClient(
        limits=limits, timeout=timeout, trust_env=False, transport=transport
    ) as http:
        patience = settings.shutdown_timeout + CLOSING_SECONDS + 1.0
        supervisor = Supervisor(replicas, replica_settings, http, start or start_process, patience)
        metrics = RouterMetrics(replicas, router)
        fleet = Fleet(supervisor, router, http, replica_settings, metrics, key, before)
        feed = KVFeed(router, http, metrics, fleet.headers)
        for replica in replicas:
            router.add(replica.name, replica.role)
        supervisor.on_up.append(feed.up)
        supervisor.on_down.append(feed.down)
        try:
            await supervisor.open()
            yield FleetFront(fleet, await reading, settings)
        finally:
            reading.cancel()
            await feed.close()
            await supervisor.close()


def prompt_reader(config: EngineConfig, max_prompts: int = 64) -> PromptReader:
    """Reads prompts as engines with this configuration do. max_prompts: of one request."""
    loop = with_engine_loops(read_config(config.model), config).loop
    return PromptReader(load_tokenizer(config.model), config, loop, max_prompts)


def environment(index: int, count: int) -> dict[str, str]:
    """What replica `index` of `count` gets of the machine: its share of the cores, and a GPU of its
    own where there are several. Variables that are set already decide themselves."""
    shares: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in os.environ:
        shares["OMP_NUM_THREADS"] = str(max(1, _num_cores() // count))
    if "CUDA_VISIBLE_DEVICES" not in os.environ and (gpus := _num_gpus()) > 1:
        shares["CUDA_VISIBLE_DEVICES"] = str(index % gpus)
    return shares


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


@contextlib.contextmanager
def _restarting_on_hangup(supervisor: Supervisor) -> Iterator[None]:
    """SIGHUP replaces all processes, one by one. One that comes meanwhile does so once more."""
    if not hasattr(signal, "SIGHUP"):  # Windows
        yield
        return
    loop = asyncio.get_running_loop()
    restarts: set[asyncio.Task[None]] = set()

    def hang_up() -> None:
        task = loop.create_task(supervisor.restart())
        restarts.add(task)
        task.add_done_callback(restarts.discard)

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in restarts:
            task.cancel()
