"""`minifer serve --ray` in a cluster of two nodes: answers are those of a single server.

A head and a worker, in processes of their own; minifer-tiny in one replica on each. The last but
one test kills the worker.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live import Live, user

pytest.importorskip("ray.serve", reason='Ray is not installed: pip install "minifer[ray]"')

from ray_live import RayCluster, RayServer, all_asking, ray_cluster, ray_server, wait_for

from minifer.serving.ray_serve.deployment import connected
from minifer.serving.ray_serve.settings import RaySettings
from minifer.serving.run import bind

GREEDY = {"temperature": 0, "max_tokens": 24}
STORY = "The for statement is used to iterate over the elements of a sequence. " * 2  # many blocks


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def served(cluster: RayCluster) -> Iterator[RayServer]:
    with ray_server(cluster, "--replicas", "2", "--router", "prefix_affinity") as server:
        yield server


def told(answer: Any) -> Any:
    """What an answer says, without what differs from one time to the next."""
    answer = json.loads(json.dumps(answer))
    for name in ("id", "created"):
        answer.pop(name, None)
    if answer.get("usage"):
        answer["usage"].pop("prompt_tokens_details", None)
    return answer


REQUESTS = [
    ("/v1/completions", {"prompt": "The for statement", "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["a b", "c d"], "n": 2, "temperature": 0.7, "seed": 5}),
    ("/v1/completions", {"prompt": [40, 41, 42], "stop": ["e"]}),
    ("/v1/chat/completions", {"messages": user("hi"), "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": user("hi"), "response_format": {"type": "json_object"}}),
    ("/tokenize", {"prompt": "The for statement"}),
]


@pytest.mark.parametrize(("route", "fields"), REQUESTS)
def test_answers_are_those_of_a_single_server(
    served: RayServer, server: Live, route: str, fields: dict[str, Any]
):
    body = fields if route == "/tokenize" else {**GREEDY, **fields}
    here, there = server.post(route, **body), served.post(route, **body)
    assert here.status_code == there.status_code == 200
    assert told(there.json()) == told(here.json())
    assert there.headers["content-type"] == here.headers["content-type"]


def test_a_stream_says_the_same_piece_by_piece(served: RayServer, server: Live):
    def texts(client: Any) -> list[str]:
        stream = client.openai.chat.completions.create(
            model="minifer-tiny",
            messages=user("What is a loop?"),
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
        chunks = list(stream)
        assert chunks[-1].usage.completion_tokens == 24
        return [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]

    here, there = texts(server), texts(served)
    assert "".join(there) == "".join(here) != ""
    assert len(there) > 5  # not all at once in the end


def test_a_stream_ends_with_done(served: RayServer):
    body = {"prompt": "a", "stream": True, **GREEDY}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"


REFUSALS = [
    ("/v1/completions", {"prompt": "a", "temperature": 9}),
    ("/v1/completions", {"prompt": "a", "no_such_field": 1}),
    ("/v1/completions", {"prompt": "a", "model": "gpt-4"}),
    ("/v1/completions", {"prompt": "a " * 2000}),
    ("/v1/completions", {}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": user("hi"), "stream": True, "top_p": 0}),
    ("/v1/nothing", {}),
]


@pytest.mark.parametrize(("route", "body"), REFUSALS)
def test_refusals_pass_through(served: RayServer, server: Live, route: str, body: dict[str, Any]):
    here, there = server.post(route, **body), served.post(route, **body)
    assert there.status_code == here.status_code >= 400
    assert there.json() == here.json()


def test_a_body_that_is_not_json_is_refused_at_the_door(served: RayServer):
    headers = {"Content-Type": "application/json"}
    response = served.http.post("/v1/completions", content=b"{", headers=headers)
    assert response.status_code == 400
    assert "x-minifer-replica" not in response.headers


def test_equal_prefixes_go_to_one_replica_and_others_to_all(served: RayServer):
    def ask(prompt: str) -> httpx.Response:
        response = served.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=1)
        assert response.status_code == 200
        return response

    homes = {}
    for i in range(8):
        prefix = f"Story {i}: {STORY}"
        first, second = ask(f"{prefix} one"), ask(f"{prefix} two")
        homes[prefix] = first.headers["x-minifer-replica"]
        assert second.headers["x-minifer-replica"] == homes[prefix]
        assert second.headers["x-minifer-reason"] == "prefix"
        cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 100  # the engine there has it, as the router believed
    assert len(set(homes.values())) == 2


def test_what_the_router_expects_is_what_replicas_report(served: RayServer):
    expected, reported = (
        served.metric(f"minifer_router_cached_tokens_{kind}_total")
        for kind in ("compared", "reported")
    )
    assert expected == reported > 0


def test_a_client_that_leaves_takes_its_request_along(served: RayServer):
    body = {"prompt": "a", "stream": True, "max_tokens": 900, "ignore_eos": True}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    aborted = 'minifer:request_success_total{finished_reason="abort"'
    served.wait_until_idle()
    assert aborted in served.http.get("/metrics").text


def test_every_replica_is_asked_for_its_health_and_numbers(served: RayServer):
    assert served.http.get("/health").json() == {"status": "ok"}
    health = served.http.get("/health_generate").json()
    assert len(health["replicas"]) == 2
    page = served.http.get("/metrics").text
    assert all(f'replica="{name}"' in page for name in health["replicas"])
    assert served.num_running() == served.metric("minifer_router_replicas_healthy") == 2


def test_models_version_and_page_are_a_single_servers(served: RayServer, server: Live):
    (here,), (there,) = (s.http.get("/v1/models").json()["data"] for s in (server, served))
    assert told(there) == told(here)
    assert served.http.get("/v1/models/minifer-tiny").status_code == 200
    assert served.http.get("/version").json() == server.http.get("/version").json()
    assert "<script>" in served.http.get("/").text


def test_nobody_at_the_address_is_said_at_once():
    with bind("127.0.0.1", 0) as silent:  # a port that is taken and does not answer
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            pytest.raises(RuntimeError, match=f"cannot reach a Ray cluster at '{address}'"),
            connected(RaySettings(address=address)),
        ):
            pass


@pytest.mark.slow
def test_replicas_that_cannot_start_say_why_and_leave_others_alone(
    served: RayServer, cluster: RayCluster
):
    options = ("--quantize", "file", "--replica-cpus", "0")
    with (
        pytest.raises(AssertionError, match="the replicas do not start: ValueError: quantize=file"),
        ray_server(cluster, *options),
    ):
        pass
    assert served.num_running() == 2


def test_when_a_node_dies_requests_are_retried_or_end_with_a_clear_error(
    served: RayServer, cluster: RayCluster, server: Live
):
    expected = server.complete("The for statement", max_tokens=80)["choices"][0]["text"]
    with all_asking(served, 4, expected, max_tokens=80) as asking:
        wait_for(lambda: all(len(one.outcomes) >= 2 for one in asking))
        cluster.kill_a_node()
        before = [len(one.outcomes) for one in asking]
        wait_for(lambda: all(len(a.outcomes) > n + 2 for a, n in zip(asking, before, strict=True)))
    outcomes = {outcome for one in asking for outcome in one.outcomes}
    assert outcomes <= {"right", "replica_lost"}
    assert all(one.outcomes[-1] == "right" for one in asking)
    wait_for(lambda: len(served.http.get("/health_generate").json().get("replicas", ())) == 1)


def test_a_signal_lets_open_requests_finish(cluster: RayCluster, served: RayServer):
    """The last one: it ends the shared server."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
        answers.append(served.post("/v1/completions", **body))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: served.metric("minifer:num_requests_running") == 1)
    served.process.send_signal(signal.SIGTERM)
    thread.join(60)
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"
    assert served.end(0) == 0
