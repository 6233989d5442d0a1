"""Two workers behind their routes: whatever is asked for, the answer is one engine's."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from fakes import tiny_engine
from live import Live, until, user
from live_workers import KEY, TOKEN, LiveWorkers, choices_of, live_workers, unlike

from minifer.routing.policy import Role
from minifer.serving.disaggregation.settings import TransferSettings
from minifer.serving.disaggregation.ticket import TICKET_HEADER, TOKEN_HEADER, Ticket
from minifer.serving.disaggregation.worker import KVWorker

P = 16
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def both() -> Iterator[LiveWorkers]:
    with live_workers() as running:
        yield running


@pytest.fixture
def workers(both: LiveWorkers) -> Iterator[LiveWorkers]:
    yield both
    both.wait_until_idle()


COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 30, "temperature": 0},
    "seeded": {"max_tokens": 30, "temperature": 0.9, "top_p": 0.9, "seed": 5},
    "n": {"max_tokens": 20, "n": 2, "seed": 7},
    "stop": {"temperature": 0, "stop": ["e", "t"], "max_tokens": 40},
    "logprobs": {"max_tokens": 5, "temperature": 0, "logprobs": 2},
    "echo": {"max_tokens": 3, "temperature": 0, "logprobs": 1, "echo": True},
    "form": {"temperature": 0, "max_tokens": 30, "structured_outputs": {"json": SCHEMA}},
    "choice": {"temperature": 1.0, "seed": 3, "structured_outputs": {"choice": ["yes", "no"]}},
    "salted": {"max_tokens": 10, "temperature": 0, "cache_salt": "tenant"},
    "one token": {"max_tokens": 1, "temperature": 0},
}
CHATS: dict[str, dict[str, Any]] = {
    "chat": {"max_tokens": 30, "temperature": 0},
    "tools": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40, "temperature": 0},
    "format": {"response_format": {"type": "json_object"}, "max_tokens": 20, "temperature": 0},
}


def check_same(workers: LiveWorkers, server: Live, route: str, body: dict[str, Any]) -> int:
    """Compare with one engine's answer; returns how many tokens were handed over."""
    before = workers.received.tokens
    ours, theirs = workers.ask(route, body), server.post(route, **body)
    assert ours.status_code == theirs.status_code == 200
    assert choices_of(ours.json()) == choices_of(theirs.json(), approximate=True)
    assert workers.received.recomputed_tokens == 0
    return workers.received.tokens - before


@pytest.mark.parametrize("name", COMPLETIONS)
def test_answers_are_those_of_one_engine(workers: LiveWorkers, server: Live, name: str):
    prompt = unlike(100 + list(COMPLETIONS).index(name), 5 * P + 3)
    handed_over = check_same(workers, server, COMPLETE, {"prompt": prompt, **COMPLETIONS[name]})
    # Log-probabilities of a prompt are had by computing it, and by nothing else.
    assert handed_over == (0 if name == "echo" else 5 * P)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [0, 1, 2, 7])
def test_case_147_any_length_around_a_block(
    workers: LiveWorkers, server: Live, blocks: int, extra: int
):
    length = max(1, blocks * P + extra)
    body = {"prompt": unlike(1000 + length, length), "max_tokens": 5, "temperature": 0}
    handed_over = check_same(workers, server, COMPLETE, body)
    assert handed_over == (length - 1) // P * P


@pytest.mark.parametrize("name", CHATS)
def test_so_are_chats(workers: LiveWorkers, server: Live, name: str):
    body = {"messages": user(f"{name}: what goes on here, and why?"), **CHATS[name]}
    assert check_same(workers, server, CHAT, body) >= 2 * P


def test_a_stream_is_the_single_engines(workers: LiveWorkers, server: Live):
    body = {"prompt": unlike(301, 100), "max_tokens": 30, "temperature": 0, "stream": True}
    texts = []
    for text in (workers.ask(COMPLETE, body).text, server.post(COMPLETE, **body).text):
        *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert done == "[DONE]"
        texts.append("".join(json.loads(event)["choices"][0]["text"] for event in events))
    assert texts[0] == texts[1]
    assert workers.received.recomputed_tokens == 0


def test_several_prompts_are_handed_over_together(workers: LiveWorkers, server: Live):
    body = {"prompt": [unlike(311, 50), "a", unlike(312, 33)], "max_tokens": 9, "temperature": 0}
    assert check_same(workers, server, COMPLETE, body) == 48 + 32


def test_a_ticket_can_wait(workers: LiveWorkers, server: Live):
    body = {"prompt": unlike(321, 100), "max_tokens": 9, "temperature": 0}
    ticket = workers.ticket(COMPLETE, body, wait=True)
    ours = workers.post(COMPLETE, body, ticket)
    assert ours.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
    assert choices_of(ours.json()) == choices_of(server.post(COMPLETE, **body).json())


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a"},
        {"prompt": unlike(331, 90), "prompt_logprobs": 1},
        {"prompt": ["a", "b"]},
    ],
)
def test_where_there_is_nothing_to_hand_over_there_is_no_ticket(workers: LiveWorkers, body: Any):
    before = workers.sent.prefills
    assert workers.ticket(COMPLETE, body, wait=True) is None
    assert workers.sent.prefills == before


def test_what_is_refused_is_refused_by_the_prefill_worker_too(workers: LiveWorkers, server: Live):
    before = workers.sent.prefills
    for body in (
        {"prompt": unlike(341, 90), "temperature": -1},
        {"prompt": unlike(341, 9000)},
        {"prompt": unlike(341, 90), "nonsense": 1},
        {"prompt": [99999] * 40},
    ):
        ours = workers.prefill.http.post("/internal/prefill/completions", json=body, headers=KEY)
        theirs = server.post(COMPLETE, **body)
        assert ours.status_code == theirs.status_code == 400
    assert workers.sent.prefills == before


# -- who may do what


def test_internal_routes_want_the_token(workers: LiveWorkers):
    path, body = "/internal/prefill/completions", {"prompt": unlike(351, 90)}
    before = workers.sent.prefills
    for headers in ({}, {TOKEN_HEADER: "a token for guests"}, {TOKEN_HEADER: "ä"}):
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = workers.prefill.http.post(path, json=body, headers=encoded)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "forbidden"
    assert workers.sent.prefills == before


def test_a_worker_goes_nowhere_for_a_client(workers: LiveWorkers):
    """A ticket says where to connect."""
    before = workers.received.pulls
    ticket = Ticket("127.0.0.1", 9, ("x",)).encode()
    body = {"prompt": unlike(361, 90), "max_tokens": 1}
    answer = workers.decode.http.post(COMPLETE, json=body, headers={TICKET_HEADER: ticket})
    assert answer.status_code == 403 and workers.received.pulls == before


@pytest.mark.parametrize("ticket", ["", "{", "[1, 2]", '["h", 0, "x"]', '["h", 80, 3]', "[" * 9000])
def test_a_ticket_that_is_none_is_refused(workers: LiveWorkers, ticket: str):
    answer = workers.post(COMPLETE, {"prompt": unlike(371, 90)}, ticket)
    assert answer.status_code == 400


def test_a_decode_worker_has_no_such_route(workers: LiveWorkers):
    answer = workers.decode.http.post("/internal/prefill/completions", json={}, headers=KEY)
    assert answer.status_code == 404


def test_a_caller_who_leaves_stops_the_computation():
    with live_workers(prefill={"max_num_batched_tokens": 32}) as workers:
        engine = workers.prefill.llm.engine
        real, left, steps = engine.runner.forward, threading.Event(), []

        def forward(step: Any) -> Any:
            assert left.wait(30)
            steps.append(step)
            return real(step)

        engine.runner.forward = forward  # type: ignore[method-assign]
        path, body = "/internal/prefill/completions", {"prompt": unlike(381, 900)}
        with workers.prefill.http.stream("POST", path, json=body, headers=KEY) as answer:
            assert next(answer.iter_lines()).startswith('data: {"ticket":"')
        until(lambda: workers.prefill.server.open_requests.count == 0)
        left.set()
        workers.wait_until_idle()
        assert len(steps) < 5  # of 29


def test_numbers_can_be_scraped(workers: LiveWorkers):
    workers.ask(COMPLETE, {"prompt": unlike(391, 90), "max_tokens": 1})
    page = workers.decode.http.get("/metrics").text
    line = (
        f'minifer:kv_transfer_tokens_total{{model_name="minifer-tiny"}} {workers.received.tokens}'
    )
    assert line in page.replace(".0\n", "\n")
    assert 'minifer:kv_transfer_bytes_total{direction="received"' in page


def test_a_worker_that_listens_everywhere_says_where_it_was_reached(workers: LiveWorkers):
    worker = workers.prefill.server.worker
    request = SimpleNamespace(url=SimpleNamespace(hostname="10.1.2.3"))
    for host, address in (
        ("0.0.0.0", "10.1.2.3"),
        ("::", "10.1.2.3"),
        ("10.9.9.9", "10.9.9.9"),
        ("worker-1", "worker-1"),
    ):
        settings = dataclasses.replace(worker._settings, host=host)
        with patch.object(worker, "_settings", settings):
            assert worker._address(request) == address


# -- what is none


def test_a_worker_needs_a_tier_a_role_and_a_token():
    settings, tier = TransferSettings(TOKEN), {"kv_dram_bytes": 1 << 20}
    for role, options, message in (
        (Role.DECODE, {}, "kv_dram_bytes must be set"),
        (Role.MIXED, tier, "role must be prefill or decode, got mixed"),
        (Role.PREFILL, {**tier, "kv_write_policy": "second_touch"}, "must be through"),
    ):
        with tiny_engine(**options) as engine, pytest.raises(ValueError, match=message):
            KVWorker(SimpleNamespace(engine=engine), None, role, settings)  # type: ignore[arg-type]
    for token in ("", "short", "a token with\na line end"):
        with pytest.raises(ValueError, match="MINIFER_KV_TOKEN"):
            TransferSettings(token)


def test_a_port_that_is_taken_is_known_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = TransferSettings(TOKEN, port=taken.getsockname()[1])
        with tiny_engine(kv_dram_bytes=1 << 20) as engine:
            llm = SimpleNamespace(engine=engine)
            with pytest.raises(RuntimeError, match=r"cannot wait for .* --kv-host and --kv-port"):
                KVWorker(llm, None, Role.PREFILL, settings)  # type: ignore[arg-type]
