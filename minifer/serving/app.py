"""The routes. `create_app` wires one engine to one Starlette application.

::

    client ─▶ RequireKey ─▶ route ─▶ seat? body? ─▶ fields ─▶ AsyncLLM ─▶ engine thread
           ◀─ JSON, or server-sent events ◀───────────────── outputs ◀──┘

Without a key (`--api-key`) every route is open; with one, `/` and `/health` still are.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import minifer
from minifer.async_llm import AsyncLLM
from minifer.engine import Engine
from minifer.postprocessing import reasoning, tool_calls
from minifer.postprocessing.reasoning import writes_reasoning
from minifer.serving.body import read_json
from minifer.serving.chat import read_chat
from minifer.serving.completions import read_completion
from minifer.serving.errors import EXPECTED, APIError, on_error
from minifer.serving.event_stream import EventHub, Subscriber, events
from minifer.serving.generation import Call, Generation
from minifer.serving.health import health, health_generate, stored_canary
from minifer.serving.kv_events import KVSubscription, kv_events
from minifer.serving.limits import OpenRequests, RequireKey
from minifer.serving.logprobs import TokenBytes
from minifer.serving.metrics import ServerMetrics
from minifer.serving.page import page
from minifer.serving.settings import ServerSettings
from minifer.serving.streaming import EventStream, unless_gone
from minifer.serving.tokenize import detokenize, tokenize
from minifer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minifer.serving.disaggregation.worker import KVWorker


class Server:
    """What the routes share. Raises `ValueError` for an engine without a tokenizer."""

    def __init__(
        self, llm: AsyncLLM, settings: ServerSettings, worker: KVWorker | None = None
    ) -> None:
        if llm.engine.tokenizer is None:
            raise ValueError("a server needs a tokenizer, this engine has none")
        self.llm = llm
        self.settings = settings
        self.worker = worker
        self.tokenizer: Tokenizer = llm.engine.tokenizer
        self.model_name = settings.served_model_name or str(llm.engine.config.model)
        self.created = int(time.time())
        self.open_requests = OpenRequests(settings.max_queue)
        self.metrics = ServerMetrics(llm, self.model_name)
        if worker is not None:
            self.metrics.registry.register(worker.collector(self.model_name))
        self.hub = EventHub()
        self.kv_subscription: KVSubscription | None = None
        self.token_bytes = TokenBytes(self.tokenizer)
        self.writes_reasoning = writes_reasoning(self.tokenizer)
        self.hides_tags = any(self._is_hidden(tag) for tag in (tool_calls.START, reasoning.START))
        self.canary = stored_canary(llm.engine)

    def _is_hidden(self, tag: str) -> bool:
        """Is a tag a special token, whose text `skip_special_tokens` would leave out?"""
        ids = self.tokenizer.encode(tag, add_special_tokens=False)
        return tag not in self.tokenizer.decode(ids)

    def check_model(self, fields: Mapping[str, Any]) -> None:
        """One model is served; a request may name it, and no other."""
        name = fields.get("model", self.model_name)
        if name != self.model_name:
            message = f"model {name!r:.80} is not served here, {self.model_name!r} is"
            raise APIError(404, message, param="model", code="model_not_found")

    def check_token_ids(self, lists: list[list[int]], name: str) -> None:
        size = self.llm.engine.limits.vocab_size
        for ids in lists:
            for token_id in ids:
                if not 0 <= token_id < size:
                    message = f"{name} must be token ids in [0, {size}), got {token_id}"
                    raise APIError(400, message, param=name)

    def attach_hub(self, engine: Engine) -> None:
        if self.hub not in engine.events.sinks:
            engine.events.sinks.append(self.hub)

    def detach_hub(self, engine: Engine) -> None:
        if not self.hub.subscribers and self.hub in engine.events.sinks:
            engine.events.sinks.remove(self.hub)

    @property
    def num_watchers(self) -> int:
        return len(self.hub.subscribers) + (self.kv_subscription is not None)

    def close_watchers(self) -> None:
        self.hub.close()
        if self.kv_subscription is not None:
            self.kv_subscription.ended = True

    def abort_all(self) -> None:
        self.llm.abort_all()

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        if self.worker is not None:
            await self.worker.close()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self.hub.subscribers.remove(subscriber)
        self.llm.post(self.detach_hub)


def create_app(
    llm: AsyncLLM, settings: ServerSettings | None = None, worker: KVWorker | None = None
) -> Starlette:
    """An ASGI application on an engine, which it does not close. `app.state.server` is its inside.

    worker: this engine's part in prefill/decode disaggregation, closed when the application's
    lifespan ends. Raises `ValueError` for an engine without a tokenizer.
    """
    settings = settings if settings is not None else ServerSettings()
    server = Server(llm, settings, worker)
    routes = [
        Route("/", page),
        Route("/health", health),
        Route("/health_generate", health_generate),
        Route("/version", _version),
        Route("/metrics", _metrics),
        Route("/events", _events),
        Route("/kv_events", _kv_events),
        Route("/v1/models", _models),
        Route("/v1/models/{name:path}", _model),
        Route("/v1/completions", _generate(read_completion, _answer), methods=["POST"]),
        Route("/v1/chat/completions", _generate(read_chat, _answer), methods=["POST"]),
        Route("/tokenize", _post(tokenize), methods=["POST"]),
        Route("/detokenize", _post(detokenize), methods=["POST"]),
    ]
    if worker is not None and worker.prefill_routes is not None:
        for path, read in (("/completions", read_completion), ("/chat/completions", read_chat)):
            prefill = worker.guarded(_generate(read, _prefill))
            routes.append(Route(f"{worker.prefill_routes}{path}", prefill, methods=["POST"]))
    app = Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys((*EXPECTED, Exception), on_error),
        middleware=[Middleware(RequireKey, settings.api_key)] if settings.api_key else [],
        lifespan=server.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = server
    return app


Endpoint = Callable[[Request], Awaitable[Response]]
# From the body of a request to what it wants and its prompts; and from there to an answer.
Read = Callable[[Server, Mapping[str, Any]], Awaitable[tuple[Call, Generation]]]
Answer = Callable[[Request, Read, dict[str, Any], ExitStack], Coroutine[Any, Any, Response]]


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def _generate(read: Read, answer: Answer) -> Endpoint:
    """A route that runs the engine: takes a seat before it reads the body, and gives it back with
    all else when the answer is over or the client has left."""

    async def endpoint(request: Request) -> Response:
        server = _server(request)
        with ExitStack() as stack:
            stack.enter_context(server.open_requests.seat())
            body = await _read_body(request)
            response = await unless_gone(request.receive, answer(request, read, body, stack))
            if isinstance(response, EventStream):
                response.resources = stack.pop_all()
            return response

    return endpoint


async def _answer(request: Request, read: Read, body: dict[str, Any], stack: ExitStack) -> Response:
    server = _server(request)
    call, generation = await read(server, body)
    await call.check(generation)
    if server.worker is not None:
        await server.worker.fetch(request, generation, stack)
    await generation.open(stack, call.fields)
    if call.fields.get("stream"):
        return EventStream(call.stream(generation))
    return JSONResponse(await call.answer(generation))


async def _prefill(
    request: Request, read: Read, body: dict[str, Any], stack: ExitStack
) -> Response:
    """Only compute the prompts, for a decode worker (`serving/disaggregation`)."""
    server = _server(request)
    assert server.worker is not None  # who has given us this route
    _, generation = await read(server, body)
    stack.enter_context(server.open_requests.seat(len(generation.prompts) - 1))
    return await server.worker.prefill(request, generation, stack)


def _post(handler: Callable[[Server, Mapping[str, Any]], Awaitable[Response]]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        server = _server(request)
        with server.open_requests.seat():
            return await handler(server, await _read_body(request))

    return endpoint


async def _read_body(request: Request) -> dict[str, Any]:
    server = _server(request)
    async with server.open_requests.arriving():
        settings = server.settings
        return await read_json(request, settings.max_body_bytes, settings.body_timeout)


async def _version(_: Request) -> Response:
    return JSONResponse({"version": minifer.__version__})


async def _metrics(request: Request) -> Response:
    return Response(_server(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _events(request: Request) -> Response:
    return await events(_server(request), request)


async def _kv_events(request: Request) -> Response:
    return await kv_events(_server(request), request)


def _model_card(server: Server) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "minifer",
        "max_model_len": server.llm.engine.limits.max_model_len,
    }


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_card(_server(request))]})


async def _model(request: Request) -> Response:
    server = _server(request)
    server.check_model({"model": request.path_params["name"]})
    return JSONResponse(_model_card(server))
