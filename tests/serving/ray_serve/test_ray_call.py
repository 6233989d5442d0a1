"""An ASGI application asked in-process, as a Ray replica does: needs no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from minifer.routing.policy import Decision, RoutingRequest
from minifer.serving.ray_serve.call import Call, run_app


def call(path: str = "/", body: bytes = b"", method: str = "POST") -> Call:
    headers = [(b"content-type", b"application/json")]
    return Call(RoutingRequest("r", 3, (b"a", b"b")), method, path, b"x=1", headers, body)


async def answer(app, asked: Call) -> list[dict]:
    return [message async for message in run_app(app, asked)]


async def echo(request: Request) -> JSONResponse:
    return JSONResponse(
        {
            "method": request.method,
            "path": request.url.path,
            "query": dict(request.query_params),
            "type": request.headers["content-type"],
            "body": (await request.body()).decode(),
        },
        status_code=201,
    )


def test_the_application_gets_the_request_and_its_answer_comes_back():
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    start, body = asyncio.run(answer(app, call("/echo", b"{}")))
    assert start["type"] == "http.response.start" and start["status"] == 201
    assert json.loads(body["body"]) == {
        "method": "POST",
        "path": "/echo",
        "query": {"x": "1"},
        "type": "application/json",
        "body": "{}",
    }


def test_quoted_characters_of_a_path_reach_the_route_as_what_they_stand_for():
    async def named(request: Request) -> JSONResponse:
        return JSONResponse(request.path_params["name"])

    app = Starlette(routes=[Route("/models/{name:path}", named)])
    _, body = asyncio.run(answer(app, call("/models/a%2Fb%20c", method="GET")))
    assert json.loads(body["body"]) == "a/b c"


def test_an_unknown_route_is_the_applications_404():
    start, *_ = asyncio.run(answer(Starlette(), call("/nowhere")))
    assert start["status"] == 404


def test_pieces_of_a_stream_come_as_they_are_made():
    made: list[int] = []

    async def pieces():
        for i in range(3):
            made.append(i)
            yield str(i)

    async def stream(_: Request) -> StreamingResponse:
        return StreamingResponse(pieces())

    async def seen() -> list[tuple[bytes, int]]:
        app = Starlette(routes=[Route("/", stream, methods=["POST"])])
        out = []
        async with contextlib.aclosing(run_app(app, call())) as messages:
            async for message in messages:
                if message.get("body"):
                    out.append((message["body"], len(made)))
                await asyncio.sleep(0)
        return out

    assert [body for body, _ in asyncio.run(seen())] == [b"0", b"1", b"2"]


def test_leaving_cancels_the_application_before_it_returns():
    events: list[str] = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as who gives something back
            events.append("ended")

    async def leave() -> None:
        messages = run_app(app, call())
        await anext(messages)
        await messages.aclose()
        events.append("left")

    asyncio.run(leave())
    assert events == ["ended", "left"]


def test_cancelling_the_reader_cancels_the_application():
    ended = []

    async def app(scope, receive, send):
        try:
            await receive()
            await receive()  # nobody leaves: this waits
        finally:
            ended.append(True)

    async def cancel() -> None:
        task = asyncio.create_task(answer(app, call()))
        await asyncio.sleep(0)
        while not asyncio.all_tasks() - {asyncio.current_task(), task}:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert ended == [True]


def test_a_failure_before_the_answer_is_raised():
    async def app(scope, receive, send):
        raise ZeroDivisionError("no answer")

    with pytest.raises(ZeroDivisionError):
        asyncio.run(answer(app, call()))


def test_an_answer_that_just_stops_is_an_error():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    with pytest.raises(RuntimeError, match="before its answer"):
        asyncio.run(answer(app, call()))


def test_a_failure_after_a_complete_answer_is_logged(caplog):
    async def fails(_: Request):
        raise ZeroDivisionError

    app = Starlette(routes=[Route("/", fails, methods=["POST"])])  # answers 500 and raises
    start, *_ = asyncio.run(answer(app, call()))
    assert start["status"] == 500
    assert "POST / failed" in caplog.text


def test_what_only_the_router_reads_does_not_travel():
    asked = call(body=b"{}")
    asked.decision = Decision("a", 32, "prefix")
    asked.avoid, asked.replicas = ("b",), ("a", "b")
    asked.on_first_token = asked.on_left = lambda: None
    arrived = pickle.loads(pickle.dumps(asked))
    assert arrived.request == RoutingRequest("r", 3)
    assert (arrived.body, arrived.decision, arrived.avoid) == (b"{}", asked.decision, ("b",))
    assert (arrived.replicas, arrived.on_first_token, arrived.on_left) == ((), None, None)
    assert asked.request.prefix_keys == (b"a", b"b") and asked.on_first_token is not None
