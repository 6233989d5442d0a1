"""The router's routes are a single server's: keys, limits, probes, numbers."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fleet_fakes import Body, event, fleet, gone, refusal, run, until

from minifer.serving.replicas.run import environment


def test_a_key_is_asked_for_and_not_passed_on():
    async def main():
        async with fleet(server={"api_key": "sk-outside"}) as f:
            assert (await f.complete()).status_code == 401
            assert (await f.http.get("/metrics")).status_code == 401
            assert (await f.http.get("/replicas")).status_code == 401
            assert (await f.http.get("/health")).status_code == 200
            assert f.fakes.asked == []
            key = {"Authorization": "Bearer sk-outside"}
            response = await f.http.post("/v1/completions", json={"prompt": "a"}, headers=key)
            assert response.status_code == 200
            inside = f.fakes.keys.pop()
            assert inside.startswith("Bearer ") and "sk-outside" not in inside and len(inside) > 30

    run(main())


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b'{"prompt": "' + b"a" * 400 + b'"}', {}, 413),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}, 415),
        (b'{"prompt": "a"}', {"content-encoding": "gzip"}, 415),
    ],
)
def test_what_is_no_request_bothers_no_replica(content: bytes, headers: dict, status: int):
    async def main():
        async with fleet(server={"max_body_bytes": 400}) as f:
            given = {"content-type": "application/json", **headers}
            response = await f.http.post("/v1/completions", content=content, headers=given)
            assert response.status_code == status and response.json()["error"]["message"]
            assert f.fakes.asked == []

    run(main())


def test_what_the_replicas_must_judge_they_judge():
    async def main():
        async with fleet() as f:
            await f.complete(no_such_field=1)
            assert f.fakes.asked == ["a"]

    run(main())


def test_more_than_all_replicas_take_is_refused_at_the_door():
    async def main():
        async with fleet(2, server={"max_queue": 1}) as f:
            finish = asyncio.Event()

            async def wait():
                await finish.wait()
                return httpx.Response(200, stream=Body(b"{}"))

            f.fakes.script("a", wait)
            f.fakes.script("b", wait)
            asking = [asyncio.create_task(f.complete()) for _ in range(2)]
            await until(lambda: len(f.fakes.asked) == 2)
            refused = await f.complete()
            assert refused.status_code == 429 and refused.headers["retry-after"]
            finish.set()
            assert [r.status_code for r in await asyncio.gather(*asking)] == [200, 200]

    run(main())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/a%2Fb", "/version"])
def test_any_replica_answers_what_all_know(path: str):
    async def main():
        async with fleet() as f:
            response = await f.http.get(path)
            assert response.text == "page of a"
            f.fakes.unreachable.add("a")
            assert (await f.http.get(path)).text == "page of b"
            assert f.fakes.paths[-1] == path

    run(main())


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_any_replica_tokenises(path: str):
    async def main():
        async with fleet() as f:
            response = await f.http.post(path, json={"prompt": "a"})
            assert response.status_code == 200 and f.fakes.log == [("a", path)]
            f.fakes.script("a", gone())
            await f.http.post(path, json={"prompt": "a"})
            assert f.fakes.asked == ["a", "a", "b"]

    run(main())


def test_a_refusal_says_when_to_return():
    async def main():
        async with fleet(1) as f:
            f.fakes.script("a", refusal(429, "queue_full", **{"retry-after": "1"}))
            refused = await f.http.post("/tokenize", json={"prompt": "a"})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"

    run(main())


def test_routes_that_are_none():
    async def main():
        async with fleet() as f:
            missing = await f.http.get("/nothing")
            assert missing.status_code == 404 and "no route" in missing.json()["error"]["message"]
            assert (await f.http.get("/v1/completions")).status_code == 405
            assert "<script>" in (await f.http.get("/")).text

    run(main())


# -- probes and numbers


def test_every_replica_must_generate():
    async def main():
        async with fleet() as f:
            for name in "ab":
                f.fakes.pages[f"{name}/health_generate"] = '{"status":"ok","seconds":0.5}'
            well = await f.http.get("/health_generate")
            assert well.json()["replicas"] == {"a": 0.5, "b": 0.5}
            f.fakes.unreachable.add("b")
            ill = await f.http.get("/health_generate")
            assert ill.status_code == 503 and "b: ConnectError" in ill.json()["error"]["message"]

    run(main())


def test_the_numbers_of_all_replicas_stand_on_one_page():
    async def main():
        async with fleet(3) as f:
            await f.complete()
            f.fakes.pages["c/metrics"] = "this is no page {"
            text = (await f.http.get("/metrics")).text
            assert 'x_total{model="m",replica="a"} 1.0' in text
            assert 'x_total{model="m",replica="b"} 1.0' in text
            assert text.count("# TYPE x_total counter") == 1
            assert 'minifer_router_requests_total{reason="turn",replica="a"} 1.0' in text
            assert "minifer_router_replicas_healthy 3.0" in text
            assert 'minifer_router_cached_tokens_expected_total{replica="b"} 0.0' in text

    run(main())


# -- the life of a request


def test_whoever_has_the_request_tells_its_life():
    async def main():
        async with fleet() as f:
            told = event({"name": "request.admitted"}), event({"name": "request.finished"})
            f.fakes.streams["a"] = Body(b": watching\n\n", asyncio.Event().wait)
            f.fakes.streams["b"] = Body(b": watching\n\n", *told)
            response = await f.http.get("/events?request_id=r")
            assert response.content == b": watching\n\n" + b"".join(told)
            assert f.server.num_watchers == 0
            await until(lambda: f.fakes.streams["a"].closed)

    run(main())


def test_when_it_dies_another_may_go_on():
    async def main():
        async with fleet() as f:
            dead, lives = event({"name": "one"}), event({"name": "two"})
            first = asyncio.Event()

            async def after():
                await first.wait()

            async def die():
                first.set()

            f.fakes.streams["a"] = Body(dead, die, gone())
            f.fakes.streams["b"] = Body(b": watching\n\n", after, lives)
            response = await f.http.get("/events?request_id=r")
            assert response.content == b": watching\n\n" + dead + lives

    run(main())


def test_watching_ends_with_the_router_and_with_the_last_replica():
    async def main():
        async with fleet() as f:
            f.fakes.streams["a"] = Body(asyncio.Event().wait)
            f.fakes.streams["b"] = Body(asyncio.Event().wait)
            watching = asyncio.create_task(f.http.get("/events?request_id=r"))
            await until(lambda: f.server.num_watchers == 1)
            f.server.close_watchers()
            assert (await watching).content == b": watching\n\n"
            f.fakes.streams["a"], f.fakes.streams["b"] = Body(gone()), Body(gone())
            assert (await f.http.get("/events?request_id=r")).content == b": watching\n\n"
            assert (await f.http.get("/events")).status_code == 400

    run(main())


def test_watchers_are_bounded():
    async def main():
        async with fleet(server={"max_subscribers": 1}) as f:
            f.fakes.streams["a"] = Body(asyncio.Event().wait)
            f.fakes.streams["b"] = Body(asyncio.Event().wait)
            watching = asyncio.create_task(f.http.get("/events?request_id=r"))
            await until(lambda: f.server.num_watchers == 1)
            assert (await f.http.get("/events?request_id=s")).status_code == 429
            f.server.close_watchers()
            await watching

    run(main())


# -- the machine is shared


def test_replicas_share_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setitem(environment.__globals__, "_num_cores", lambda: 8)
    monkeypatch.setitem(environment.__globals__, "_num_gpus", lambda: 0)
    assert environment(0, 3) == {"OMP_NUM_THREADS": "2"}
    assert environment(0, 99) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment(0, 3) == {}


def test_replicas_share_the_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(environment.__globals__, "_num_gpus", lambda: 2)
    shares = [environment(i, 3)["CUDA_VISIBLE_DEVICES"] for i in range(3)]
    assert shares == ["0", "1", "0"]
    monkeypatch.setitem(environment.__globals__, "_num_gpus", lambda: 1)
    assert environment(1, 3) == {}, "they share it"
