"""The router names a prompt's blocks as the engine that will hold them does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from live import Live, live, until, user

from minifer.config import EngineConfig
from minifer.routing.policy import RoutingRequest
from minifer.routing.publisher import held_blocks
from minifer.serving.fields import CHAT, COMPLETION, read_fields
from minifer.serving.front.prompt import PromptReader
from minifer.weights.resolve import load_tokenizer, read_config

LONG = "The for statement is used to iterate over the elements of a sequence."
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "a word", "parameters": {"type": "object"}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
CHATS: dict[str, dict[str, Any]] = {
    "a question": {"messages": user("hi")},
    "a developer": {"messages": [{"role": "developer", "content": "Be kind."}, *user("hi")]},
    "text parts": {
        "messages": user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    },
    "tools": {"messages": user("hi"), "tools": [TOOL]},
    "tools that must not be used": {"messages": user("hi"), "tools": [TOOL], "tool_choice": "none"},
    "a call and its result": {
        "messages": [
            *user("hi"),
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
        ],
        "tools": [TOOL],
    },
    "an answer to go on with": {
        "messages": [*user("hi"), {"role": "assistant", "content": "The"}],
        "continue_final_message": True,
    },
    "no invitation to answer": {"messages": user("hi"), "add_generation_prompt": False},
}
PROMPTS: dict[str, Any] = {"text": LONG, "ids": [1, 2, 3], "one of several": [LONG, "b"]}


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    return PromptReader(load_tokenizer("minifer-tiny"), EngineConfig(model="minifer-tiny"))


def ids_of(reader: PromptReader, body: dict[str, Any]) -> list[list[int]]:
    fields = read_fields(body, CHAT if "messages" in body else COMPLETION)
    return asyncio.run(reader.token_ids(fields))


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_has_the_servers_token_ids(server: Live, reader: PromptReader, name: str):
    body = {"max_tokens": 1, **CHATS[name]}
    answer = server.post("/v1/chat/completions", **body, return_token_ids=True).json()
    assert ids_of(reader, body) == [answer["prompt_token_ids"]]


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_has_the_servers_token_ids(server: Live, reader: PromptReader, name: str):
    body = {"max_tokens": 1, "prompt": PROMPTS[name]}
    answer = server.post("/v1/completions", **body, return_token_ids=True).json()
    assert ids_of(reader, body) == [c["prompt_token_ids"] for c in answer["choices"]]


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("minifer-tiny", {}),
        ("minifer-tiny", {"cache_salt": "s"}),
        ("parcae-tiny", {}),
        ("parcae-tiny", {"num_loops": 2}),
    ],
)
def test_blocks_are_called_what_the_engine_calls_them(model: str, fields: dict[str, Any]):
    """Of every block that the engine then holds."""
    config = EngineConfig(model=model, block_size=8)
    reader = PromptReader(load_tokenizer(model), config, read_config(model).loop)
    body = {"prompt": LONG, "max_tokens": 1, **fields}
    asked = asyncio.run(reader.read(body))
    with live({"block_size": 8}, model=model) as server:
        server.complete(**body)
        until(lambda: server.server.open_requests.count == 0)
        held = held_blocks(server.llm.engine.kv)["device"]
    assert asked.num_tokens == len(reader._tokenizer.encode(LONG))
    assert len(asked.prefix_keys) == asked.num_tokens // 8 > 0
    assert set(asked.prefix_keys) == set(held)


def test_other_salts_have_other_names(reader: PromptReader):
    one, other, none = (
        asyncio.run(reader.read({"prompt": LONG, **salt})).prefix_keys
        for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {})
    )
    assert not set(one) & set(other) and not set(one) & set(none)


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 0}]
)
def test_who_scores_a_prompt_computes_it_and_finds_nothing(
    reader: PromptReader, fields: dict[str, Any]
):
    asked = asyncio.run(reader.read({"prompt": LONG, **fields}))
    assert asked.num_tokens > 16 and asked.prefix_keys == ()


def test_without_a_prefix_cache_there_is_nothing_to_find():
    config = EngineConfig(model="minifer-tiny", enable_prefix_caching=False)
    reader = PromptReader(load_tokenizer("minifer-tiny"), config)
    assert asyncio.run(reader.read({"prompt": LONG})).prefix_keys == ()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": []},
        {"prompt": [2**63] * 16},
        {"prompt": "a", "no_such_field": 1},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": []},
        {"messages": user("hi"), "tools": [{}]},
    ],
)
def test_what_a_replica_refuses_has_no_blocks(reader: PromptReader, body: dict[str, Any]):
    asked = asyncio.run(reader.read(body))
    assert asked == RoutingRequest(asked.request_id, 0, (), 16)


def test_a_user_is_a_tenant(reader: PromptReader):
    assert asyncio.run(reader.read({"prompt": "a", "user": "ann"})).tenant == "ann"
    assert asyncio.run(reader.read({"prompt": "a", "user": 3})).tenant == ""
