"""What a client sees when replicas are full, go down or die while they have its request."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from fleet_fakes import (
    DONE,
    SSE,
    Body,
    answer,
    event,
    fleet,
    gone,
    opening,
    refusal,
    run,
    stream,
    token,
    until,
)


def error_of(response: httpx.Response) -> dict:
    return response.json()["error"]


def test_an_answer_is_passed_on_byte_for_byte():
    async def main():
        async with fleet() as f:
            content = b'{ "choices" : [ ],\n "x": 1e0 }'
            f.fakes.script(
                "a", httpx.Response(200, headers={"content-type": "a/b"}, stream=Body(content))
            )
            response = await f.complete()
            assert response.content == content and response.headers["content-type"] == "a/b"
            assert response.headers["x-minifer-replica"] == "a"
            assert response.headers["x-minifer-reason"] == "turn"

    run(main())


def test_a_body_is_sent_as_it_came():
    async def main():
        async with fleet() as f:
            body = b'{"prompt":  "\xc3\xa4",\n"seed": 1}'
            headers = {"content-type": "application/json"}
            await f.http.post("/v1/completions", content=body, headers=headers)
            assert f.fakes.bodies == [body]

    run(main())


def test_a_refusal_is_passed_on_and_nobody_else_is_asked():
    async def main():
        async with fleet() as f:
            f.fakes.script("a", refusal(400, "bad"))
            response = await f.complete(temperature=-1)
            assert response.status_code == 400 and error_of(response)["code"] == "bad"
            assert f.fakes.asked == ["a"]

    run(main())


@pytest.mark.parametrize(
    "death", [gone(), httpx.RemoteProtocolError("Server disconnected without a response")]
)
def test_who_dies_before_it_answers_is_replaced_by_another(death):
    async def main():
        async with fleet() as f:
            f.fakes.script("a", death)
            response = await f.complete()
            assert response.json()["choices"][0]["text"] == "b"
            assert response.headers["x-minifer-replica"] == "b"
            assert f.fakes.asked == ["a", "b"]
            assert f.count("retries", replica="a", cause="died") == 1

    run(main())


def test_who_dies_in_the_middle_of_a_whole_answer_is_replaced_by_another():
    async def main():
        async with fleet() as f:
            half = httpx.Response(200, stream=Body(b'{"choices": [{"text": "he', gone()))
            f.fakes.script("a", half)
            response = await f.complete()
            assert response.json()["choices"][0]["text"] == "b"

    run(main())


def test_a_request_that_kills_whoever_runs_it_is_given_up():
    async def main():
        async with fleet(4, max_lost=2) as f:
            for name in "abcd":
                f.fakes.script(name, gone())
            response = await f.complete()
            assert response.status_code == 502 and error_of(response)["code"] == "replica_lost"
            assert f.fakes.asked == ["a", "b"]
            assert f.count("failures", cause="replica_lost") == 1

    run(main())


def test_who_cannot_be_reached_never_had_the_request():
    async def main():
        async with fleet(3, max_lost=1) as f:
            for name in "ab":
                f.fakes.script(name, httpx.ConnectError("refused"))
            response = await f.complete()
            assert response.json()["choices"][0]["text"] == "c"
            assert f.count("retries", replica="b", cause="unreachable") == 1

    run(main())


# -- streams


def test_a_stream_is_passed_on_byte_for_byte():
    async def main():
        chunks = [opening(0), opening(1), token("a"), token("é\u2028") + token("c"), DONE]
        async with fleet() as f:
            f.fakes.script("a", stream(*chunks))
            response = await f.chat(stream=True)
            assert response.content == b"".join(chunks)
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-minifer-replica"] == "a"

    run(main())


def test_who_dies_before_the_first_token_leaves_no_trace():
    """Its announcements have been made, and are not passed on: they bear another name."""

    async def main():
        async with fleet() as f:
            f.fakes.script("a", stream(opening(0, "one"), opening(1, "one"), gone()))
            second = [opening(0, "two"), opening(1, "two"), token("x", "two"), DONE]
            f.fakes.script("b", stream(*second))
            response = await f.chat(stream=True)
            assert response.content == b"".join(second)

    run(main())


def test_after_the_first_token_a_death_is_an_error_and_the_end():
    async def main():
        async with fleet() as f:
            f.fakes.script("a", stream(opening(), token("x"), gone()))
            response = await f.chat(stream=True)
            events = response.content.split(b"\n\n")
            assert events[:2] == [opening()[:-2], token("x")[:-2]] and events[3:] == [b""]
            error = json.loads(events[2].removeprefix(b"data: "))["error"]
            assert error["code"] == "replica_lost" and error["type"] == "server_error"
            assert "a died" in error["message"]
            assert f.fakes.asked == ["a"]
            assert f.count("failures", cause="replica_lost") == 1

    run(main())


def test_half_an_event_is_not_passed_on():
    async def main():
        async with fleet() as f:
            f.fakes.script("a", stream(token("x") + token("y")[:-20], gone()))
            response = await f.complete(stream=True)
            first, second, rest = response.content.split(b"\n\n")
            assert first == token("x")[:-2] and b"replica_lost" in second and rest == b""

    run(main())


def test_a_stream_of_nothing_but_announcements_is_passed_on():
    async def main():
        async with fleet() as f:
            f.fakes.script("a", stream(opening(), DONE))
            assert (await f.chat(stream=True)).content == opening() + DONE

    run(main())


def test_an_error_of_the_request_itself_is_passed_on():
    async def main():
        failed = event({"error": {"message": "no", "code": "request_failed"}})
        async with fleet() as f:
            f.fakes.script("a", stream(opening(), failed))
            assert (await f.chat(stream=True)).content == opening() + failed
            assert f.fakes.asked == ["a"]

    run(main())


def test_an_engine_that_stops_before_the_first_token_is_replaced():
    async def main():
        stopped = event({"error": {"message": "closed", "code": "engine_stopped"}})
        async with fleet() as f:
            f.fakes.script("a", stream(opening(), stopped))
            f.fakes.script("b", stream(token("x"), DONE))
            assert (await f.chat(stream=True)).content == token("x") + DONE

    run(main())


def test_a_second_replica_that_refuses_ends_the_stream_with_its_words():
    async def main():
        async with fleet() as f:
            f.fakes.script("a", stream(opening(), gone()))
            f.fakes.script("b", refusal(400, "bad"))
            response = await f.chat(stream=True)
            assert response.status_code == 200
            assert json.loads(response.content.removeprefix(b"data: "))["error"]["code"] == "bad"

    run(main())


def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error():
    async def main():
        async with fleet(2) as f:
            f.fakes.script("a", stream(opening(), gone()))
            f.fakes.script("b", refusal(429, "queue_full"))
            response = await f.chat(stream=True)
            error = json.loads(response.content.removeprefix(b"data: "))["error"]
            assert error["code"] == "queue_full" and error["type"] == "rate_limit_error"

    run(main())


# -- full, or going down


def test_a_full_replica_is_passed_over():
    async def main():
        async with fleet() as f:
            f.fakes.script("a", refusal(429, "queue_full"))
            assert (await f.complete()).json()["choices"][0]["text"] == "b"
            assert f.count("retries", replica="a", cause="full") == 1

    run(main())


def test_when_all_are_full_the_client_is_told_when_to_come_back():
    async def main():
        async with fleet(3) as f:
            for name in "abc":
                f.fakes.script(name, refusal(429, "queue_full", **{"Retry-After": "7"}))
            response = await f.complete()
            assert response.status_code == 429 and response.headers["retry-after"] == "7"
            assert error_of(response)["code"] == "queue_full"
            assert sorted(f.fakes.asked) == ["a", "b", "c"]
            assert f.count("failures", cause="full") == 1

    run(main())


def test_a_replica_that_is_going_down_is_passed_over():
    async def main():
        async with fleet() as f:
            f.fakes.script("a", refusal(503, "shutting_down"))
            assert (await f.complete()).json()["choices"][0]["text"] == "b"

    run(main())


def test_a_request_waits_for_a_replica_that_is_coming():
    async def main():
        async with fleet(1) as f:
            f.fakes.may_start.clear()
            f.fakes.process("a").end(-9)
            await until(lambda: not f.server.supervisor.available)
            asking = asyncio.create_task(f.complete())
            await until(lambda: f.server.open_requests.count == 1)
            f.fakes.may_start.set()
            assert (await asking).status_code == 200 and f.fakes.asked == ["a"]
            assert len(f.fakes.processes["a"]) == 2

    run(main())


def test_a_request_does_not_wait_for_ever():
    async def main():
        async with fleet(1, wait_timeout=0.05) as f:
            never = RuntimeError("no")
            f.fakes.start_errors["a"] = [never] * 100
            f.fakes.process("a").end(-9)
            await until(lambda: not f.server.supervisor.available)
            response = await f.complete()
            assert response.status_code == 503 and error_of(response)["code"] == "no_replica"
            assert int(response.headers["retry-after"]) > 0
            assert (await f.http.get("/health")).status_code == 503

    run(main())


def test_the_only_replica_is_asked_again_when_it_is_a_new_process():
    async def main():
        async with fleet(1) as f:

            async def die():
                f.fakes.process("a").end(-9)
                return gone()

            f.fakes.script("a", die)
            response = await f.complete()
            assert response.status_code == 200 and f.fakes.asked == ["a", "a"]

    run(main())


# -- clients that leave


async def leave_after(f, body: dict, served: asyncio.Event) -> list[dict]:
    """A POST whose client goes away when `served` is set; what it was sent until then."""
    content = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[dict] = []

    async def receive():
        if messages:
            return messages.pop()
        await served.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await f.app(scope, receive, send)
    return sent


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_a_stream_leaves_the_replica_too(begun: bool):
    async def main():
        async with fleet() as f:
            served = asyncio.Event()

            async def hang():
                served.set()
                await asyncio.Event().wait()

            body = Body(token("x") if begun else opening(), hang)
            f.fakes.script("a", httpx.Response(200, headers=SSE, stream=body))
            await leave_after(f, {"prompt": "a", "stream": True}, served)
            assert body.closed
            assert not f.server.supervisor.replicas[0].is_suspect

    run(main())


def test_a_client_that_leaves_before_the_answer_begins():
    async def main():
        async with fleet() as f:
            served = asyncio.Event()

            async def hang():
                served.set()
                await asyncio.Event().wait()
                return answer()

            f.fakes.script("a", hang)
            await leave_after(f, {"prompt": "a"}, served)

    run(main())


def test_a_stream_that_never_began_leaves_the_replica():
    async def main():
        async with fleet() as f:
            body = Body(token("x"))
            f.fakes.script("a", httpx.Response(200, headers=SSE, stream=body))

            async def send(message):
                raise OSError("the transport is torn")

            messages = [{"type": "http.request", "body": b'{"prompt":"a"}', "more_body": False}]

            async def receive():
                return messages.pop() if messages else await asyncio.Event().wait()

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/completions",
                "query_string": b"",
                "headers": [(b"content-type", b"application/json")],
            }
            with pytest.raises(OSError, match="torn"):
                await f.app(scope, receive, send)
            assert body.closed

    run(main())
