"""`LLM` from outside: prompts in, text out."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from minifer import LLM, SamplingParams
from minifer.execution.reference import reference_generate, reference_logits
from minifer.postprocessing.hooks import HookVerdict
from minifer.request import OutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def llm(text_model):
    with LLM(str(text_model), block_size=4, num_kv_blocks=128) as llm:
        yield llm
    assert llm.engine.kv.pool.num_free == 128


def test_generate_equals_the_reference(llm):
    prompts = ["The for statement", "def", "日本"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert output.prompt_token_ids == ids
        truth = reference_generate(llm.engine.runner.model, ids, 12, eos_token_ids=(257,))
        assert output.outputs[0].token_ids == truth
        assert output.outputs[0].text == llm.tokenizer.decode(truth)
        assert output.finished


def test_a_prompt_may_be_token_ids_and_params_one_a_prompt(llm):
    ids = llm.tokenizer.encode("abc")
    (by_text,) = llm.generate("abc", GREEDY)
    (by_ids,) = llm.generate(ids, GREEDY)
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert by_ids.prompt is None
    short, long = llm.generate([ids, ids], [GREEDY.with_(max_tokens=2), GREEDY])
    assert (len(short.outputs[0].token_ids), len(long.outputs[0].token_ids)) == (2, 12)
    with pytest.raises(ValueError, match=r"one entry a prompt \(2\), got 1"):
        llm.generate([ids, ids], [GREEDY])
    assert llm.generate([], GREEDY) == []


def test_case_107_a_refused_prompt_runs_none_of_its_batch(llm):
    for bad in ("", [], "x" * 256):
        with pytest.raises(ValueError, match=r"at least 1 token|the limit is 255"):
            llm.generate(["fine", bad], GREEDY.with_(max_tokens=None))
        assert not llm.engine.has_unfinished_requests


def test_stream_joins_to_what_generate_gives(llm):
    params = SamplingParams(temperature=1.2, seed=7, max_tokens=40)
    (whole,) = llm.generate("stream", params)
    pieces = list(llm.stream("stream", params))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    joined = [token for piece in pieces for token in piece.outputs[0].token_ids]
    assert joined == whole.outputs[0].token_ids
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    grown = [
        p.outputs[0].text for p in llm.stream("stream", params.with_(output_kind="final_only"))
    ]
    assert grown == [whole.outputs[0].text]


def test_a_stream_that_is_closed_aborts_and_two_may_take_turns(llm):
    longer = GREEDY.with_(max_tokens=40, ignore_eos=True)
    (alone,) = llm.generate("two", longer)
    first, second = llm.stream("one", longer), llm.stream("two", longer)
    llm.generate("three", GREEDY)  # drives the engine; what it brings the others waits for them
    text = next(second).outputs[0].text
    next(first)
    first.close()
    assert llm.engine.num_unfinished_requests == 1
    text += "".join(piece.outputs[0].text for piece in second)
    assert text == alone.outputs[0].text


def test_a_stream_closed_before_its_first_piece_aborts_too(llm):
    stream = llm.stream("x", GREEDY)
    assert llm.engine.num_unfinished_requests == 1
    stream.close()
    assert not llm.engine.has_unfinished_requests


def test_after_close_there_are_no_answers_and_no_tensors(text_model):
    with LLM(str(text_model), num_kv_blocks=64) as llm:
        stream = llm.stream("x", GREEDY)
        next(stream)
        model = weakref.ref(llm.engine.runner.model)
    with pytest.raises(RuntimeError, match="closed before this request was finished"):
        next(stream)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.generate("x", GREEDY)
    llm.close()
    gc.collect()
    assert model() is None


def test_finished_requests_leave_nothing_behind(llm):
    llm.generate(["a", "b"], GREEDY)
    list(llm.stream("c", GREEDY))
    with pytest.raises(ValueError, match="at least 1 token"):
        llm.generate(["a", ""], GREEDY)
    assert not llm._inbox


class EndAfter3:
    """A hook with a state of its own."""

    num_tokens = 0

    def on_token(self, token_id, text):
        self.num_tokens += 1
        return HookVerdict(text, "stop" if self.num_tokens == 3 else None)

    def on_finish(self, text):
        return text


def test_every_prompt_has_its_own_hooks(llm):
    outputs = llm.generate(["a", "b", "c"], GREEDY.with_(ignore_eos=True), hooks=[EndAfter3()])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3, 3]


@pytest.mark.parametrize("prompts", [None, 5, b"ab", [b"ab"], {"prompt": "a"}, [1, "a"], [True]])
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts, GREEDY)


def test_token_ids_may_be_numpy_arrays(llm):
    (one,) = llm.generate(np.array([97, 98]), GREEDY)
    two = llm.generate(np.array([[97, 98], [99, 100]]), GREEDY)
    assert len(two) == 2 and two[0].outputs == one.outputs


@pytest.mark.parametrize("params", [{"n": 1}, 5, "greedy", [GREEDY, None, 5]])
def test_what_is_no_params_is_refused(llm, params):
    with pytest.raises(ValueError, match="params must be SamplingParams"):
        llm.generate(["a", "b", "c"], params)


@pytest.mark.parametrize("messages", [[], None, "hi", {"role": "user", "content": "hi"}])
def test_what_is_no_list_of_messages_is_refused(llm, messages):
    with pytest.raises(ValueError, match="messages must be a list of at least one message"):
        llm.chat(messages, GREEDY)


def test_case_061_and_stop_strings_through_the_engine(llm):
    (whole,) = llm.generate("stop", GREEDY.with_(max_tokens=30))
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = text[3:6]
    (cut,) = llm.generate("stop", GREEDY.with_(max_tokens=30, stop=[stop]))
    (answer,) = cut.outputs
    assert answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert llm.tokenizer.decode(answer.token_ids).startswith(answer.text + stop)
    (kept,) = llm.generate(
        "stop", GREEDY.with_(max_tokens=30, stop=stop, include_stop_str_in_output=True)
    )
    assert kept.outputs[0].text == answer.text + stop
    position = next(i for i, token in enumerate(ids) if token not in ids[:i] and i > 2)
    (by_id,) = llm.generate("stop", GREEDY.with_(max_tokens=30, stop_token_ids=[ids[position]]))
    assert by_id.outputs[0].token_ids == ids[: position + 1]
    assert by_id.outputs[0].stop_reason == ids[position]
    assert by_id.outputs[0].text == llm.tokenizer.decode(ids[:position])


def test_case_062_a_stop_string_waits_for_min_tokens(llm):
    bias = {ord("\n"): 1000.0}
    params = GREEDY.with_(logit_bias=bias, stop=["\n"])
    assert len(llm.generate("x", params)[0].outputs[0].token_ids) == 1
    (output,) = llm.generate("x", params.with_(min_tokens=5))
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].text == "\n" * 5


def test_case_065_a_reply_cut_inside_a_character_ends_with_its_replacement(llm):
    first_byte = "日".encode()[0]
    params = GREEDY.with_(logit_bias={first_byte: 1000.0}, max_tokens=1)
    (output,) = llm.generate("x", params)
    assert output.outputs[0].text == "\ufffd"
    chunks = [piece.outputs[0].text for piece in llm.stream("x", params)]
    assert chunks == ["\ufffd"]


def test_detokenize_off_makes_no_text_and_bad_words_are_avoided(llm):
    (output,) = llm.generate("x", GREEDY.with_(detokenize=False))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 12
    (plain,) = llm.generate("abc", GREEDY.with_(ignore_eos=True))
    word = llm.tokenizer.decode(plain.outputs[0].token_ids[4:6])
    if word.isascii():
        (clean,) = llm.generate("abc", GREEDY.with_(bad_words=[word]))
        assert word not in clean.outputs[0].text


def test_logprobs_name_their_tokens(llm):
    (output,) = llm.generate("x", GREEDY.with_(logprobs=2))
    for token, entries in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert entries[token].rank == 1
        assert entries[token].decoded_token == llm.tokenizer.decode([token], False)


def test_chat_applies_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    two = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in two] == [output.outputs[0].token_ids] * 2
    with pytest.raises(ValueError, match="at least one message"):
        llm.chat([], GREEDY)


def test_score_is_the_sum_of_log_probabilities(llm):
    (score,) = llm.score("The cat")
    ids = llm.tokenizer.encode("The cat")
    table = torch.log_softmax(reference_logits(llm.engine.runner.model, ids), -1)
    truth = [table[i, token].item() for i, token in enumerate(ids[1:])]
    assert score.token_ids == ids
    assert score.token_logprobs == pytest.approx(truth, abs=1e-4)
    assert score.total == pytest.approx(sum(truth), abs=1e-3)
    assert score.perplexity == pytest.approx(math.exp(-sum(truth) / len(truth)), rel=1e-4)
    assert math.isnan(llm.score([65])[0].perplexity)


def test_an_unknown_option_or_model_is_an_error(text_model):
    with pytest.raises(ValueError, match="unknown engine option 'blok_size'"):
        LLM(str(text_model), blok_size=4)
    with pytest.raises(ValueError, match="no-such-model"):
        LLM("no-such-model")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(text_model, dtype):
    with LLM(str(text_model), dtype=dtype, num_kv_blocks=32) as llm:
        (output,) = llm.generate("half", GREEDY.with_(ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 12
        assert llm.engine.runner.kv.keys[0].dtype == getattr(torch, dtype)


def test_defaults_come_from_generation_config(text_model, tmp_path):
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(text_model, folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.9, "do_sample": True})
    )
    with LLM(str(folder), num_kv_blocks=32) as llm:
        params = llm.default_params()
        assert (params.temperature, params.top_p) == (0.6, 0.9)
        assert {2, 7, 257} <= llm.engine._eos_token_ids
    assert params.output_kind is OutputKind.CUMULATIVE
