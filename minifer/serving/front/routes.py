"""The routes before several engines: those of a single server, so that clients cannot tell.

`/replicas` is its own: what state each replica is in.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from minifer.routing.policy import RoutingRequest
from minifer.serving.body import parse_body, read_body
from minifer.serving.errors import EXPECTED, APIError, on_error
from minifer.serving.front.metrics import FrontMetrics
from minifer.serving.front.prompt import PromptReader
from minifer.serving.limits import OpenRequests, RequireKey
from minifer.serving.page import page
from minifer.serving.settings import ServerSettings
from minifer.serving.streaming import EventStream, unless_gone

GENERATE = ("/v1/completions", "/v1/chat/completions")  # paths of requests that run the engine


class Front(ABC):
    """What the routes share, and one way to the replicas.

    settings: as of a single server; `max_queue` counts for each replica and, times `num_replicas`,
    for all of them together. Paths are as they came, with quoted characters.
    """

    def __init__(
        self,
        reader: PromptReader,
        settings: ServerSettings,
        metrics: FrontMetrics,
        num_replicas: int,
    ) -> None:
        self.reader = reader
        self.settings = settings
        self.metrics = metrics
        self.open_requests = OpenRequests(settings.max_queue * num_replicas)

    @abstractmethod
    async def generate(self, path: str, body: bytes, asked: RoutingRequest) -> Response:
        """What a replica answers to this POST of JSON. Raises `APIError` when none does."""

    @abstractmethod
    async def ask(self, path: str, body: bytes | None = None) -> Response:
        """What any replica says to something that is quickly answered: a GET, or a POST of JSON.
        Raises `APIError` when none says anything."""

    @abstractmethod
    async def ask_all(self, path: str) -> dict[str, Response | APIError]:
        """What each replica says to a GET, by its name; or why it says nothing. Raises `APIError`
        where there is none."""

    @abstractmethod
    async def health(self) -> Response:
        """Is there a replica that answers? Raises `APIError` if not."""

    @abstractmethod
    async def states(self) -> dict[str, Any]:
        """JSON-ready: how the replicas are."""

    @abstractmethod
    async def events(self, request: Request) -> Response:
        """What becomes of a request. Raises `APIError` where that cannot be told."""

    # -- the end, for `GracefulServer`

    @property
    def num_watchers(self) -> int:
        """Streams of `events` that are open."""
        return 0

    def close_watchers(self) -> None:
        """They end."""
        return

    @abstractmethod
    def abort_all(self) -> None:
        """Have every replica end its open requests."""


def create_front_app(front: Front) -> Starlette:
    """An ASGI application before several replicas. `app.state.server` is its inside."""
    key = front.settings.api_key
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/health", _health),
            Route("/health_generate", _health_generate),
            Route("/replicas", _replicas),
            Route("/metrics", _metrics),
            Route("/events", _events),
            Route("/version", _ask),
            Route("/v1/models", _ask),
            Route("/v1/models/{name:path}", _ask),
            *(Route(path, _generate, methods=["POST"]) for path in GENERATE),
            Route("/tokenize", _post, methods=["POST"]),
            Route("/detokenize", _post, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys((*EXPECTED, Exception), on_error),
        middleware=[Middleware(RequireKey, key)] if key else [],
    )
    app.router.redirect_slashes = False
    app.state.server = front
    return app


def _front(request: Request) -> Front:
    front: Front = request.app.state.server
    return front


def _path(request: Request) -> str:
    raw: bytes = request.scope["raw_path"]  # a model's name may hold quoted characters
    return raw.decode("latin-1")


async def _read(request: Request) -> bytes:
    front = _front(request)
    async with front.open_requests.arriving():
        settings = front.settings
        return await read_body(request, settings.max_body_bytes, settings.body_timeout)


async def _generate(request: Request) -> Response:
    """A route that runs an engine: holds a seat until the answer is over or the client has left."""
    front = _front(request)
    with ExitStack() as stack:
        stack.enter_context(front.open_requests.seat())
        body = await _read(request)
        response = await unless_gone(request.receive, _answer(front, request.url.path, body))
        if isinstance(response, EventStream):
            response.resources = stack.pop_all()
        return response


async def _answer(front: Front, path: str, body: bytes) -> Response:
    return await front.generate(path, body, await front.reader.read(await parse_body(body)))


async def _post(request: Request) -> Response:
    front = _front(request)
    with front.open_requests.seat():
        body = await _read(request)
        return await unless_gone(request.receive, front.ask(_path(request), body))


async def _ask(request: Request) -> Response:
    return await unless_gone(request.receive, _front(request).ask(_path(request)))


async def _health(request: Request) -> Response:
    return await unless_gone(request.receive, _front(request).health())


async def _health_generate(request: Request) -> Response:
    """Can every replica still generate? Each is asked for a token."""
    said = await unless_gone(request.receive, _front(request).ask_all("/health_generate"))
    seconds, failures = {}, []
    for name, answer in said.items():
        if isinstance(answer, APIError):
            failures.append(f"{name}: {answer.message}")
        elif answer.status_code != 200:
            failures.append(f"{name}: {json.loads(bytes(answer.body))['error']['message']}")
        else:
            seconds[name] = json.loads(bytes(answer.body))["seconds"]
    if failures:
        raise APIError(503, "; ".join(failures), code="engine_fails")
    return JSONResponse({"status": "ok", "seconds": max(seconds.values()), "replicas": seconds})


async def _replicas(request: Request) -> Response:
    return JSONResponse(await _front(request).states())


async def _metrics(request: Request) -> Response:
    """Our own numbers, then those of every replica that answers, with its name in each."""
    front = _front(request)
    pages = {}
    with contextlib.suppress(APIError):
        for name, answer in (await front.ask_all("/metrics")).items():
            if isinstance(answer, Response) and answer.status_code == 200:
                pages[name] = bytes(answer.body).decode()
    return Response(front.metrics.text(pages), media_type=CONTENT_TYPE_LATEST)


async def _events(request: Request) -> Response:
    return await _front(request).events(request)
