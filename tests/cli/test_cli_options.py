"""Every field of SamplingParams and EngineConfig is an option, and every option arrives."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from minifer.cli import main
from minifer.cli.parser import (
    ENGINE_HELP,
    NOT_ENGINE_OPTIONS,
    NOT_SAMPLING_OPTIONS,
    SAMPLING_HELP,
)
from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.sampling_params import RepetitionDetection, SamplingParams
from minifer.structured_output import StructuredOutput

# field → arguments and the value they must become; none of the values is a default
SAMPLING: dict[str, tuple[str, Any]] = {
    "temperature": ("--temperature 0.5", 0.5),
    "top_k": ("--top-k 7", 7),
    "top_p": ("--top-p 0.25", 0.25),
    "min_p": ("--min-p 0.125", 0.125),
    "repetition_penalty": ("--repetition-penalty 1.5", 1.5),
    "presence_penalty": ("--presence-penalty -0.5", -0.5),
    "frequency_penalty": ("--frequency-penalty 0.5", 0.5),
    "logit_bias": ("--logit-bias 97=-2.5 --logit-bias 98=1", {97: -2.5, 98: 1.0}),
    "allowed_token_ids": ("--allowed-token-ids 97,98 --allowed-token-ids 99", (97, 98, 99)),
    "bad_words": ("--bad-words a --bad-words bb", ("a", "bb")),
    "seed": ("--seed 11", 11),
    "n": ("--n 3 --temperature 1", 3),
    "stop": ("--stop x --stop yy", ("x", "yy")),
    "stop_token_ids": ("--stop-token-ids 97,98", (97, 98)),
    "include_stop_str_in_output": ("--include-stop-str-in-output", True),
    "ignore_eos": ("--ignore-eos", True),
    "max_tokens": ("--max-tokens 5", 5),
    "min_tokens": ("--min-tokens 2", 2),
    "logprobs": ("--logprobs 2", 2),
    "prompt_logprobs": ("--prompt-logprobs 1", 1),
    "skip_special_tokens": ("--no-skip-special-tokens", False),
    "detokenize": ("--no-detokenize", False),
    "priority": ("--priority -3", -3),
    "tenant": ("--tenant acme", "acme"),
    "cache_salt": ("--cache-salt pepper", "pepper"),
    "structured": ('--structured {"regex":"[0-9]+"}', StructuredOutput(regex="[0-9]+")),
    "num_loops": ("--num-loops 4", 4),
    "exit_threshold": ("--exit-threshold 0.125", 0.125),
    "repetition_detection": (
        '--repetition-detection {"max_pattern_size":8,"min_count":3}',
        RepetitionDetection(max_pattern_size=8, min_count=3),
    ),
}
ENGINE: dict[str, tuple[str, Any]] = {
    "dtype": ("--dtype bfloat16", "bfloat16"),
    "device": ("--device cpu", "cpu"),
    "backend": ("--backend torch", "torch"),
    "tensor_parallel_size": ("--tensor-parallel-size 2", 2),
    "distributed_timeout_seconds": ("--distributed-timeout-seconds 7.5", 7.5),
    "quantize": ("--quantize int8", "int8"),
    "max_num_seqs": ("--max-num-seqs 5", 5),
    "max_num_batched_tokens": ("--max-num-batched-tokens 33", 33),
    "enable_chunked_prefill": ("--no-enable-chunked-prefill", False),
    "max_prefill_chunk": ("--max-prefill-chunk 9", 9),
    "max_model_len": ("--max-model-len 100", 100),
    "scheduling_policy": ("--scheduling-policy lpm", "lpm"),
    "priority_ageing_steps": ("--priority-ageing-steps none", None),
    "prefill_ageing": ("--prefill-ageing 0.25", 0.25),
    "mlfq_quantum": ("--mlfq-quantum 64", 64),
    "mlfq_starvation_steps": ("--mlfq-starvation-steps none", None),
    "block_size": ("--block-size 8", 8),
    "num_kv_blocks": ("--num-kv-blocks 30", 30),
    "kv_cache_bytes": ("--kv-cache-bytes 1000000", 1000000),
    "enable_prefix_caching": ("--no-enable-prefix-caching", False),
    "prefix_index": ("--prefix-index radix", "radix"),
    "kv_dram_bytes": ("--kv-dram-bytes 1000000", 1000000),
    "kv_disk_path": ("--kv-disk-path blocks", Path("blocks")),
    "kv_disk_bytes": ("--kv-disk-bytes 1000000", 1000000),
    "kv_write_policy": ("--kv-write-policy second_touch", "second_touch"),
    "kv_load_policy": ("--kv-load-policy always", "always"),
    "kv_load_timeout": ("--kv-load-timeout 0.5", 0.5),
    "float32_logits": ("--float32-logits", True),
    "speculative_method": ("--speculative-method ngram", "ngram"),
    "num_speculative_tokens": ("--num-speculative-tokens 6", 6),
    "prompt_lookup_min": ("--prompt-lookup-min 1", 1),
    "prompt_lookup_max": ("--prompt-lookup-max 5", 5),
    "speculative_model": ("--speculative-model draft --speculative-method draft", Path("draft")),
    "speculative_num_loops": ("--speculative-num-loops 2 --speculative-method loops", 2),
    "speculative_acceptance": ("--speculative-acceptance rejection", "rejection"),
    "max_num_loops": ("--max-num-loops 12", 12),
    "loop_kv_policy": ("--loop-kv-policy first-2", "first-2"),
    "loop_batching": ("--loop-batching patient", "patient"),
    "guards": ("--guards stop", "stop"),
    "debug": ("--debug", True),
}


# What an engine takes for a loop model alone; what a request may say, admission decides.
OF_LOOP_MODELS = ("max_num_loops", "loop_kv_policy", "speculative_num_loops")


class Admitted(Exception):  # noqa: N818 - it is no error
    """Thrown when a request reaches the engine: this test needs nothing of what follows."""


@pytest.fixture
def admitted(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Run `minifer generate` with some arguments; what the engine was built and asked with."""
    seen: list[tuple[EngineConfig, SamplingParams]] = []

    def add_request(engine: Engine, request_id: str, prompt: Any, params: Any, **_: Any) -> None:
        seen.append((engine.config, params))
        raise Admitted

    monkeypatch.setattr(Engine, "add_request", add_request)
    monkeypatch.chdir(tmp_path)

    def run(arguments: str) -> tuple[EngineConfig, SamplingParams]:
        command = ["generate", "hi", "--model", str(model_folder), "--json", *arguments.split()]
        assert main(command) == 1
        assert "Admitted" in capsys.readouterr().err
        return seen[-1]

    return run


def test_no_field_is_forgotten() -> None:
    sampling = {field.name for field in fields(SamplingParams)} - NOT_SAMPLING_OPTIONS
    engine = {field.name for field in fields(EngineConfig)} - NOT_ENGINE_OPTIONS
    assert sampling == SAMPLING.keys() == SAMPLING_HELP.keys()
    assert engine == ENGINE.keys() == ENGINE_HELP.keys()


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_option_reaches_the_request(name: str, admitted) -> None:
    arguments, expected = SAMPLING[name]
    _, params = admitted(arguments)
    assert getattr(params, name) == expected != getattr(SamplingParams(), name)


@pytest.mark.parametrize("name", ENGINE)
def test_an_engine_option_reaches_the_engine(
    name: str, admitted, model_folder: Path, loop_folder: Path, tmp_path: Path
) -> None:
    arguments, expected = ENGINE[name]
    (tmp_path / "draft").symlink_to(model_folder)
    if name in OF_LOOP_MODELS:
        arguments += f" --model {loop_folder}"
    config, _ = admitted(arguments)
    assert getattr(config, name) == expected
    assert name in ("device", "backend") or expected != getattr(EngineConfig(), name)


def test_without_options_the_draw_is_greedy_and_everything_else_a_default(admitted) -> None:
    _, params = admitted("")
    assert params.with_(temperature=1.0, max_tokens=16) == SamplingParams(
        output_kind=params.output_kind
    )
    assert params.temperature == 0 and params.max_tokens == 256


def test_max_tokens_none_means_until_the_context_is_full(admitted) -> None:
    assert admitted("--max-tokens none")[1].max_tokens is None


def test_the_models_own_suggestions_hold_but_for_the_temperature(
    model_folder: Path, admitted, tmp_path: Path
) -> None:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    suggestions = '{"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.25}'
    (tmp_path / "generation_config.json").write_text(suggestions)
    _, params = admitted(f"--model {tmp_path} --top-p 0.5")
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0, 0.5, 1.25)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--temperature 5", "temperature must be a number in [0, 2], got 5.0"),
        (
            "--n 2",
            "n must be 1 when temperature is 0 (greedy), got n=2; set a temperature above 0",
        ),
        ("--top-k many", "argument --top-k: invalid int value: 'many'"),
        ("--seed x", "argument --seed: must be an integer or none, got 'x'"),
        ("--logit-bias 5", "argument --logit-bias: must be ID=X such as 17=-2.5, got '5'"),
        ("--stop-token-ids a", "argument --stop-token-ids: must be token ids such as 17 or 17,42"),
        ("--repetition-detection {", "argument --repetition-detection: must be JSON, got '{'"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--block-size 0", "block_size must be an integer of at least 1, got 0"),
        ("--max-tok 5", "unrecognized arguments: --max-tok"),  # an abbreviation is not an option
        ("--max-tokens 1000", "the model's limit is 512"),
        ("--allowed-token-ids 288", "allowed_token_ids must be below 288, got 288"),
        ("--structured [", "argument --structured: must be JSON, got '['"),
        ("--structured {}", "structured needs exactly one of json, json_object, regex, choice,"),
        ("--num-loops 2", "num_loops needs a loop model such as parcae-tiny"),
        ("--exit-threshold 0.5", "exit_threshold needs a loop model such as parcae-tiny"),
        ("--exit-threshold 2", "exit_threshold must be a number in [0, 1], or None, got 2.0"),
        ("--max-num-loops 9", "max_num_loops needs a loop model such as parcae-tiny"),
        ("--loop-kv-policy first-1", "loop_kv_policy needs a loop model such as parcae-tiny"),
        ("--loop-kv-policy last", "loop_kv_policy must be full, terminal, cyclic-M or first-M"),
        ("--loop-kv-policy terminal", "needs enable_prefix_caching=False"),
        ('--structured {"regex":"a("}', "structured.regex: at 1(8): invalid regex"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(
    arguments: str, sentence: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--model", str(model_folder), *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minifer: error: ") and err.count("\n") == 1
    assert sentence in err


def test_bad_parameters_are_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "hi", "--model", "/nowhere", "--top-p", "2"]) == 2
    assert "top_p must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--num-loops 9", "num_loops must be at most max_num_loops (8), got 9"),
        ("--num-loops 5 --max-num-loops 4", "num_loops must be at most max_num_loops (4), got 5"),
        (
            "--loop-kv-policy terminal --no-enable-prefix-caching --max-num-batched-tokens 2",
            "with loop_kv_policy=terminal it must fit into one step, and max_num_batched_tokens",
        ),
    ],
)
def test_a_depth_that_the_engine_does_not_have_is_refused(
    arguments: str, sentence: str, loop_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--model", str(loop_folder), *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert sentence in err


def test_generate_tells_the_loops_of_each_token(
    loop_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "hi", "--raw", "--model", str(loop_folder), "--max-tokens", "5"]
    command += ["--ignore-eos", "--num-loops", "4"]
    assert main([*command, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["outputs"]
    assert answer["num_loops"] == [4] * 5
    assert main([*command, "--exit-threshold", "1", "--stats"]) == 0
    err = capsys.readouterr().err
    # The first token is the prompt's, which runs all loops; to compare two states takes two.
    assert "loops   2.4 a token, from 2 to 4" in err


def test_a_plain_model_says_nothing_of_loops(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "hi", "--model", str(model_folder), "--max-tokens", "2", "--stats"]
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "loops" not in out and "loops" not in err
