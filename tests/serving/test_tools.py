"""Tool calls, forced forms and reasoning over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from live import Live, user

from minifer.postprocessing.reasoning import ReasoningScanner
from minifer.postprocessing.tool_calls import ToolCallScanner
from minifer.serving.chat_prompt import spell_out_tools
from minifer.serving.reply import ReplyParser

CHAT = "/v1/chat/completions"
MODEL = "minifer-tiny"
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rom</tool_call>e"]}}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {**CITY, "required": ["city"], "additionalProperties": False},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    yield server.openai


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    body: dict[str, Any] = {"model": MODEL, "messages": user("hi"), "max_tokens": 120, "seed": 1}
    return client.chat.completions.create(**{**body, **fields})


@pytest.mark.parametrize("n", [1, 2])
def test_case_119_a_tool_that_is_asked_for_is_called(client, n):
    """The client parses the call; its arguments are what the schema allows, tags in strings too."""
    named = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, tools=[WEATHER, CLOCK], tool_choice=named, n=n)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        assert call.id.startswith("call_")
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rom</tool_call>e")
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == n


def test_case_119_a_streamed_call_joins_to_a_call(client):
    """openai's own accumulator for streams is the judge."""
    body = {"model": MODEL, "messages": user("hi"), "max_tokens": 200, "seed": 3}
    with client.chat.completions.stream(
        **body, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    whole = client.chat.completions.create(
        **body, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False
    )
    (streamed,), (expected,) = final.choices, whole.choices
    assert streamed.finish_reason == expected.finish_reason == "tool_calls"
    (call,), (other,) = streamed.message.tool_calls, expected.message.tool_calls
    assert (call.function.name, call.function.arguments) == (
        other.function.name,
        other.function.arguments,
    )


def test_a_call_that_is_cut_off_ends_by_length(client):
    named = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, tools=[WEATHER], tool_choice=named, max_tokens=45)
    assert answer.choices[0].finish_reason == "length"


def test_none_hides_the_tools(server: Live):
    body = {"messages": user("hi"), "temperature": 0, "max_tokens": 8}
    plain = server.post(CHAT, **body).json()["choices"]
    hidden = server.post(CHAT, **body, tools=[CLOCK], tool_choice="none").json()["choices"]
    assert plain == hidden


BAD_TOOLS = [
    ({"tools": [{}]}, "tools[0]"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1]"),
    ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    (
        {
            "tools": [CLOCK],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
        },
        "tool_choice",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
            "tool_choice": "required",
        },
        "parameters",
    ),
]


@pytest.mark.parametrize(("fields", "word"), BAD_TOOLS)
def test_bad_tools_are_refused_by_name(server: Live, fields, word):
    assert word in server.refusal(CHAT, messages=user("hi"), **fields)["message"]


def test_a_template_without_tools_gets_them_as_text():
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    system, question, asked, result = spell_out_tools(messages, [WEATHER])
    assert system["content"].startswith("Be brief.\n\n# Tools")
    assert json.dumps(WEATHER) in system["content"]
    assert question == messages[1]
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert asked == {"role": "assistant", "content": text}
    assert result == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}
    scanner = ToolCallScanner()
    scanner.push(asked["content"])
    assert json.loads(scanner.calls[0].arguments) == {"city": "Paris"}, "we read what we write"


def test_a_result_of_a_tool_is_part_of_the_prompt(server: Live):
    call = {"id": "1", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        *user("hi"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    tokens = server.post("/tokenize", messages=messages, tools=[CLOCK]).json()["tokens"]
    text = server.post("/detokenize", tokens=tokens).json()["prompt"]
    assert "noon" in text and '"name": "clock"' in text and "<tools>" in text


# -- forced forms

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_follows_its_schema(server: Live, stream: bool):
    body = {"messages": user("hi"), "max_tokens": 60, "response_format": json_schema(SCHEMA)}
    if stream:
        chunks = server.stream(CHAT, **body)
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    else:
        text = server.post(CHAT, **body).json()["choices"][0]["message"]["content"]
    assert json.loads(text)["n"] in range(1, 10)


def test_case_121_two_requests_have_two_grammars(server: Live):
    """At once, in one batch, beside a free one: each keeps to its own, and it goes with it."""
    forms = [{"regex": "[0-9]{5}"}, {"choice": ["yes", "no"]}, {"regex": "[a-c]+d"}, None]

    def text(i: int) -> str:
        form = {} if forms[i] is None else {"structured_outputs": forms[i]}
        answer = server.post("/v1/completions", prompt="a", max_tokens=30, seed=i, **form)
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(text, range(len(forms))))
    assert len(texts[0]) == 5 and texts[0].isdecimal()
    assert texts[1] in ("yes", "no")
    assert set(texts[2]) <= set("abcd")


BAD_FORMS = [
    {"response_format": json_schema({"type": "nothing"})},
    {"response_format": json_schema({"$ref": "#/nowhere"})},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "start: nowhere"}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"json": "{"}},
]


@pytest.mark.parametrize("form", BAD_FORMS)
def test_case_121_a_bad_form_is_a_400(server: Live, form):
    assert server.refusal(prompt="a", max_tokens=2, **form)["param"] == next(iter(form))
    assert server.complete("a", max_tokens=1)


def test_case_121_a_form_that_grows_too_large_on_the_way_is_a_400(server: Live):
    """It compiles; llguidance gives up at the first property's name."""
    names = {f"p{i}": {"type": "string"} for i in range(2000)}
    form = {"structured_outputs": {"json": {"type": "object", "properties": names}}}
    error = server.refusal(prompt="a", max_tokens=9, temperature=0, **form)
    assert "structured.json" in error["message"] and error["code"] == "undrawable"
    assert server.complete("a", max_tokens=1)


# -- what a reply is made of


def pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


REPLY = (
    "<think>It is {hot}</think>Let me look.\n"
    '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
@pytest.mark.parametrize("parallel", [True, False])
def test_case_119_a_reply_is_taken_apart_whatever_its_chunks(size: int, parallel: bool):
    parser = ReplyParser(ReasoningScanner(), ToolCallScanner(), parallel)
    deltas = [parser.push(piece) for piece in pieces(REPLY, size)] + [parser.push("", True)]
    message = parser.message()
    assert message["reasoning_content"] == "It is {hot}"
    assert message["content"].strip() == "Let me look."
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    expected = [("f", '{"x": "</tool_call>"}'), ("g", "{}")]
    assert calls == (expected if parallel else expected[:1])
    for key in ("content", "reasoning_content"):
        assert "".join(delta.get(key, "") for delta in deltas) == message[key]
    arguments: dict[int, str] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            arguments.setdefault(call["index"], "")
            arguments[call["index"]] += call["function"]["arguments"]
    assert list(arguments.values()) == [arguments_ for _, arguments_ in calls]


def test_a_plain_reply_stays_as_it_is():
    parser = ReplyParser()
    parser.push("<think>a</think>")
    parser.push("", True)
    assert parser.message() == {
        "role": "assistant",
        "content": "<think>a</think>",
        "refusal": None,
    }


def test_an_empty_reply_has_empty_content():
    parser = ReplyParser(ReasoningScanner(), ToolCallScanner())
    assert parser.push("", True) == {} and parser.message()["content"] == ""


def test_a_models_reasoning_stands_apart(server: Live, monkeypatch):
    """A model that writes think tags, played by a grammar."""
    monkeypatch.setattr(server.server, "writes_reasoning", True)
    form = {"choice": ["<think>why</think>because"]}
    body = {"messages": user("hi"), "max_tokens": 40, "structured_outputs": form}
    message = server.post(CHAT, **body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "because")
    chunks = [chunk["choices"][0]["delta"] for chunk in server.stream(CHAT, **body)]
    assert "".join(delta.get("reasoning_content", "") for delta in chunks) == "why"
    assert "".join(delta.get("content", "") for delta in chunks) == "because"


def test_a_tool_call_the_model_makes_by_itself_is_found(server: Live):
    """tool_choice auto; the model is played by a grammar that knows no tools."""
    text = 'Wait. <tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    body = {
        "messages": user("hi"),
        "max_tokens": 80,
        "structured_outputs": {"choice": [text]},
        "tools": [CLOCK],
    }
    choice = server.post(CHAT, **body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "Wait."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    without = {key: value for key, value in body.items() if key != "tools"}
    assert server.post(CHAT, **without).json()["choices"][0]["message"]["content"] == text


def test_a_forced_form_leaves_no_room_for_reasoning(server: Live, monkeypatch):
    """A template that ends in the think tag: the JSON is the answer, not thoughts."""
    monkeypatch.setattr(server.server, "writes_reasoning", True)
    messages = [*user("hi"), {"role": "assistant", "content": "<think>"}]
    fields = {"messages": messages, "continue_final_message": True}
    schema = {"name": "n", "schema": {"type": "integer", "minimum": 0, "maximum": 9}}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    (choice,) = server.chat(**fields, **form)["choices"]
    assert int(choice["message"]["content"]) in range(10)
    (choice,) = server.chat(**fields)["choices"]
    assert choice["message"]["reasoning_content"]


def test_tags_that_are_special_tokens_are_not_skipped(server: Live, monkeypatch):
    from minifer.serving.chat import _Call

    def skips(**fields: Any) -> bool:
        call = _Call(server.server, {"messages": user("hi"), **fields})
        return call.params.skip_special_tokens

    assert skips(tools=[CLOCK]), "minifer-tiny has no such token"
    monkeypatch.setattr(server.server, "hides_tags", True)
    assert not skips(tools=[CLOCK]) and skips()
    assert skips(tools=[CLOCK], skip_special_tokens=True)
