"""Guards where they live: on an engine whose logits follow a script, byte by byte."""

from __future__ import annotations

import copy

import pytest
import torch
from fakes import check_engine, run_engine, tiny_config, tiny_engine

from minifer.events import ListSink
from minifer.postprocessing.guards.safety import SafetyHook, WordListCheck
from minifer.postprocessing.hooks import HookVerdict
from minifer.sampling_params import SamplingParams
from minifer.text.byte_tokenizer import VOCAB_SIZE, byte_tokenizer

CONFIG = tiny_config(vocab_size=VOCAB_SIZE, max_position_embeddings=1024)


class Script:
    """A runner that makes each request say its text, whatever the model thinks."""

    def __init__(self, engine, texts: dict[str, str]):
        self.inner, self.texts = engine.runner, texts
        engine.runner = self

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def forward(self, step):
        logits = torch.zeros_like(self.inner.forward(step))
        for entry, row in step.sampled:
            text = self.texts[entry.request.request_id.split("#")[0]].encode()
            logits[row, text[entry.request.num_output_tokens % len(text)]] = 50.0
        return logits


def say(texts: dict[str, str], prompt: str = "Why?", hooks=(), tokenizer=True, **fields):
    """The outputs, the engine and what it reported."""
    options = {"guards": fields.pop("guards", "report"), "num_kv_blocks": 128, "debug": False}
    sink = ListSink()
    engine = tiny_engine(
        config=CONFIG, tokenizer=byte_tokenizer() if tokenizer else None, sinks=[sink], **options
    )
    Script(engine, texts)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 80, **fields})
    for name in texts:
        engine.add_request(
            name, prompt if tokenizer else list(prompt.encode()), params, hooks=copy.deepcopy(hooks)
        )
    outputs = {name: output.outputs for name, output in run_engine(engine).items()}
    trips = [(e.request_id, dict(e.data)) for e in sink.events if e.name == "guard.tripped"]
    assert {e.stage for e in sink.events if e.name == "guard.tripped"} <= {"postprocessing"}
    return outputs, engine, trips


CLEAN = "Dogs bark at night because they hear more than we do, and nobody else is awake. "


def test_reports_end_nothing() -> None:
    outputs, engine, trips = say({"clean": CLEAN, "loop": "hi ", "drift": "Well. 狗在夜里吠叫"})
    assert {name: o[0].finish_reason for name, o in outputs.items()} == dict.fromkeys(
        ("clean", "loop", "drift"), "length"
    )
    assert engine.guard_trips == {"repetition": 1, "language_drift": 1}
    assert {(name, data["guard"], data["action"]) for name, data in trips} == {
        ("loop", "repetition", "report"),
        ("drift", "language_drift", "report"),
    }
    assert (
        next(d for n, d in trips if n == "loop")["reason"] == "'i h' (3 tokens) 21 times in a row"
    )


def test_stop_ends_the_reply_and_no_other() -> None:
    texts = {"clean": CLEAN, "loop": "hi ", "drift": "Well. 狗在夜里吠叫"}
    outputs, engine, trips = say(texts, guards="stop")
    assert {name: o[0].finish_reason for name, o in outputs.items()} == {
        "clean": "length",
        "loop": "repetition",
        "drift": "language_drift",
    }
    assert outputs["loop"][0].text == ("hi " * 22)[:64]
    assert outputs["loop"][0].stop_reason == "'i h' (3 tokens) 21 times in a row"
    assert outputs["drift"][0].text == "Well. 狗在夜里吠"
    assert outputs["clean"][0].text == CLEAN
    assert engine.guard_trips == {"repetition": 1, "language_drift": 1}
    assert [data["action"] for _, data in trips] == ["stop", "stop"]


def test_off_is_off() -> None:
    outputs, engine, trips = say({"loop": "hi "}, guards="off")
    assert (outputs["loop"][0].finish_reason, engine.guard_trips, trips) == ("length", {}, [])


@pytest.mark.parametrize("fields", [{"detokenize": False}, {"tokenizer": False}])
def test_without_text_the_guards_of_tokens_remain(fields) -> None:
    texts = {"loop": "hi ", "drift": "狗在夜里吠叫" * 3}
    outputs, engine, _ = say(texts, guards="stop", max_tokens=60, **fields)
    assert engine.guard_trips == {}
    outputs, engine, _ = say({"loop": "hi "}, guards="stop", **fields)
    assert engine.guard_trips == {"repetition": 1}
    assert len(outputs["loop"][0].token_ids) == 64


def test_a_prompt_of_token_ids_is_read_too() -> None:
    prompt = list("请问狗为什么叫?".encode())
    _, engine, _ = say({"drift": "狗在夜里吠叫因为"}, prompt=prompt, max_tokens=24)
    assert engine.guard_trips == {}


def test_every_sequence_of_n_is_watched_by_itself() -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 1}
    outputs, engine, trips = say({"loop": "hi "}, guards="stop", **fields)
    assert [name for name, _ in trips] == ["loop", "loop#1", "loop#2"]
    assert [output.finish_reason for output in outputs["loop"]] == ["repetition"] * 3
    assert engine.guard_trips == {"repetition": 3}


def test_a_request_may_set_its_own_limits() -> None:
    detection = {"max_pattern_size": 4, "min_count": 3}
    outputs, engine, trips = say({"loop": "hi "}, repetition_detection=detection)
    (output,) = outputs["loop"]
    assert (output.finish_reason, output.stop_reason) == ("repetition", "repetition_detected")
    assert output.text == "hi hi hi "
    assert engine.guard_trips == {"repetition": 1}
    assert trips[0][1]["action"] == "stop"
    outputs, _, _ = say(
        {"loop": "hi "}, repetition_detection=detection, min_tokens=20, guards="off"
    )
    assert len(outputs["loop"][0].token_ids) == 21


def test_a_safety_check_ends_the_reply_before_the_word() -> None:
    hooks = [SafetyHook([WordListCheck(["secret"], name="secrets")])]
    outputs, _, _ = say({"x": "It is a secret, you know. ", "y": CLEAN}, hooks=hooks)
    (output,) = outputs["x"]
    assert (output.text, output.finish_reason) == ("It is a ", "content_filter")
    assert output.stop_reason == "secrets"
    assert outputs["y"][0].text == CLEAN


@pytest.mark.parametrize("fields", [{"max_tokens": 14}, {"stop": [","]}, {"max_tokens": 15}])
def test_a_word_that_the_end_completes_is_not_released_and_the_caller_is_told(fields) -> None:
    hooks = [SafetyHook([WordListCheck(["secret"])])]
    outputs, _, _ = say({"x": "It is a secret, you know. "}, hooks=hooks, **fields)
    (output,) = outputs["x"]
    assert (output.text, output.finish_reason) == ("It is a ", "content_filter")


def test_text_that_was_held_comes_out_at_the_end() -> None:
    hooks = [SafetyHook([WordListCheck(["secret"])])]
    outputs, _, _ = say({"x": "It is a secret, you know. "}, hooks=hooks, max_tokens=11)
    assert outputs["x"][0].text == "It is a sec"
    assert outputs["x"][0].finish_reason == "length"


# -- hooks that misbehave


class Returns:
    """A hook that answers with whatever it was given."""

    def __init__(self, answer, at_the_end=""):
        self.answer, self.at_the_end = answer, at_the_end

    def on_token(self, token_id, text):
        return self.answer

    def on_finish(self, text):
        return self.at_the_end


@pytest.mark.parametrize(
    "hook",
    [
        Returns("text"),
        Returns(None),
        Returns(HookVerdict(None)),  # type: ignore[arg-type]
        Returns(HookVerdict("", "")),
        Returns(HookVerdict("", 5)),  # type: ignore[arg-type]
        Returns(HookVerdict("", "\ud800")),
        Returns(HookVerdict(""), None),
        Returns(HookVerdict(""), HookVerdict("", "")),
    ],
)
def test_an_answer_that_is_no_verdict_fails_its_request(hook) -> None:
    outputs, engine, _ = say({"x": CLEAN}, hooks=[hook], max_tokens=5)
    (output,) = outputs["x"]
    assert output.finish_reason == "error"
    assert output.stop_reason.startswith("TypeError: Returns must return a HookVerdict with a text")
    check_engine(engine)


@pytest.mark.parametrize("method", ["step", "abort", "add_request", "fork", "close"])
@pytest.mark.parametrize("where", ["on_token", "on_finish"])
def test_a_hook_that_calls_the_engine_fails_its_request_and_nothing_else(method, where) -> None:
    engine = tiny_engine()
    arguments = {"abort": ["x"], "add_request": ["new", [1]], "fork": ["good", "new"]}

    class Caller:
        def on_token(self, token_id, text):
            if where == "on_token":
                getattr(engine, method)(*arguments.get(method, []))
            return HookVerdict(text)

        def on_finish(self, text):
            if where == "on_finish":
                getattr(engine, method)(*arguments.get(method, []))
            return text

    params = SamplingParams(temperature=0, max_tokens=4)
    engine.add_request("bad", [1, 2], params, hooks=[Caller()])
    engine.add_request("good", [1, 2], params)
    last = run_engine(engine)
    assert last.keys() == {"bad", "good"}
    assert last["bad"].outputs[0].finish_reason == "error"
    assert "was called while the engine works" in last["bad"].outputs[0].stop_reason
    assert last["good"].outputs[0].finish_reason == "length"
    engine.add_request("later", [1, 2], params)  # the engine is as good as before
    assert run_engine(engine)["later"].outputs[0].token_ids == last["good"].outputs[0].token_ids


def test_a_sink_that_calls_the_engine_is_dropped() -> None:
    class Caller:
        def write(self, event):
            if event.name == "request.admitted":
                engine.abort(event.request_id)

    engine = tiny_engine(sinks=[Caller()])
    with pytest.warns(UserWarning, match="was called while the engine works"):
        engine.add_request("x", [1, 2], SamplingParams(max_tokens=4))
    assert run_engine(engine)["x"].outputs[0].finish_reason == "length"


# -- F-02: logits that are no numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("after", [1, 3])
def test_f02_nan_in_v_of_one_request_stays_with_it(value: float, after: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = {"bad": [5, 6, 7, 8, 9, 10, 11, 12, 13], "good": [3, 4, 3, 4, 3], "late": [9, 9]}
    clean = tiny_engine()
    for name, prompt in prompts.items():
        clean.add_request(name, prompt, params)
    expected = {name: o.outputs[0].token_ids for name, o in run_engine(clean).items()}

    sink = ListSink()
    engine = tiny_engine(sinks=[sink])
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    for _ in range(after):
        engine.step()
    bad = next(r for r in engine.scheduler.running if r.request_id == "bad")
    poisoned = list(bad.block_table)
    engine.runner.kv.values[0][poisoned[0], 1] = value
    last = run_engine(engine)

    (output,) = last["bad"].outputs
    assert output.finish_reason == "error" and "logits hold" in output.stop_reason
    assert output.token_ids == expected["bad"][:after]  # no token from what is no number
    for name in ("good", "late"):
        assert last[name].outputs[0].token_ids == expected[name]
    assert engine.guard_trips == {"non_finite": 1}
    (trip,) = [e for e in sink.events if e.name == "guard.tripped"]
    assert trip.request_id == "bad"
    assert trip.data == {"guard": "non_finite", "reason": output.stop_reason, "action": "stop"}

    # Its blocks are not found again, and whoever gets them is not harmed.
    for again in range(2):
        engine.add_request(f"again-{again}", prompts["bad"], params)
        result = run_engine(engine)[f"again-{again}"]
        assert result.num_cached_tokens == (0 if again == 0 else 8)
        assert result.outputs[0].token_ids == expected["bad"]
    fill = [[i % 30, *range(1, 30)] for i in range(40)]  # every block is used again
    for i, prompt in enumerate(fill):
        engine.add_request(f"fill-{i}", prompt, params.with_(max_tokens=2))
    assert {o.outputs[0].finish_reason for o in run_engine(engine).values()} == {"length"}


def test_f02_a_row_that_is_masked_by_its_own_rules_is_no_alarm() -> None:
    engine = tiny_engine(eos=[3])
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=2, allowed_token_ids=[3])
    engine.add_request("x", [1, 2], params)
    assert run_engine(engine)["x"].outputs[0].finish_reason == "error"
    assert engine.guard_trips == {}
