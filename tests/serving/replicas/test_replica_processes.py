"""Two real engines behind a real router: the answers of one engine, whoever is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fleet_process import Deployment, deployment, is_running, until
from live import Live, user

from minifer.serving.replicas.process import ReplicaProcess

MODEL = "minifer-tiny"
PROMPT = "The for statement is used to iterate over the elements of a sequence"
LONG = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs POSIX signals")


@pytest.fixture(scope="module")
def two() -> Iterator[Deployment]:
    with deployment(2, "--num-kv-blocks", "256") as running:
        yield running
        assert running.close() == 0
        assert [line for line in running.said if "Traceback" in line] == []


@pytest.fixture
def fleet(two: Deployment) -> Iterator[Deployment]:
    """Whole before the test and after it."""
    until(two.all_healthy)
    yield two
    until(two.all_healthy)
    until(lambda: not any(row["open_requests"] for row in two.replicas()))


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}),
    "n seeded": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "n": 3, "seed": 7}),
    "several": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 9, "temperature": 0}),
    "stop": ("/v1/completions", {"prompt": PROMPT, "temperature": 0, "stop": ["e"]}),
    "logprobs": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True},
    ),
    "chat": ("/v1/chat/completions", {"messages": user("hi"), "max_tokens": 30, "seed": 1}),
    "tools": (
        "/v1/chat/completions",
        {"messages": user("hi"), "tools": [TOOL], "tool_choice": "required", "max_tokens": 40}
        | {"temperature": 0},
    ),
    "a form": (
        "/v1/chat/completions",
        {"messages": user("hi"), "response_format": {"type": "json_object"}, "max_tokens": 20}
        | {"temperature": 0},
    ),
    "refused": ("/v1/completions", {"prompt": PROMPT, "temperature": -1}),
    "unknown": ("/v1/chat/completions", {"messages": user("hi"), "nonsense": 1}),
    "too long": ("/v1/completions", {"prompt": PROMPT * 40}),
}


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what is another's every time."""
    for choice in answer.get("choices", ()):
        for part in (choice.get("message"), choice.get("delta")):
            for call in (part or {}).get("tool_calls") or ():
                call.pop("id", None)
    kept = {key: value for key, value in answer.items() if key not in ("id", "created", "usage")}
    return json.loads(json.dumps(kept))


@pytest.mark.parametrize("name", BODIES)
def test_answers_are_those_of_one_engine(fleet: Deployment, server: Live, name: str):
    route, body = BODIES[name]
    ours, theirs = fleet.post(route, **body), server.post(route, **body)
    assert ours.status_code == theirs.status_code
    assert said(ours.json()) == said(theirs.json())
    assert ours.headers["x-minifer-replica"].startswith("replica-")


@pytest.mark.parametrize("name", ["greedy", "n seeded", "stop", "chat", "tools"])
def test_streams_are_those_of_one_engine(fleet: Deployment, server: Live, name: str):
    route, body = BODIES[name]
    streams = []
    for http in (fleet.http, server.http):
        with http.stream("POST", route, json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        streams.append([said(json.loads(line.removeprefix("data: "))) for line in lines])
    ours, theirs = streams
    assert texts(ours) == texts(theirs)


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """All that each choice says; which tokens come in one chunk is a matter of time."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice.get("text") or json.dumps(choice.get("delta"), sort_keys=True)
            end = choice["finish_reason"] or ""
            found[choice["index"]] = found.get(choice["index"], "") + piece + end
    return found


def test_openais_client_cannot_tell(fleet: Deployment):
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    with client:
        assert [model.id for model in client.models.list()] == [MODEL]
        options = {"model": MODEL, "messages": user("hi"), "max_tokens": 9, "temperature": 0}
        whole = client.chat.completions.create(**options)
        stream = client.chat.completions.create(**options, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4", prompt="a")


def test_the_same_prefix_goes_to_the_same_replica_and_is_found(fleet: Deployment):
    prompt = "A list that begins like no other one, " * 3
    first = fleet.post("/v1/completions", prompt=prompt, max_tokens=1)
    name = first.headers["x-minifer-replica"]
    until(lambda: fleet.replica(name)["kv_is_exact"])
    before = fleet.metric("cached_tokens_compared_total")

    def found() -> bool:
        again = fleet.post("/v1/completions", prompt=prompt + "x", max_tokens=1)
        assert again.headers["x-minifer-replica"] == name
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96
        return fleet.metric("cached_tokens_compared_total") >= before + 96

    until(found)


def test_a_request_is_watched_wherever_it_runs(fleet: Deployment):
    with fleet.http.stream("GET", "/events?request_id=seen") as watching:
        lines = watching.iter_lines()
        assert next(lines) == ": watching"
        fleet.post("/v1/completions", prompt="a", max_tokens=2, request_id="seen")
        names = [json.loads(line[6:])["name"] for line in lines if line.startswith("data: ")]
    assert "request.admitted" in names and names[-1] == "request.finished"


# -- deaths


def start(fleet: Deployment, body: dict[str, Any]) -> tuple[str, Any, Any]:
    """A stream that has begun: its replica, its lines, and what closes it."""
    manager = fleet.http.stream("POST", "/v1/completions", json={**body, "stream": True})
    response = manager.__enter__()
    lines = response.iter_lines()
    next(lines)
    return response.headers["x-minifer-replica"], lines, manager


def test_a_killed_replica_ends_what_had_begun_and_hands_on_what_had_not(
    fleet: Deployment, server: Live
):
    """One request is in the middle of its answer, another waits for all of its own."""
    name, lines, manager = start(fleet, LONG)
    answers: list[httpx.Response] = []
    body = {**LONG, "max_tokens": 600}
    waiting = threading.Thread(target=lambda: answers.append(fleet.post("/v1/completions", **body)))
    waiting.start()
    try:
        until(lambda: sum(row["open_requests"] for row in fleet.replicas()) == 2)
        pid = fleet.replica(name)["pid"]
        moved = fleet.replica(name)["open_requests"] == 2  # prefix and load decide
        os.kill(pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    finally:
        manager.__exit__(None, None, None)
        waiting.join(120)
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "replica_lost" and name in error["message"]
    assert "data: [DONE]" not in rest
    (answer,) = answers
    text = server.complete(**body)["choices"][0]["text"]
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == text
    assert moved and answer.headers["x-minifer-replica"] != name
    until(lambda: fleet.replica(name)["restarts"] >= 1 and fleet.all_healthy())
    assert not is_running(pid) and fleet.replica(name)["pid"] != pid


def test_a_client_that_leaves_frees_its_replica(fleet: Deployment):
    name, _, manager = start(fleet, LONG)
    manager.__exit__(None, None, None)
    until(lambda: fleet.replica(name)["open_requests"] == 0)

    def is_idle() -> bool:
        text = fleet.http.get("/metrics").text
        running = [line for line in text.splitlines() if line.startswith("minifer:num_requests_r")]
        assert len(running) == 2
        return all(line.endswith(" 0.0") for line in running)

    until(is_idle)


def test_a_restart_under_load_loses_nothing(fleet: Deployment, server: Live):
    before = {row["name"]: row["pid"] for row in fleet.replicas()}
    expected = server.complete(PROMPT, max_tokens=60, ignore_eos=True)["choices"][0]["text"]
    wrong: list[Any] = []
    stop = threading.Event()

    def ask() -> None:
        body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=fleet.url, timeout=120) as http:
            while not stop.is_set():
                answer = http.post("/v1/completions", json=body)
                if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected:
                    wrong.append(answer.text)

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        fleet.child.send_signal(signal.SIGHUP)
        until(
            lambda: all(
                row["pid"] not in (None, before[row["name"]]) and row["status"] == "healthy"
                for row in fleet.replicas()
            )
        )
    finally:
        stop.set()
        for client in clients:
            client.join(120)
    assert wrong == []
    assert not any(map(is_running, before.values()))


# -- the end


@pytest.mark.slow
def test_sigterm_finishes_what_is_open_and_leaves_nothing():
    with deployment(1) as one:
        _, lines, manager = start(one, {**LONG, "max_tokens": 200})
        pids = [row["pid"] for row in one.replicas()]
        one.child.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        manager.__exit__(None, None, None)
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert one.child.wait(30) == 0
        assert not any(map(is_running, pids))
        one._listening.join(10)
        assert [line for line in one.said if "note" not in line] == []


@pytest.mark.slow
def test_a_router_that_is_killed_takes_its_replicas_along():
    one = Deployment(1)
    pids = [row["pid"] for row in one.replicas()]
    assert all(map(is_running, pids))
    one.close(signal.SIGKILL)
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_a_replica_that_hangs_is_replaced_and_its_requests_go_elsewhere(server: Live):
    """Stopped, not killed: its sockets stay open, and nothing comes."""
    with deployment(2) as two:
        body = {**LONG, "max_tokens": 100}
        name = two.post("/v1/completions", **body).headers["x-minifer-replica"]
        pid = two.replica(name)["pid"]
        os.kill(pid, signal.SIGSTOP)
        answer = two.post("/v1/completions", **body)
        assert answer.json()["choices"][0]["text"] == server.complete(**body)["choices"][0]["text"]
        assert answer.headers["x-minifer-replica"] != name
        until(lambda: two.replica(name)["status"] == "healthy" and two.replica(name)["pid"] != pid)
        assert "health checks" in two.replica(name)["last_words"] and not is_running(pid)


def test_a_process_that_does_not_start_has_last_words():
    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"r9 ended with status 2: .*max_num_seqs"):
            await ReplicaProcess.start("r9", ["--max-num-seqs", "0"], "key")

    asyncio.run(main())


@pytest.mark.slow
def test_a_process_ends_when_its_parent_is_gone():
    async def main() -> None:
        process = await ReplicaProcess.start("r1", ["--model", MODEL], "key")
        assert process.url.startswith("http://127.0.0.1:") and process.status is None
        async with httpx.AsyncClient() as http:  # it listens before it serves
            assert (await http.get(f"{process.url}/health", timeout=60)).status_code == 200
        process._child.stdin.close()  # as the system does when we die
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        await process.kill()
        assert not is_running(process.pid)

    asyncio.run(main())


BAD_USAGE = {
    "--replicas 0": "--replicas must be at least 1, got 0",
    "--router random": "--router needs --replicas",
    "--replicas 2 --router nonsense": "router must be one of",
    "--replicas 2 --router random:x=1": "random has no options",
    "--replicas 2 --model no/such/model": "no/such/model",
}


@pytest.mark.parametrize("options", BAD_USAGE)
def test_bad_usage_is_2_and_one_sentence(options: str, capsys: pytest.CaptureFixture[str]):
    from minifer.cli import main

    assert main(["serve", "--port", "0", *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and BAD_USAGE[options] in error


@pytest.mark.slow
def test_replicas_that_do_not_start_are_one_sentence():
    command = [sys.executable, "-m", "minifer", "serve", "--model", "parcae-tiny", "--port", "0"]
    done = subprocess.run(
        [*command, "--replicas", "2", "--max-model-len", "99999999"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("minifer: error: replica-") and "max_model_len" in last
