"""The engine as a Ray Serve deployment.

::

    this process                                        Ray's workers, on any node
    uvicorn ─▶ RayFront ─▶ DeploymentHandle ──────────▶ EngineReplica: AsyncLLM, create_app
                           PolicyRouter (our policies) ◀─ record_routing_stats: its load

Source: Ray Serve's documentation, "Use Custom Algorithm for Request Routing" and "Ray Serve
Autoscaling" (docs.ray.io).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, ProxyLocation, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message

from minifer.assembly import load
from minifer.async_llm import AsyncLLM
from minifer.config import EngineConfig, with_engine_loops
from minifer.engine import Engine
from minifer.execution.runner import prepare_backend
from minifer.routing.policies import make_policy
from minifer.serving.app import create_app
from minifer.serving.front.errand import Chosen, expected_tokens, replica_lost
from minifer.serving.front.prompt import PromptReader
from minifer.serving.front.routes import create_front_app
from minifer.serving.ray_serve.call import ABORT, Call, run_app
from minifer.serving.ray_serve.front import RayFront
from minifer.serving.ray_serve.settings import LOCAL, RaySettings
from minifer.serving.run import GracefulServer, listen, uvicorn_config
from minifer.serving.settings import ServerSettings
from minifer.weights.resolve import load_tokenizer, read_config

HEALTH_SECONDS = 2.0  # between two questions of Ray's whether a replica's engine is alive
CONNECT_SECONDS = 5.0  # for a node of the cluster to take a connection
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)
_ROUTER = "minifer.serving.ray_serve.router.PolicyRouter"


class EngineReplica:
    """One engine, in a process of Ray's on some node. Its methods run on Ray's event loop there."""

    def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        prepare_backend(config)
        self._llm = AsyncLLM(engine=Engine.from_loaded(load(config), config))
        self._app = create_app(self._llm, settings)

    async def answer(self, call: Call) -> AsyncGenerator[Chosen | Message, None]:
        """Says who answers, and then the answer, as ASGI messages."""
        decision = call.decision
        if decision is not None and decision.replica == self._name:
            cached = expected_tokens(call.request, decision.cached_tokens)
            yield Chosen(self._name, decision.reason, cached)
        else:
            yield Chosen(self._name, "full", 0)
        app: ASGIApp = self._app
        if call.only not in (None, self._name):
            app = replica_lost(name=str(call.only)).response()
        elif call.path == ABORT:
            self._llm.abort_all()
            app = JSONResponse({})
        async with contextlib.aclosing(run_app(app, call)) as messages:
            async for message in messages:
                yield message

    def record_routing_stats(self) -> dict[str, Any]:
        """What Ray carries to the routers when it has changed, every `report_interval` seconds."""
        return {"kv_usage": round(self._llm.engine.kv.usage, 2)}

    def check_health(self) -> None:
        """Ray replaces a replica that raises here some times in a row."""
        if not self._llm.is_alive:
            raise RuntimeError("the engine has stopped")

    def __del__(self) -> None:
        """Ray calls it when the replica is to end."""
        if hasattr(self, "_llm"):
            self._llm.close()


def deployment(
    config: EngineConfig, settings: ServerSettings, ray_settings: RaySettings
) -> serve.Application:
    """The application to give to `serve.run`. settings: without a key: the front door has it."""
    number: dict[str, Any] = {"num_replicas": ray_settings.max_replicas}
    if ray_settings.scales:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=ray_settings.min_replicas,
                max_replicas=ray_settings.max_replicas,
                target_ongoing_requests=ray_settings.target_requests,
                upscale_delay_s=ray_settings.upscale_delay,
                downscale_delay_s=ray_settings.downscale_delay,
            )
        }
    options = serve.deployment(EngineReplica).options(
        name="engine",
        # The engine says no by itself, with a 429; more than that must reach it for it to say so.
        max_ongoing_requests=2 * settings.max_queue,
        ray_actor_options={
            "num_cpus": ray_settings.replica_cpus,
            "num_gpus": ray_settings.replica_gpus,
        },
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER,
            request_router_kwargs={"router": ray_settings.router, "seed": ray_settings.seed},
            request_routing_stats_period_s=ray_settings.report_interval,
        ),
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=ray_settings.drain_timeout,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=QUIET,
        **number,
    )
    return options.bind(config, settings)


@contextmanager
def connected(ray_settings: RaySettings) -> Iterator[None]:
    """In touch with a cluster; one of our own is ended at the end.

    Ray's usage statistics are not sent unless `RAY_USAGE_STATS_ENABLED` says otherwise. Raises
    `RuntimeError` when there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"logging_level": logging.ERROR, "namespace": "minifer"}
    try:
        if ray_settings.address == LOCAL:
            needed = math.ceil(ray_settings.max_replicas * ray_settings.replica_cpus)
            cpus = max(os.cpu_count() or 1, needed)
            ray.init(num_cpus=cpus, include_dashboard=False, **quiet)
        else:
            _knock(ray_settings.address)
            ray.init(ray_settings.address, **quiet)
    except (OSError, ValueError) as error:  # ConnectionError is an OSError
        raise RuntimeError(
            f"cannot reach a Ray cluster at {ray_settings.address!r}: {error}"
        ) from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises `OSError` when nobody listens at HOST:PORT; Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


@contextmanager
def deployed(
    config: EngineConfig, settings: ServerSettings, ray_settings: RaySettings
) -> Iterator[tuple[DeploymentHandle, str]]:
    """Replicas that run: the handle of their streaming method, and the application's name.

    They are ended at the end, and so is Ray Serve when nothing else uses it. Raises `RuntimeError`
    when they do not start.
    """
    serve.start(proxy_location=ProxyLocation.Disabled, logging_config=QUIET)
    name = f"minifer-{uuid.uuid4().hex[:8]}"
    application = deployment(config, settings, ray_settings)
    try:
        try:
            handle = serve.run(application, name=name, route_prefix=None)
        except RuntimeError as error:
            raise RuntimeError(f"the replicas do not start: {_last_words(name)}") from error
        yield handle.options(method_name="answer", stream=True), name
    finally:
        serve.delete(name)
        if ray_settings.address != LOCAL and not serve.status().applications:
            serve.shutdown()


def _last_words(name: str) -> str:
    """Why the replicas of an application do not start: the last line of their traceback."""
    application = serve.status().applications.get(name)
    messages = [d.message for d in application.deployments.values()] if application else []
    lines = [line.strip() for message in messages for line in message.splitlines()]
    return next((line for line in reversed(lines) if line), "Ray does not say why")


def run_ray(
    config: EngineConfig,
    settings: ServerSettings,
    ray_settings: RaySettings,
    listener: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then finish as a single server does.

    listener: bound; clients are let in when the replicas run, and `on_ready` is called with the
    application's name. Raises `RuntimeError` without a cluster or when replicas do not start,
    `ValueError` for an unknown policy.
    """
    make_policy(ray_settings.router, ray_settings.seed)  # here, not in some thread of Ray's
    loop = with_engine_loops(read_config(config.model), config).loop
    reader = PromptReader(load_tokenizer(config.model), config, loop, settings.max_prompts)
    inside = replace(settings, api_key=None)  # whoever reaches a replica is in the cluster
    with connected(ray_settings), deployed(config, inside, ray_settings) as (handle, name):
        front = RayFront(handle, name, reader, settings, ray_settings)
        server = GracefulServer(uvicorn_config(create_front_app(front)), front)
        listen(listener)
        on_ready(name)
        asyncio.run(server.serve(sockets=[listener]))
