"""The routes before Ray's replicas: those of a single server, so that clients cannot tell.

::

    client ─▶ RequireKey ─▶ route ─▶ seat, body ─▶ PromptReader ─▶ Errand ─▶ Ray ─▶ a replica
           ◀─ its answer, byte for byte, and `x-minifer-replica` ◀──────────────────┘

`/replicas` is its own: what Ray says of the deployment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from contextlib import ExitStack
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from minifer.routing.policy import RoutingRequest
from minifer.serving.body import parse_body, read_body
from minifer.serving.errors import EXPECTED, APIError, on_error
from minifer.serving.limits import OpenRequests, RequireKey
from minifer.serving.page import page
from minifer.serving.ray_call import ABORT, GENERATE, Call
from minifer.serving.ray_errand import RayErrand
from minifer.serving.ray_metrics import RayMetrics
from minifer.serving.ray_settings import RaySettings
from minifer.serving.replicas.errand import REPLICA_HEADER
from minifer.serving.replicas.forward import answer_of
from minifer.serving.replicas.prompt import PromptReader
from minifer.serving.settings import ServerSettings
from minifer.serving.streaming import EventStream, unless_gone

log = logging.getLogger("minifer.serving.ray")

_JSON = [(b"content-type", b"application/json")]


class RayFront:
    """What the routes share. settings: as of a single server; `max_queue` counts for each replica
    and here for as many as there may be together.

    handle: of the replicas' streaming method. app_name: what Ray calls the application.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        app_name: str,
        reader: PromptReader,
        settings: ServerSettings,
        ray_settings: RaySettings,
    ) -> None:
        self.handle = handle
        self.app_name = app_name
        self.reader = reader
        self.settings = settings
        self.ray_settings = ray_settings
        self.open_requests = OpenRequests(settings.max_queue * ray_settings.max_replicas)
        self.metrics = RayMetrics()
        self._aborting: asyncio.Task[Any] | None = None

    async def answer(self, call: Call) -> Response:
        """What a replica answers. Raises `APIError` when none does."""
        return await answer_of(RayErrand(self.handle, call, self.ray_settings, self.metrics))

    async def ask(self, path: str, only: str | None = None, **more: Any) -> Response:
        """What a replica says to something that is quickly answered. Raises `APIError`."""
        return await self.answer(self._call(path, only, **more))

    async def ask_all(self, path: str) -> dict[str, Response | APIError]:
        """What each replica says, by its name; or why it says nothing. Raises `APIError` where
        there is none."""
        first = self._call(path)
        answer = await self.answer(first)
        others = [name for name in first.replicas if name != _replica_of(answer)]
        answers = await asyncio.gather(
            *(self.ask(path, name) for name in others), return_exceptions=True
        )
        said: dict[str, Response | APIError] = {_replica_of(answer): answer}
        for name, other in zip(others, answers, strict=True):
            if not isinstance(other, (Response, APIError)):
                raise other
            said[name] = other
        self.metrics.num_replicas.set(len(first.replicas))
        return said

    def _call(self, path: str, only: str | None = None, **more: Any) -> Call:
        return Call(RoutingRequest(uuid.uuid4().hex, 0), path=path, only=only, **more)

    # -- the end, for `GracefulServer`

    @property
    def num_watchers(self) -> int:
        return 0

    def close_watchers(self) -> None:
        pass

    def abort_all(self) -> None:
        self._aborting = asyncio.create_task(self._abort_all())

    async def _abort_all(self) -> None:
        try:
            await self.ask_all(ABORT)
        except APIError as error:
            log.warning("open requests could not be aborted: %s", error)


def create_front_app(front: RayFront) -> Starlette:
    """An ASGI application before Ray's replicas. `app.state.server` is its inside."""
    key = front.settings.api_key
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/health", _ask),
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


def _front(request: Request) -> RayFront:
    front: RayFront = request.app.state.server
    return front


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


async def _answer(front: RayFront, path: str, body: bytes) -> Response:
    asked = await front.reader.read(await parse_body(body))
    return await front.answer(Call(asked, "POST", path, headers=_JSON, body=body))


async def _post(request: Request) -> Response:
    front = _front(request)
    with front.open_requests.seat():
        body = await _read(request)
        asking = front.ask(request.url.path, method="POST", headers=_JSON, body=body)
        return await unless_gone(request.receive, asking)


async def _ask(request: Request) -> Response:
    return await unless_gone(request.receive, _front(request).ask(request.url.path))


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
    """How many replicas are in which state, and what Ray says of them."""
    front = _front(request)
    status = await asyncio.to_thread(serve.status)
    application = status.applications.get(front.app_name)
    if application is None:
        raise APIError(503, f"Ray knows no application {front.app_name}", code="no_replica")
    (deployment,) = application.deployments.values()
    return JSONResponse(
        {
            "application": front.app_name,
            "status": deployment.status.value,
            "message": deployment.message or None,
            "replicas": dict(deployment.replica_states),
        }
    )


async def _metrics(request: Request) -> Response:
    """Our own numbers, then those of every replica that answers, with its name in each."""
    front = _front(request)
    pages = {}
    try:
        for name, answer in (await front.ask_all("/metrics")).items():
            if isinstance(answer, Response) and answer.status_code == 200:
                pages[name] = bytes(answer.body).decode()
    except APIError:
        front.metrics.num_replicas.set(0)
    return Response(front.metrics.text(pages), media_type=CONTENT_TYPE_LATEST)


async def _events(_: Request) -> Response:
    raise APIError(
        404,
        "a request's events are not served with --ray: which replica will get it is not known "
        "before it comes",
        code="unknown_route",
    )


def _replica_of(answer: Response) -> str:
    return answer.headers[REPLICA_HEADER]
