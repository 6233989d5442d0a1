"""A client that is gone costs nothing more: its request ends and its blocks come back."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from live import Live, live, until, user

from minifer.events import ListSink
from minifer.serving import app as app_module


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    """In debug mode: every invariant is checked after every step, and freed blocks are poisoned."""
    with live({"debug": True}) as server:
        yield server


LONG = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}
CALLS = {
    "/v1/completions": {"prompt": "The for statement", **LONG},
    "/v1/chat/completions": {"messages": user("hi"), **LONG},
}


@contextmanager
def everything_is_aborted(server: Live) -> Iterator[None]:
    """Whatever the engine has finished by the end, it has aborted; and it is idle then."""
    sink = ListSink()
    server.llm.post(lambda engine: engine.events.sinks.append(sink))
    yield
    server.wait_until_idle()
    server.llm.post(lambda engine: engine.events.sinks.remove(sink))
    until(lambda: sink not in server.llm.engine.events.sinks)
    ends = [e.data["finish_reason"] for e in sink.events if e.name == "request.finished"]
    assert set(ends) <= {"abort"}, ends


def is_running(server: Live) -> bool:
    return bool(server.llm.engine.scheduler.running)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", CALLS)
def test_case_054_a_closed_socket_aborts_the_request(server: Live, route: str, stream: bool):
    with everything_is_aborted(server):
        connection = server.connect(route, **CALLS[route], stream=stream)
        until(lambda: is_running(server))
        if stream:
            assert b"200 OK" in connection.recv(4096)
        connection.close()


def test_case_054_of_several_prompts_all_are_aborted(server: Live):
    with everything_is_aborted(server):
        connection = server.connect(
            "/v1/completions", prompt=["a", "b", "c"], n=2, **{**LONG, "temperature": 1}
        )
        until(lambda: len(server.llm.engine.scheduler.running) == 6)
        connection.close()


def test_case_054_a_request_in_the_queue_is_aborted_too():
    with live({"max_num_seqs": 1}) as server, everything_is_aborted(server):
        first = server.connect("/v1/completions", **CALLS["/v1/completions"])
        until(lambda: is_running(server))
        queued = server.connect("/v1/completions", **CALLS["/v1/completions"], stream=True)
        until(lambda: len(server.llm.engine.scheduler.waiting) == 1)
        queued.close()
        until(lambda: len(server.llm.engine.scheduler.waiting) == 0)
        assert is_running(server), "the neighbour goes on"
        first.close()


def test_case_054_while_the_body_is_on_its_way(server: Live):
    connection = socket.create_connection(server._listener_address)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + b'Content-Length: 100\r\n\r\n{"prompt":')
    until(lambda: server.server.open_requests.count == 1)
    connection.close()
    server.wait_until_idle()


def test_case_054_while_the_prompt_is_being_read(server: Live, monkeypatch: pytest.MonkeyPatch):
    """Tokenising takes its time; the client is gone before the engine hears of the request."""
    tokenizer = server.server.tokenizer
    encode, entered = tokenizer.encode, []

    def slow(*args, **options):
        entered.append(1)
        time.sleep(0.3)
        return encode(*args, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    admitted = server.llm.engine._num_admitted
    connection = server.connect("/v1/completions", **CALLS["/v1/completions"])
    until(lambda: entered)
    connection.close()
    server.wait_until_idle()
    assert server.llm.engine._num_admitted == admitted


def test_a_client_that_does_not_read_holds_up_nobody(server: Live):
    """Its answer waits in its own connection; others are served, and it can still leave."""
    lazy = server.connect("/v1/completions", **CALLS["/v1/completions"], stream=True, logprobs=5)
    until(lambda: is_running(server))
    assert server.complete("a", max_tokens=3)["choices"][0]["finish_reason"] == "length"
    lazy.close()
    server.wait_until_idle()


def test_half_closing_a_connection_is_leaving(server: Live):
    """A client that says it will send no more gets what uvicorn makes of it: no leak."""
    with everything_is_aborted(server):
        connection = server.connect("/v1/completions", **CALLS["/v1/completions"])
        until(lambda: is_running(server))
        connection.shutdown(socket.SHUT_WR)
        connection.close()


def test_the_engine_does_not_wait_for_a_stream_that_never_started(server: Live):
    """The response object exists and is thrown away: its resources are closed with it."""

    async def main() -> None:
        sent = []
        body = b'{"prompt": "a", "max_tokens": 900, "stream": true}'
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            return messages.pop(0) if messages else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)
            raise OSError("the transport is torn")

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        app = app_module.create_app(server.llm, server.settings)
        with pytest.raises(OSError, match="torn"):
            await app(scope, receive, send)
        assert app.state.server.open_requests.count == 0

    asyncio.run(main())
