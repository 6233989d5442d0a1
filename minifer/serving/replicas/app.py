"""The router's routes: those of a single server, so that clients cannot tell the difference.

::

    client ─▶ RequireKey ─▶ route ─▶ seat, body ─▶ PromptReader ─▶ Forwarder ─▶ a replica
           ◀─ its answer, byte for byte, and `x-minifer-replica` ◀──────────────┘

`/replicas` is its own: what state each replica is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from typing import Any

import httpx
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from minifer.serving.body import parse_body, read_body
from minifer.serving.errors import EXPECTED, APIError, on_error
from minifer.serving.limits import OpenRequests, RequireKey
from minifer.serving.page import page
from minifer.serving.replicas.errand import Fleet
from minifer.serving.replicas.forward import forward
from minifer.serving.replicas.metrics import is_exact
from minifer.serving.replicas.prompt import PromptReader
from minifer.serving.replicas.replica import Replica
from minifer.serving.replicas.watching import Watchers
from minifer.serving.settings import ServerSettings
from minifer.serving.streaming import EventStream, unless_gone

ASK_SECONDS = 35.0  # for an answer that needs no generation, or one token
_GENERATE = ("/v1/completions", "/v1/chat/completions")


class RouterServer:
    """What the routes share. settings: as of a single server; `max_queue` counts for each replica
    and here for all of them together."""

    def __init__(
        self,
        fleet: Fleet,
        reader: PromptReader,
        settings: ServerSettings,
    ) -> None:
        self.fleet = fleet
        self.supervisor = fleet.supervisor
        self.reader = reader
        self.settings = settings
        self.open_requests = OpenRequests(settings.max_queue * len(fleet.supervisor.replicas))
        self.watchers = Watchers(fleet.supervisor, fleet.http, fleet.headers)

    @property
    def num_watchers(self) -> int:
        return self.watchers.count

    def close_watchers(self) -> None:
        self.watchers.close()

    def abort_all(self) -> None:
        self.supervisor.cut_short()

    async def ask(self, replica: Replica, path: str, **options: Any) -> httpx.Response:
        """Ask a replica something that is quickly answered. Raises `httpx.TransportError`."""
        method = options.pop("method", "GET")
        headers = {**self.fleet.headers, **options.pop("headers", {})}
        return await self.fleet.http.request(
            method, replica.url + path, headers=headers, timeout=ASK_SECONDS, **options
        )

    async def ask_any(self, path: str, **options: Any) -> httpx.Response:
        """The answer of the first replica that gives one. Raises `APIError` 503 for none."""
        for replica in sorted(self.supervisor.available, key=lambda r: r.num_open):
            try:
                answer = await self.ask(replica, path, **options)
            except httpx.TransportError:
                self.supervisor.suspect(replica)
                continue
            if answer.status_code != 503:
                return answer
        raise APIError(
            503, "no replica is there to answer", code="no_replica", headers={"Retry-After": "5"}
        )


def create_router_app(server: RouterServer) -> Starlette:
    """An ASGI application before several replicas. `app.state.server` is its inside."""
    key = server.settings.api_key
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/health", _health),
            Route("/health_generate", _health_generate),
            Route("/replicas", _replicas),
            Route("/metrics", _metrics),
            Route("/events", _events),
            Route("/version", _ask_any),
            Route("/v1/models", _ask_any),
            Route("/v1/models/{name:path}", _ask_any),
            *(Route(path, _generate, methods=["POST"]) for path in _GENERATE),
            Route("/tokenize", _post, methods=["POST"]),
            Route("/detokenize", _post, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys((*EXPECTED, Exception), on_error),
        middleware=[Middleware(RequireKey, key)] if key else [],
    )
    app.router.redirect_slashes = False
    app.state.server = server
    return app


def _server(request: Request) -> RouterServer:
    server: RouterServer = request.app.state.server
    return server


async def _read(request: Request) -> bytes:
    server = _server(request)
    async with server.open_requests.arriving():
        settings = server.settings
        return await read_body(request, settings.max_body_bytes, settings.body_timeout)


async def _generate(request: Request) -> Response:
    """A route that runs an engine: holds a seat until the answer is over or the client has left."""
    server = _server(request)
    with ExitStack() as stack:
        stack.enter_context(server.open_requests.seat())
        body = await _read(request)
        response = await unless_gone(request.receive, _forward(server, request.url.path, body))
        if isinstance(response, EventStream):
            response.resources = stack.pop_all()
        return response


async def _forward(server: RouterServer, path: str, body: bytes) -> Response:
    asked = await server.reader.read(await parse_body(body))
    return await forward(server.fleet, path, body, asked)


async def _post(request: Request) -> Response:
    server = _server(request)
    with server.open_requests.seat():
        body = await _read(request)
        return await _passed_on(
            request,
            server.ask_any(
                request.url.path,
                method="POST",
                content=body,
                headers={"Content-Type": "application/json"},
            ),
        )


async def _ask_any(request: Request) -> Response:
    path = request.scope["raw_path"].decode("latin-1")  # a model's name may hold quoted characters
    return await _passed_on(request, _server(request).ask_any(path))


async def _passed_on(request: Request, asking: Any) -> Response:
    answer: httpx.Response = await unless_gone(request.receive, asking)
    kind = answer.headers.get("content-type")
    return Response(answer.content, answer.status_code, media_type=kind)


async def _health(request: Request) -> Response:
    """Is there a replica that answers?"""
    if not _server(request).supervisor.available:
        raise APIError(503, "no replica is healthy", code="no_replica")
    return JSONResponse({"status": "ok"})


async def _health_generate(request: Request) -> Response:
    """Can every replica still generate? Each is asked for a token."""
    server = _server(request)
    replicas = server.supervisor.available
    if not replicas:
        raise APIError(503, "no replica is healthy", code="no_replica")
    asking = [server.ask(replica, "/health_generate") for replica in replicas]
    answers = await unless_gone(request.receive, _all(asking))
    failures = []
    for replica, answer in zip(replicas, answers, strict=True):
        if isinstance(answer, BaseException):
            failures.append(f"{replica.name}: {type(answer).__name__}")
        elif answer.status_code != 200:
            failures.append(f"{replica.name}: {answer.json()['error']['message']}")
    if failures:
        raise APIError(503, "; ".join(failures), code="engine_fails")
    seconds = {r.name: a.json()["seconds"] for r, a in zip(replicas, answers, strict=True)}
    return JSONResponse({"status": "ok", "seconds": max(seconds.values()), "replicas": seconds})


async def _all(asking: Sequence[Awaitable[httpx.Response]]) -> list[Any]:
    return await asyncio.gather(*asking, return_exceptions=True)


async def _replicas(request: Request) -> Response:
    server = _server(request)
    router = server.fleet.router
    rows = [
        {**r.to_dict(), "kv_is_exact": is_exact(router, r.name)} for r in server.supervisor.replicas
    ]
    return JSONResponse({"replicas": rows})


async def _metrics(request: Request) -> Response:
    """Our own numbers, then those of every replica that answers, with its name in each."""
    server = _server(request)
    replicas = server.supervisor.available
    answers = await _all([server.ask(replica, "/metrics") for replica in replicas])
    pages = {
        replica.name: answer.text
        for replica, answer in zip(replicas, answers, strict=True)
        if isinstance(answer, httpx.Response) and answer.status_code == 200
    }
    text = server.fleet.metrics.text(pages)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _events(request: Request) -> Response:
    server = _server(request)
    return await server.watchers.watch(request, server.settings.max_subscribers)
