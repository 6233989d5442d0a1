"""Case 115: a field that is accepted changes the answer; any other is a 400 that names it.

Every field of both routes is in one of the lists below, and a test compares the lists with the
routes' tables, so that a new field cannot be forgotten here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from live import Live, live, user

from minifer.sampling_params import SamplingParams
from minifer.serving.fields import CHAT, COMPLETION, REFUSED, SAMPLING, WITHOUT_EFFECT

ROUTES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The for statement", "max_tokens": 16, "temperature": 0},
    "/v1/chat/completions": {"messages": user("hi"), "max_tokens": 16, "temperature": 0},
}
# field → (what else is asked in both requests, its value); the answers must differ
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "temperature": ({"seed": 1}, 1.7),
    "top_k": ({"seed": 2, "temperature": 2}, 1),
    "top_p": ({"seed": 2, "temperature": 2}, 0.01),
    "min_p": ({"seed": 2, "temperature": 2}, 1.0),
    "repetition_penalty": ({}, 3.0),
    "presence_penalty": ({"max_tokens": 64}, 2.0),
    "frequency_penalty": ({"max_tokens": 64}, 2.0),
    "logit_bias": ({}, {"90": 100}),
    "allowed_token_ids": ({}, [65, 66]),
    "bad_words": ({}, ["e"]),
    "seed": ({"seed": 1, "temperature": 2}, 2),
    "n": ({"temperature": 1, "seed": 1}, 2),
    "stop": ({}, "e"),
    "stop_token_ids": ({}, [101]),
    "include_stop_str_in_output": ({"stop": "e"}, True),
    "ignore_eos": ({"logit_bias": {"257": 100}}, True),
    "max_tokens": ({}, 3),
    "min_tokens": ({"logit_bias": {"257": 50}}, 5),
    "prompt_logprobs": ({}, 1),
    "skip_special_tokens": ({"logit_bias": {"260": 100}}, False),
    "detokenize": ({}, False),
    "repetition_detection": (
        {"logit_bias": {"97": 100}},
        {"max_pattern_size": 2, "min_count": 4},
    ),
    "return_token_ids": ({}, True),
    "response_format": ({}, {"type": "json_object"}),
    "structured_outputs": ({}, {"regex": "[0-9]{3}"}),
    "request_id": ({}, "mine"),
    # completions
    "prompt": ({}, "if"),
    "echo": ({}, True),
    # chat
    "messages": ({}, user("What?")),
    "max_completion_tokens": ({"max_tokens": None, "max_completion_tokens": 9}, 3),
    "logprobs": ({}, {"/v1/completions": 2, "/v1/chat/completions": True}),
    "top_logprobs": ({"logprobs": True}, 2),
    "tools": ({}, [{"type": "function", "function": {"name": "look"}}]),
    "add_generation_prompt": ({}, False),
}
# Fields whose effect needs a test of its own, and where it is.
ELSEWHERE = {
    "model": "test_a_model_that_is_not_served_is_a_404",
    "stream": "test_openai_client.py",
    "stream_options": "test_openai_client.py::test_case_111_usage_comes_when_asked_for",
    "num_loops": "test_loop_requests.py",
    "exit_threshold": "test_loop_requests.py",
    "priority": "test_case_115_priority_decides_who_runs_first",
    "tenant": "test_case_115_a_tenant_has_two_names",
    "user": "test_case_115_a_tenant_has_two_names",
    "cache_salt": "test_case_115_a_salt_keeps_prefixes_apart",
    "tool_choice": "test_tools.py",
    "parallel_tool_calls": "test_tools.py",
    "continue_final_message": "test_requests.py::test_case_117_the_prefix_is_continued",
    "chat_template_kwargs": "test_case_115_a_templates_variables_reach_it",
}
CASES = [(route, name) for route in ROUTES for name in CHANGES if name in ROUTES[route]]


@pytest.mark.parametrize(("route", "name"), CASES)
def test_case_115_a_field_changes_the_answer(server: Live, route: str, name: str):
    context, value = CHANGES[name]
    if name == "logprobs":
        value = value[route]
    before = {**BASE[route], **context}
    answers = [server.post(route, **body) for body in (before, before, {**before, name: value})]
    assert [a.status_code for a in answers] == [200] * 3, answers[2].text
    plain, again, changed = ({**a.json(), "id": "", "created": 0} for a in answers)
    if name == "request_id":
        plain, again, changed = "", "", answers[2].json()["id"].replace("cmpl-mine", "")
        assert changed in ("", "chat")
        return
    for answer in (plain, again, changed):
        answer["usage"].pop("prompt_tokens_details")  # the first call filled the cache
    assert plain == again, "the comparison must be of repeatable answers"
    assert plain != changed


def test_case_115_every_field_is_tested():
    for table in ROUTES.values():
        assert table.keys() <= CHANGES.keys() | ELSEWHERE.keys()
    assert CHANGES.keys() | ELSEWHERE.keys() <= COMPLETION.keys() | CHAT.keys()
    decided_by_the_route = {"output_kind", "logprobs", "structured"}
    params = {field.name for field in fields(SamplingParams)} - decided_by_the_route
    assert params == SAMPLING.keys(), "every field of SamplingParams can be set"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", [*REFUSED, "temperatur", "", "a b", "__class__", "output_kind"])
def test_case_115_any_other_field_is_refused_by_name(server: Live, route: str, name: str):
    error = server.refusal(route, **BASE[route], **{name: 1})
    assert repr(name) in error["message"] and error["param"] == name


@pytest.mark.parametrize("route", ROUTES)
def test_fields_without_effect_are_taken(server: Live, route: str):
    harmless = {name: "x" if ok is None else ok[0] for name, ok in WITHOUT_EFFECT.items()}
    answers = [server.post(route, **BASE[route], **more).json() for more in ({}, harmless)]
    assert answers[0]["choices"] == answers[1]["choices"]
    for name, value in {"store": True, "service_tier": "flex", "modalities": ["audio"]}.items():
        assert server.refusal(route, **BASE[route], **{name: value})["param"] == name


@pytest.mark.parametrize("route", ROUTES)
def test_null_is_the_same_as_not_given(server: Live, route: str):
    nulls = dict.fromkeys([*ROUTES[route], *WITHOUT_EFFECT, *REFUSED])
    answers = [server.post(route, **body).json() for body in (BASE[route], nulls | BASE[route])]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_completions_without_a_limit_give_sixteen_tokens(server: Live):
    for fields_ in ({}, {"max_tokens": None}):
        answer = server.complete("The for", ignore_eos=True, **fields_)
        assert answer["usage"]["completion_tokens"] == 16


WRONG_TYPES: list[tuple[str, list[Any]]] = [
    ("temperature", ["1", [1], {}, True, 1e308, -0.1, 2.1]),
    ("top_p", ["a", 0, 1.5, False]),
    ("top_k", [1.0, "1", -2, True]),
    ("seed", [1.0, "1", True]),
    ("n", [0, -1, 1.0, "2", True, 2**63]),
    ("max_tokens", [-1, 1.0, "5", True, 2**63]),
    ("stop", [5, {"a": 1}, [5], [""], [["a"]]]),
    ("stop_token_ids", [{}, "a", [1.0], [-1], [288], 5]),
    ("logit_bias", [[], {"a": 1}, {"1": "x"}, {"1": 1e39}, {"999": 1}, {"-1": 1}]),
    ("allowed_token_ids", [[], {}, [288], "a"]),
    ("bad_words", ["a", [5], {}, [""]]),
    ("stream", ["true", 1, []]),
    ("stream_options", [{"include_usage": True}, [], "a"]),
    ("ignore_eos", [1, "true"]),
    ("cache_salt", ["", 5]),
    ("model", [5, ["minifer-tiny"]]),
    ("repetition_detection", [{}, {"x": 1}, True, {"max_pattern_size": 0, "min_count": 2}]),
    ("response_format", [{}, {"type": "x"}, {"type": "json_schema"}, {"type": "text", "a": 1}]),
    ("structured_outputs", [{}, {"x": 1}, {"regex": 5}, {"regex": "a", "choice": ["a"]}]),
]
WRONG = [(name, value) for name, values in WRONG_TYPES for value in values]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_of_a_wrong_type_is_refused_by_name(server: Live, route: str, name: str, value):
    error = server.refusal(route, **{**BASE[route], name: value})
    assert name in error["message"] and error["param"] == name


UNDRAWABLE = [
    {"allowed_token_ids": [97], "bad_words": ["a"]},
    {"allowed_token_ids": [97], "structured_outputs": {"choice": ["b"]}},
    {"repetition_penalty": 1e-300},
]


@pytest.mark.parametrize("fields_", UNDRAWABLE)
def test_rules_that_leave_nothing_to_draw_from_are_the_callers_fault(server: Live, fields_):
    """Found out in the middle of a step, and still no 5xx."""
    assert server.refusal(prompt="a", max_tokens=3, **fields_)["code"] == "undrawable"
    assert server.complete("a", max_tokens=1)


def test_a_stream_option_that_is_unknown_is_refused(server: Live):
    for options in ({"x": 1}, {"include_usage": 1}, {"continuous_usage_stats": True}):
        body = {"prompt": "a", "stream": True, "stream_options": options}
        assert server.refusal(**body)["param"] == "stream_options"


def test_a_model_that_is_not_served_is_a_404(server: Live):
    error = server.refusal(status=404, prompt="a", model="gpt-4")
    assert error["code"] == "model_not_found" and "minifer-tiny" in error["message"]
    assert server.complete("a", max_tokens=1, model="minifer-tiny")["model"] == "minifer-tiny"
    with live(served_model_name="house") as other:
        assert other.complete("a", max_tokens=1, model="house")["model"] == "house"


def test_case_115_a_salt_keeps_prefixes_apart(server: Live):
    def cached(salt: str) -> int:
        usage = server.complete("q" * 64, max_tokens=1, cache_salt=salt)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one"), cached("one"), cached("two")] == [0, 48, 0]


def test_case_115_priority_decides_who_runs_first():
    with live({"max_num_seqs": 1, "scheduling_policy": "priority"}) as server:
        engine, started = server.llm.engine, []
        add = engine.add_request
        engine.add_request = lambda *a, **k: (started.append(a[2].priority), add(*a, **k))[1]
        connections = [
            server.connect(
                "/v1/completions", prompt="a", max_tokens=400, ignore_eos=True, priority=p
            )
            for p in (0, 5, -5)
        ]
        from live import until

        until(lambda: len(started) == 3)
        until(lambda: [r.params.priority for r in engine.scheduler.running] == [-5])
        for connection in connections:
            connection.close()
        server.wait_until_idle()


@pytest.mark.parametrize("route", ROUTES)
def test_case_115_a_tenant_has_two_names(server: Live, route: str, monkeypatch):
    engine, tenants = server.llm.engine, []
    add = engine.add_request
    monkeypatch.setattr(
        engine, "add_request", lambda *a, **k: (tenants.append(a[2].tenant), add(*a, **k))[1]
    )
    for names in ({}, {"tenant": "acme"}, {"user": "ann"}, {"tenant": "acme", "user": "ann"}):
        server.post(route, **{**BASE[route], **names, "max_tokens": 1})
    assert tenants == ["", "acme", "ann", "acme"]


def test_case_115_a_templates_variables_reach_it(server: Live, monkeypatch):
    tokenizer = server.server.tokenizer
    template = tokenizer.chat_template + "{{ mood | default('') }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.delitem(tokenizer.__dict__, "_compiled_template", raising=False)
    body = {"messages": user("hi"), "chat_template_kwargs": {"mood": "sad"}}
    tokens = server.post("/tokenize", **body).json()["tokens"]
    assert bytes(tokens[-3:]) == b"sad"
    reply = server.post("/v1/chat/completions", **body, max_tokens=1, return_token_ids=True)
    assert reply.json()["prompt_token_ids"] == tokens
    tokenizer.__dict__.pop("_compiled_template")
