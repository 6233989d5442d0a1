"""Structured output: replies against `json`, `jsonschema` and `re`, and against a slow twin."""

from __future__ import annotations

import builtins
import gc
import json
import re
import string
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import run_engine, step_checked, tiny_config, tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.engine import Engine
from minifer.execution.grammar import GrammarCompiler
from minifer.outputs import CompletionOutput
from minifer.postprocessing.tool_calls import ToolCallScanner, tool_choice_constraint
from minifer.request import SamplingParams
from minifer.structured_output import StructuredOutput
from minifer.text.byte_tokenizer import byte_tokenizer
from minifer.text.tokenizer import Tokenizer
from minifer.weights.gguf_tokenizer import _sentencepiece

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 1},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = {"name": "Ann", "age": 7, "tags": ["a"]}


def engine(**options: object) -> Engine:
    """A random model over bytes, which writes rubbish wherever it may."""
    config = tiny_config(vocab_size=288, max_position_embeddings=512)
    options = {"num_kv_blocks": 72, "eos": (EOS,), **options}
    return tiny_engine(config=config, tokenizer=byte_tokenizer(), **options)


def ask(params: SamplingParams, prompt: str = "hi", **options: object) -> list[CompletionOutput]:
    with engine(**options) as e:
        e.add_request("r", prompt, params)
        return run_engine(e)["r"].outputs


def wish(**fields: object) -> SamplingParams:
    """Greedy unless asked otherwise; `structured` from the fields it knows."""
    names = ("json", "json_object", "regex", "choice", "grammar")
    structured = StructuredOutput(**{name: fields.pop(name) for name in names if name in fields})
    return SamplingParams(**{"temperature": 0, "max_tokens": 120, **fields}, structured=structured)


class Scripted:
    """A runner whose every row of logits likes the tokens in `liked`, the first most."""

    def __init__(self, liked: list[int], vocab_size: int = 288, others: float = 0.0) -> None:
        row = torch.full((vocab_size,), others)
        for rank, token in enumerate(liked):
            row[token] = 100.0 - rank
        self._row = row

    def forward(self, batch) -> torch.Tensor:
        return self._row.expand(len(batch.logits_rows), -1)


def stubborn_engine(liked: list[int], **options: object) -> Engine:
    """An engine whose model wants the same tokens whatever came before."""
    made = engine(**options)
    made.runner = Scripted(liked)
    return made


# -- what comes out is what was asked for


@pytest.mark.parametrize("seed", range(4))
def test_json_follows_its_schema(seed: int) -> None:
    (out,) = ask(wish(json=SCHEMA, temperature=1.5, seed=seed))
    jsonschema.validate(json.loads(out.text), SCHEMA)
    assert (out.finish_reason, out.stop_reason) == ("stop", None)


def test_a_schema_may_be_json_text() -> None:
    assert wish(json=json.dumps(SCHEMA)) == wish(json=SCHEMA)


@pytest.mark.parametrize(
    "pattern",
    [
        "[0-9]{3}-[0-9]{4}",
        "(ab|c)*d",
        "a{1,3}",
        "(?i)yes|no",
        "[^a-z]{4}x",
        r"[0-9]+\.[0-9]{2}",
        "é🙂?",
    ],
)
def test_regex_is_matched_whole(pattern: str) -> None:
    for seed in range(3):
        (out,) = ask(wish(regex=pattern, temperature=1.0, seed=seed))
        if out.finish_reason == "stop":
            assert re.fullmatch(pattern, out.text)
        else:
            assert "*" in pattern or "+" in pattern, "bounded, so it ends"


def test_choice_is_one_of_them() -> None:
    choices = ["yes", "no", "yes, sir", 'with "quotes"\n\\ and \t\x01', "é🙂", "</tool_call>"]
    seen = set()
    for seed in range(20):
        (out,) = ask(wish(choice=choices, temperature=2.0, seed=seed))
        assert out.text in choices and out.finish_reason == "stop"
        seen.add(out.text)
    assert len(seen) >= 4


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_any_text_can_be_a_choice(texts: list[str]) -> None:
    compiler = GrammarCompiler(byte_tokenizer(), 288)
    state = compiler.compile(StructuredOutput(choice=texts))
    for byte in texts[-1].encode():
        assert state.mask()[byte]
        state.accept(byte)
    assert state.may_end


def test_json_object_is_an_object() -> None:
    with stubborn_engine([*b'":}']) as e:
        e.add_request("r", "hi", wish(json_object=True))
        (out,) = run_engine(e)["r"].outputs
    assert (out.text, out.finish_reason) == ('{"":""}', "stop")


def test_grammar_is_followed() -> None:
    lark = 'start: "(" start ")" | /[xy]/'
    (out,) = ask(wish(grammar=lark, temperature=1.0, seed=3))
    assert re.fullmatch(r"(\()*[xy](\))*", out.text)
    assert out.text.count("(") == out.text.count(")")


def slow_twin(params: SamplingParams, prompt: list[int]) -> list[int]:
    """Greedy: at every step a fresh automaton reads the whole prefix, asked token by token."""
    from llguidance import LLMatcher

    tokens: list[int] = []
    with engine() as e:
        compiler = e.grammars
    vocabulary, end = compiler._vocabulary()
    while len(tokens) < params.max_tokens:
        with engine(enable_prefix_caching=False) as e:
            plain = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
            e.add_request("r", [*prompt, *tokens], plain)
            (out,) = run_engine(e)["r"].outputs
        ranked = sorted(out.logprobs[0].items(), key=lambda item: (-item[1].logprob, item[0]))

        def reads(token: int, tokens: list[int] = tokens) -> bool:
            grammar = LLMatcher.grammar_from_json_schema(
                json.loads(params.structured.json),
                defaults={"whitespace_pattern": r"[ \n\r\t]{1,8}"},
            )
            matcher = LLMatcher(vocabulary, grammar, log_level=0)
            assert matcher.consume_tokens(tokens)
            return matcher.validate_tokens([end if token == EOS else token]) == 1

        tokens.append(next(token for token, _ in ranked if reads(token)))
        if tokens[-1] == EOS or reads(EOS):
            break
    return tokens


def test_greedy_tokens_equal_the_slow_twins() -> None:
    params = wish(json=SCHEMA, max_tokens=16)
    (out,) = ask(params)
    prompt = byte_tokenizer().encode("hi")
    assert out.token_ids == slow_twin(params, prompt)
    assert len(out.token_ids) == 16


# -- the end


def test_a_complete_reply_ends_though_the_model_would_go_on() -> None:
    with stubborn_engine([ord("a"), EOS]) as e:
        e.add_request("r", "hi", wish(regex="a{1,3}"))
        (out,) = run_engine(e)["r"].outputs
    assert (out.text, out.finish_reason, out.stop_reason) == ("aaa", "stop", None)
    assert out.token_ids == [ord("a")] * 3


def test_the_end_token_is_allowed_where_the_reply_may_end_and_nowhere_else() -> None:
    with stubborn_engine([EOS, ord("a"), ord("b")]) as e:
        e.add_request("r", "hi", wish(regex="ab*"))
        (out,) = run_engine(e)["r"].outputs
    assert (out.text, out.token_ids, out.finish_reason) == ("a", [ord("a"), EOS], "stop")


def test_a_model_without_end_tokens_ends_when_the_reply_is_complete() -> None:
    with engine(eos=()) as e:
        e.add_request("r", "hi", wish(choice=["abc"]))
        (out,) = run_engine(e)["r"].outputs
    assert (out.text, out.finish_reason) == ("abc", "stop")


def test_ignore_eos_and_min_tokens_write_on_while_they_may() -> None:
    for params, text, reason in [
        (wish(regex="ab{0,5}", ignore_eos=True), "abbbbb", "stop"),
        (wish(regex="ab*", ignore_eos=True, max_tokens=9), "abbbbbbbb", "length"),
        (wish(regex="ab*", min_tokens=4), "abbb", "stop"),
        (wish(regex="ab", min_tokens=50), "ab", "stop"),  # complete: there is nothing more
    ]:
        with stubborn_engine([EOS, ord("a"), ord("b")]) as e:
            e.add_request("r", "hi", params)
            (out,) = run_engine(e)["r"].outputs
        assert (out.text, out.finish_reason) == (text, reason)


def test_stop_strings_and_stop_tokens_end_a_reply_before_it_is_complete() -> None:
    with stubborn_engine([ord("a"), ord("b")]) as e:
        e.add_request("s", "hi", wish(regex="aaab{9}", stop="bb"))
        e.add_request("t", "hi", wish(regex="aaab{9}", stop_token_ids=[ord("b")]))
        outs = run_engine(e)
    assert (outs["s"].outputs[0].text, outs["s"].outputs[0].stop_reason) == ("aaa", "bb")
    assert (outs["t"].outputs[0].text, outs["t"].outputs[0].stop_reason) == ("aaa", ord("b"))


def test_max_tokens_cuts_a_reply_off_and_completing_with_the_last_token_is_a_stop() -> None:
    (cut,) = ask(wish(choice=["abc"], max_tokens=2))
    (whole,) = ask(wish(choice=["abc"], max_tokens=3))
    assert (cut.text, cut.finish_reason) == ("ab", "length")
    assert (whole.text, whole.finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("blank", [" ", "\n", "\t"])
def test_f12_a_model_that_loves_white_space_comes_to_an_end(blank: str) -> None:
    """vllm #38696, #44619: between two tokens of JSON there are at most 8 blanks."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x"]}, "b": {"type": "array", "items": {"const": 1}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call = tool_choice_constraint(tools, "required", parallel=False)
    with stubborn_engine([ord(blank), ord("]"), EOS]) as e:
        e.add_request("schema", "hi", wish(json=schema, max_tokens=200))
        e.add_request("tool", "hi", wish(max_tokens=250, grammar=call.grammar))
        e.add_request("any", "hi", wish(json_object=True, max_tokens=9))
        outs = {name: out.outputs[0] for name, out in run_engine(e).items()}
    assert outs["schema"].finish_reason == outs["tool"].finish_reason == "stop"
    assert json.loads(outs["schema"].text) == {"a": "x", "b": []}
    blanks = re.findall(r"\s+", outs["schema"].text)
    assert max(map(len, blanks)) == 8 and len(blanks) >= 8
    assert outs["any"].text == "{" + blank * 8


def test_f12_no_legal_token_fails_the_request_and_no_other() -> None:
    """All wishes together may leave nothing: an error that says so, not NaN and a token."""
    with engine() as e:
        e.add_request("none", "hi", wish(regex="[a-c]+", allowed_token_ids=[ord("x"), EOS]))
        e.add_request("later", "hi", wish(regex="ab", bad_words=["b"]))
        e.add_request("fine", "hi", wish(regex="ab"))
        outs = {name: out.outputs[0] for name, out in run_engine(e).items()}
    for name, text in (("none", ""), ("later", "a")):
        assert outs[name].finish_reason == "error" and outs[name].text == text
        assert "every token is masked by structured, allowed_token_ids" in outs[name].stop_reason
    assert (outs["fine"].text, outs["fine"].finish_reason) == ("ab", "stop")


def test_a_pattern_that_outgrows_its_limits_fails_its_request_and_no_other() -> None:
    """An automaton in error says "the end" in its mask; that must not look like an end."""
    with engine() as e:
        e.add_request("r", "hi", wish(regex="(a{1000}){1000}"))
        e.add_request("fine", "hi", wish(regex="xyz"))
        outs = {name: out.outputs[0] for name, out in run_engine(e).items()}
    assert outs["r"].finish_reason == "error"
    reason = "ValueError: structured.regex: lexer error: too many expressions constructed"
    assert outs["r"].stop_reason == reason
    assert outs["fine"].text == "xyz"


# -- it combines with the other wishes


def test_bias_and_allowed_tokens_choose_among_what_is_legal() -> None:
    (biased,) = ask(wish(choice=["cat", "dog"], logit_bias={ord("d"): 90.0, ord("x"): 99.0}))
    (allowed,) = ask(wish(regex="[a-z]{3}", allowed_token_ids=[ord("q"), EOS]))
    (banned,) = ask(wish(choice=["cat", "dog"], bad_words=["c"]))
    assert (biased.text, allowed.text, banned.text) == ("dog", "qqq", "dog")


def test_log_probabilities_are_those_before_the_mask() -> None:
    (free,) = ask(SamplingParams(temperature=0, max_tokens=1, logprobs=-1))
    (out,) = ask(wish(choice=["z"], logprobs=0))
    z = ord("z")
    assert out.logprobs[0][z].logprob == pytest.approx(free.logprobs[0][z].logprob, abs=1e-5)


def test_the_sampler_and_its_slow_twin_draw_the_same_under_a_grammar() -> None:
    from sampling_helpers import draw, make_request

    from minifer.execution.sampler_reference import reference_race

    logits = torch.randn(288, generator=torch.Generator().manual_seed(0)) * 4
    state = GrammarCompiler(byte_tokenizer(), 288).compile(StructuredOutput(regex="([a-m]|é|x+)*"))
    params = {"temperature": 1.3, "top_p": 0.9, "eos_token_ids": [EOS]}
    request = replace(make_request([1], [], **params), grammar=state)
    seen = set()
    for seed, sampled in enumerate(draw(logits, *[request] * 60, seeds=range(60))):
        race = reference_race(logits.tolist(), request, seed)
        assert sampled.token_id == max(race, key=race.__getitem__)
        seen.add(sampled.token_id)
    assert seen <= {*b"abcdefghijklmx", "é".encode()[0], EOS} and len(seen) > 3


# -- state: one a sequence


def test_case_121_two_grammars_at_once_and_a_bad_third_disturb_nobody() -> None:
    """vllm #11484, #9423, #15554: state is per request, bad ones are refused, and it is freed."""
    with engine() as e:
        alone = {
            name: ask(params)[0].token_ids
            for name, params in (("a", wish(regex="[ab]{20}")), ("b", wish(json=SCHEMA)))
        }
        free = SamplingParams(temperature=0, max_tokens=30)
        alone["c"] = ask(free)[0].token_ids
        e.add_request("a", "hi", wish(regex="[ab]{20}"))
        for _ in range(3):
            step_checked(e)
        e.add_request("b", "hi", wish(json=SCHEMA))
        with pytest.raises(ValueError, match=r"structured\.json: .*objekt"):
            e.add_request("bad", "hi", wish(json={"type": "objekt"}))
        e.add_request("c", "hi", free)
        states = [
            weakref.ref(request.grammar) for request in e._requests.values() if request.grammar
        ]
        outs = run_engine(e)
        assert {name: out.outputs[0].token_ids for name, out in outs.items()} == alone
        assert len(states) == 2
        gc.collect()
        assert [state() for state in states] == [None, None]


def test_n_sampled_replies_are_all_valid_and_differ() -> None:
    outs = ask(wish(json=SCHEMA, n=6, temperature=1.2, seed=5), max_num_seqs=6)
    assert len({out.text for out in outs}) > 4
    for out in outs:
        jsonschema.validate(json.loads(out.text), SCHEMA)


def test_n_replies_equal_those_of_requests_of_their_own() -> None:
    outs = ask(wish(json=SCHEMA, n=2, temperature=1.2, seed=5))
    for i, out in enumerate(outs):
        (alone,) = ask(wish(json=SCHEMA, temperature=1.2, seed=5 + i))
        assert out.token_ids == alone.token_ids


def test_preemption_keeps_the_state() -> None:
    params = [wish(json=SCHEMA, temperature=1.0, seed=i) for i in range(3)]
    alone = [ask(p)[0].token_ids for p in params]
    with engine(num_kv_blocks=18, enable_prefix_caching=False) as e:
        for i, p in enumerate(params):
            e.add_request(str(i), "hi", p.with_(max_tokens=60))
        outs = run_engine(e)
        assert e.scheduler.num_preemptions > 0
    for i, tokens in enumerate(alone):
        assert outs[str(i)].outputs[0].token_ids == tokens[:60]


def test_a_branch_goes_on_from_the_same_state() -> None:
    with engine() as e:
        e.add_request("r", "hi", wish(json=SCHEMA, temperature=1.2, seed=1))
        for _ in range(9):
            step_checked(e)
        e.fork("r", "branch", seed=77)
        outs = {name: out.outputs[0] for name, out in run_engine(e).items()}
    (alone,) = ask(wish(json=SCHEMA, temperature=1.2, seed=1))
    assert outs["r"].token_ids == alone.token_ids
    assert outs["branch"].token_ids[:9] == alone.token_ids[:9]
    assert outs["branch"].token_ids != alone.token_ids
    for out in outs.values():
        jsonschema.validate(json.loads(out.text), SCHEMA)


def test_equal_wishes_compile_once_and_share_nothing() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), 288)
    one, two = (compiler.compile(StructuredOutput(regex="ab")) for _ in range(2))
    assert compiler._start.cache_info().misses == 1
    one.accept(ord("a"))
    assert two.mask().nonzero().tolist() == [[ord("a")]]
    assert one.mask().nonzero().tolist() == [[ord("b")]]


# -- tools


def test_a_required_call_is_a_call() -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now"}},
    ]
    for seed in range(2):
        structured = tool_choice_constraint(tools, "required", parallel=False)
        (out,) = ask(wish(grammar=structured.grammar, temperature=1.0, seed=seed, max_tokens=200))
        scanner = ToolCallScanner()
        content = scanner.push(out.text)[0] + scanner.finish()[0]
        (call,) = scanner.calls
        assert content == "" and out.finish_reason == "stop"
        if call.name == "f":
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
        else:
            assert (call.name, json.loads(call.arguments)) == ("now", {})


def test_a_named_call_is_of_that_tool_and_parallel_allows_more() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    structured = tool_choice_constraint(tools, {"type": "function", "function": {"name": "g"}})
    (out,) = ask(wish(grammar=structured.grammar))
    scanner = ToolCallScanner()
    scanner.push(out.text)
    assert [(c.name, json.loads(c.arguments)) for c in scanner.calls] == [("g", {})]
    assert out.finish_reason == "stop"

    many = wish(grammar=tool_choice_constraint(tools, "required").grammar, max_tokens=130)
    scanner = ToolCallScanner()
    scanner.push(ask(many.with_(ignore_eos=True))[0].text)
    assert len(scanner.calls) >= 2


@pytest.mark.parametrize("reply", [{"json": SCHEMA}, {"json_object": True}, {"json": {}}])
def test_with_a_form_and_tools_the_model_may_answer_or_call(reply: dict) -> None:
    """Tools on "auto" and a schema: JSON that follows it, or a call, and nothing else."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    structured = tool_choice_constraint(tools, "auto", True, StructuredOutput(**reply))
    compiler = GrammarCompiler(byte_tokenizer(), 288)

    def accepts(text: str) -> bool:
        state = compiler.compile(structured)
        for byte in text.encode():
            if not state.mask()[byte]:
                return False
            state.accept(byte)
        return state.may_end

    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert accepts(call) and accepts(f"{call}\n{call}")
    assert accepts(json.dumps(PERSON)) and not accepts("Hello") and not accepts(f"{call}!")
    assert accepts("[1]") == (reply == {"json": {}})


# -- vocabularies


def sentencepiece_tokenizer() -> Tokenizer:
    """As it is converted from a GGUF file: pieces with ▁, and tokens for single bytes."""
    pieces = ["▁", *string.ascii_lowercase, "▁yes", "es", "yes", "ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    values = {"tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))]}
    file = SimpleNamespace(path="x.gguf", get=values.get, require=values.__getitem__)
    backend = _sentencepiece(file, tokens, types)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


def test_a_vocabulary_with_byte_fallback_works() -> None:
    tokenizer = sentencepiece_tokenizer()
    state = GrammarCompiler(tokenizer, 400).compile(StructuredOutput(choice=["a yes", "ab é"]))
    spelled = {tokenizer.id_to_token(token) for token in state.mask([2]).nonzero()[:, 0].tolist()}
    assert spelled == {"a", "ab", "<0x61>"}
    state.accept(tokenizer.token_to_id("a"))
    state.accept(tokenizer.token_to_id("▁yes"))
    assert state.complete


def test_tokens_that_only_the_model_has_are_masked() -> None:
    """Models pad their vocabulary; the end token of the automaton must not be one of the model."""
    for V in (288, 289, 300, 320):
        state = GrammarCompiler(byte_tokenizer(), V).compile(StructuredOutput(regex="(.|\n)*"))
        mask = state.mask([EOS, V + 5])
        assert mask.shape == (V,) and mask.dtype == torch.bool
        assert mask[EOS] and not mask[256] and not mask[258:].any()


def test_a_model_smaller_than_its_tokenizer_works() -> None:
    state = GrammarCompiler(byte_tokenizer(), 200).compile(StructuredOutput(choice=["a", "é"]))
    assert state.mask([EOS]).nonzero().tolist() == [[ord("a")], [0xC3]]


# -- refusals


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "structured needs exactly one of json, json_object, regex, choice, grammar; got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
        ({"json": 5}, "structured.json must be a JSON schema: an object, or the JSON text of one"),
        ({"json": "{"}, "structured.json must be a JSON schema"),
        ({"json": "[1]"}, "structured.json must be a JSON schema"),
        ({"json": {"const": float("nan")}}, "structured.json must be a JSON schema"),
        ({"json": {"x": object()}}, "structured.json must be a JSON schema"),
        ({"json_object": False}, "structured.json_object must be True or left out, got False"),
        ({"json_object": 1}, "structured.json_object must be True or left out, got 1"),
        ({"regex": ""}, "structured.regex must be a non-empty string of valid Unicode, got ''"),
        ({"regex": 5}, "structured.regex must be a non-empty string"),
        ({"grammar": "\ud800"}, "structured.grammar must be a non-empty string of valid Unicode"),
        ({"choice": []}, "structured.choice must be a non-empty list of texts, got []"),
        ({"choice": "ab"}, "structured.choice must be a non-empty list of texts, got 'ab'"),
        ({"choice": ["a", 5]}, "structured.choice[1] must be a non-empty string"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(fields: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        StructuredOutput(**fields)
    assert sentence in str(error.value)
    with pytest.raises(ValueError):
        SamplingParams(structured=fields)


def test_params_take_a_mapping_and_nothing_else() -> None:
    assert SamplingParams(structured={"regex": "a"}) == wish(
        regex="a", temperature=1.0, max_tokens=16
    )
    for value in (5, "regex", [], {"regexp": "a"}):
        with pytest.raises(ValueError, match="structured must be a StructuredOutput or a mapping"):
            SamplingParams(structured=value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "objekt"}}, "structured.json: Invalid type: objekt"),
        ({"json": {"not": {}}}, "structured.json: Unimplemented keys"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json": {"$ref": "#/nowhere"}}, "structured.json: Pointer '/nowhere' does not exist"),
        ({"json": {"x-guidance": {"lenient": "maybe"}}}, "structured.json: "),
        ({"regex": "a("}, "structured.regex: "),
        ({"regex": "a("}, "regex parse error: a( error: unclosed group"),  # no pointers
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: foo"}, 'structured.grammar: at 1(8): unknown name: "foo"'),
        ({"grammar": "blah"}, "structured.grammar: "),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(fields: dict, message: str) -> None:
    with engine() as e:
        with pytest.raises(ValueError) as error:
            e.add_request("r", "hi", wish(**fields))
        assert message in str(error.value) and "\n" not in str(error.value)
        assert not e.has_unfinished_requests
        e.add_request("r", "hi", wish(regex="ab"))
        assert run_engine(e)["r"].outputs[0].text == "ab"


def test_without_a_tokenizer_it_is_refused() -> None:
    with tiny_engine() as e, pytest.raises(ValueError, match="needs a tokenizer, this engine has"):
        e.add_request("r", [1, 2], wish(regex="a"))


def test_without_llguidance_it_is_refused_with_the_way_out(monkeypatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: object, **more: object) -> object:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest, **more)

    with engine() as e:
        monkeypatch.setattr(builtins, "__import__", missing)
        with pytest.raises(ValueError, match=r'pip install "minifer\[grammar\]"'):
            e.add_request("r", "hi", wish(regex="a"))
        monkeypatch.undo()
        e.add_request("r", "hi", wish(regex="a"))
        assert run_engine(e)["r"].outputs[0].text == "a"


# -- a real model


def test_smollm2_writes_json_that_follows_its_schema(pulled_model: Path) -> None:
    from minifer.llm import LLM

    schema = {
        "type": "object",
        "properties": {
            "color": {"enum": ["red", "green", "blue"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["color", "count"],
        "additionalProperties": False,
    }
    with LLM(str(pulled_model)) as llm:
        question = [{"role": "user", "content": "How many apples, and of which color? Use JSON."}]
        greedy = SamplingParams(temperature=0, max_tokens=60, structured={"json": schema})
        sampled = greedy.with_(temperature=1.0, n=4, seed=1)
        outs = llm.chat(question, greedy)[0].outputs + llm.chat(question, sampled)[0].outputs
    assert len(outs) == 5
    for out in outs:
        jsonschema.validate(json.loads(out.text), schema)
        assert out.finish_reason == "stop"
