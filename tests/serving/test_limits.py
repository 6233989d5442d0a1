"""What the server refuses to take on: too many, too large, from strangers, unknown places."""

from __future__ import annotations

import gzip
import socket
import time

import httpx
import openai
import pytest
from live import Live, live, until

from minifer.serving.settings import ServerSettings

LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def small():
    with live(max_queue=3, max_body_bytes=2000, max_prompts=5, max_logprobs=4) as server:
        yield server


def test_a_full_queue_is_a_429_that_says_when_to_return(small: Live):
    connections = [small.connect("/v1/completions", **LONG) for _ in range(3)]
    until(lambda: small.server.open_requests.count == 3)
    response = small.post("/v1/completions", **LONG)
    assert response.status_code == 429 and int(response.headers["Retry-After"]) >= 1
    assert response.json()["error"]["type"] == "rate_limit_error"
    with pytest.raises(openai.RateLimitError) as caught:
        small.openai.completions.create(model="minifer-tiny", prompt="a")
    assert caught.value.code == "queue_full"
    assert small.http.get("/health").status_code == 200
    assert small.http.get("/metrics").status_code == 200
    for connection in connections:
        connection.close()
    small.wait_until_idle()
    assert small.complete("a", max_tokens=1)


def test_every_prompt_of_a_request_takes_a_place(small: Live):
    assert small.refusal(status=429, prompt=["a", "b", "c", "d"])["code"] == "queue_full"
    small.wait_until_idle()
    assert len(small.complete(["a", "b", "c"], max_tokens=1)["choices"]) == 3
    assert "1 to 5 prompts" in small.refusal(prompt=["a"] * 6)["message"]


def test_a_body_that_is_too_large_is_a_413(small: Live):
    error = small.refusal(status=413, prompt="a" * 2000)
    assert error["code"] == "body_too_large" and "2000" in error["message"]
    assert small.complete("a", max_tokens=1)


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(small: Live):
    connection = socket.create_connection(small._listener_address)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + b"Content-Length: 1000000000\r\n\r\n{")
    assert b" 413 " in connection.recv(4096)
    connection.close()


def test_a_body_in_chunks_is_counted(small: Live):
    """No Content-Length to believe: an endless body ends after max_body_bytes."""
    connection = socket.create_connection(small._listener_address)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(5):
        connection.sendall(b"1f4\r\n" + b" " * 500 + b"\r\n")
    assert b" 413 " in connection.recv(4096)
    connection.close()
    small.wait_until_idle()


def test_a_compressed_body_is_a_415(small: Live):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = gzip.compress(b'{"prompt": "a"}')
    response = small.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 415 and "gzip" in response.json()["error"]["message"]


def test_a_body_that_does_not_come_is_a_408():
    with live(body_timeout=0.1) as server:
        connection = socket.create_connection(server._listener_address)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Content-Length: 10\r\n\r\n{")
        assert b" 408 " in connection.recv(4096)
        connection.close()
        server.wait_until_idle()


def test_logprobs_and_n_have_limits(small: Live):
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    assert small.refusal(prompt="a", logprobs=5)["param"] == "logprobs"
    assert small.refusal(prompt="a", logprobs=-1)["param"] == "logprobs"
    assert small.refusal(prompt="a", prompt_logprobs=5)["param"] == "prompt_logprobs"
    assert small.refusal("/v1/chat/completions", **chat, top_logprobs=5)["param"] == "top_logprobs"
    assert "max_num_seqs (64)" in small.refusal(prompt="a", n=65)["message"]
    assert small.refusal(prompt="a", n=10**15)["param"] == "n"


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_long_lists_of_strings_are_refused(server: Live, field: str):
    """A million characters of stop strings are an automaton of a million states."""
    for value in (["ab"] * 10_000, ["a" * 20_000]):
        error = server.refusal(prompt="a", **{field: value})
        assert error["param"] == field and "20000" in error["message"]
    assert server.complete("a", max_tokens=1, **{field: ["z" * 100] * 100})


@pytest.fixture(scope="module")
def locked():
    with live(api_key="sk-secret") as server:
        yield server


def test_a_key_opens_every_route(locked: Live):
    assert locked.complete("a", max_tokens=1)
    for path in ("/v1/models", "/metrics", "/version", "/health_generate"):
        assert locked.http.get(path).status_code == 200


WRONG = ["", "Bearer", "Bearer sk-secre", "Bearer sk-secret1", "Basic sk-secret", "sk-secret"]


@pytest.mark.parametrize("header", [*WRONG, "Bearer schl\u00fcssel"])
def test_a_wrong_key_is_a_401(locked: Live, header: str):
    response = locked.http.get("/v1/models", headers={"Authorization": header.encode("latin-1")})
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "sk-secret" not in response.text


def test_without_a_key_only_the_page_and_the_probe_answer(locked: Live):
    for path in ("/", "/health"):
        assert locked.http.get(path, headers={"Authorization": ""}).status_code == 200
    closed = ("/v1/models", "/metrics", "/version", "/events?request_id=a", "/health_generate")
    for path in (*closed, "/nowhere", "/health/", "/HEALTH"):
        assert locked.http.get(path, headers={"Authorization": ""}).status_code == 401, path


def test_openais_client_raises_for_a_wrong_key(locked: Live):
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_wrong_key_is_refused_before_the_body_is_read(locked: Live):
    connection = socket.create_connection(locked._listener_address)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
    assert b" 401 " in connection.recv(4096)
    connection.close()


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/completions/", "/v1/chat"])
def test_an_unknown_route_is_a_404_in_the_envelope(server: Live, path: str):
    response = server.http.post(path, json={})
    assert response.status_code == 404 and path in response.json()["error"]["message"]


def test_a_wrong_method_is_a_405_that_names_the_right_one(server: Live):
    response = server.http.get("/v1/completions")
    assert response.status_code == 405 and response.headers["Allow"] == "POST"
    assert "takes POST" in response.json()["error"]["message"]
    assert server.http.post("/health").status_code == 405


def test_an_unexpected_exception_is_a_500_in_the_envelope(server: Live, monkeypatch, caplog):
    """Nothing of it is shown; the log has it; the server goes on."""

    def broken(*_):
        raise KeyError("secret")

    monkeypatch.setattr(server.server.metrics, "text", broken)
    response = server.http.get("/metrics")
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    until(lambda: "secret" in caplog.text)  # written after the answer is sent
    monkeypatch.undo()
    # On a connection of its own: after a 500 the server closes the one that got it.
    assert httpx.get(f"{server.url}/metrics").status_code == 200


BAD_SETTINGS = [
    {"max_queue": 0},
    {"max_queue": True},
    {"max_body_bytes": 1.5},
    {"max_logprobs": -2},
    {"body_timeout": float("nan")},
    {"shutdown_timeout": -1},
    {"api_key": ""},
    {"api_key": "schlüssel"},
    {"api_key": "two\nlines"},
    {"api_key": " blank"},
    {"served_model_name": ""},
]


@pytest.mark.parametrize("settings", BAD_SETTINGS)
def test_bad_settings_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ServerSettings(**settings)


def test_health_is_about_the_engines_thread():
    with live() as server:
        assert server.http.get("/health").json() == {"status": "ok"}
        assert server.http.get("/health_generate").json()["status"] == "ok"
        server.wait_until_idle()
        server.llm.close()
        for path in ("/health", "/health_generate"):
            response = server.http.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_stopped"
        assert server.refusal(status=503, prompt="a")["type"] == "server_error"


def test_health_generate_sees_an_engine_that_fails(server: Live, monkeypatch):
    def broken(_):
        raise FloatingPointError("torn")

    monkeypatch.setattr(server.llm.engine.runner, "forward", broken)
    response = server.http.get("/health_generate")
    assert response.status_code == 503 and "torn" in response.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200  # alive, if not well


def test_in_debug_mode_health_generate_asks_the_canaries():
    """Positions that are off by one: every reply is fluent, and the health check says no."""
    from minifer.faults import registry

    with live({"debug": True}) as server:
        assert server.http.get("/health_generate").json()["status"] == "ok"
        with registry.get("lost-boundary-slot").inject(server.llm.engine):
            response = server.http.get("/health_generate")
        assert response.status_code == 503
        assert "canary" in response.json()["error"]["message"]
        server.wait_until_idle()


def test_health_generate_gives_up_on_an_engine_that_hangs(server: Live, monkeypatch):
    from minifer.serving import health

    forward = server.llm.engine.runner.forward

    def slow(batch):
        time.sleep(0.3)
        return forward(batch)

    monkeypatch.setattr(health, "HEALTH_SECONDS", 0.05)
    monkeypatch.setattr(server.llm.engine.runner, "forward", slow)
    assert server.http.get("/health_generate").json()["error"]["code"] == "engine_stalled"
