"""argparse, taught our manners, and options made from the fields of a dataclass."""

from __future__ import annotations

import argparse
import json
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

from minifer.config import (
    BACKENDS,
    DTYPES,
    GUARD_ACTIONS,
    KV_LOAD_POLICIES,
    KV_WRITE_POLICIES,
    POLICIES,
    PREFIX_INDEXES,
    QUANTIZE,
    SPECULATIVE_ACCEPTANCE,
    SPECULATIVE_METHODS,
    EngineConfig,
)
from minifer.loops import LOOP_BATCHING
from minifer.sampling_params import RepetitionDetection, SamplingParams
from minifer.structured_output import StructuredOutput

# Fields that are no option, and why.
NOT_SAMPLING_OPTIONS = {"output_kind"}  # how much of the answer comes when: the command decides
NOT_ENGINE_OPTIONS = {
    "model",  # has an option of its own
    "seed",  # of requests that bring none; --seed is the request's
}

# field → what stands for its value, and its sentence in --help
SAMPLING_HELP: Mapping[str, tuple[str, str]] = {
    "temperature": ("T", "0 takes the likeliest token, higher draws more freely (default: 0)"),
    "top_k": ("K", "draw from the K likeliest tokens; 0 is off"),
    "top_p": ("P", "draw from the likeliest tokens that hold P of the probability"),
    "min_p": ("P", "draw from tokens at least P times as likely as the likeliest"),
    "repetition_penalty": ("X", "above 1: tokens of prompt and answer become less likely"),
    "presence_penalty": ("X", "lower the logit of every token the answer holds by X"),
    "frequency_penalty": ("X", "lower it by X for each time the answer holds it"),
    "logit_bias": ("ID=X", "add X to the logit of token ID (repeatable)"),
    "allowed_token_ids": ("ID,…", "draw from these tokens only"),
    "bad_words": ("TEXT", "never generate this text (repeatable)"),
    "seed": ("N", "makes the draw repeatable, whatever else runs"),
    "n": ("N", "answers to one prompt; needs a temperature above 0"),
    "stop": ("TEXT", "end before this text (repeatable)"),
    "stop_token_ids": ("ID,…", "end at one of these tokens"),
    "include_stop_str_in_output": ("", "keep what ended the answer"),
    "ignore_eos": ("", "go on when the model wants to end"),
    "max_tokens": ("N", "tokens of the answer; none: as many as fit (default: 256)"),
    "min_tokens": ("N", "no end before so many"),
    "logprobs": ("K", "log-probabilities of the K likeliest tokens; -1: all of them"),
    "prompt_logprobs": ("K", "the same for the tokens of the prompt"),
    "skip_special_tokens": ("", "leave tokens like <|im_end|> out of the text (default: yes)"),
    "detokenize": ("", "turn tokens into text (default: yes)"),
    "priority": ("N", "smaller is sooner, with --scheduling-policy priority"),
    "tenant": ("NAME", "on whose behalf, for --scheduling-policy vtc"),
    "cache_salt": ("TEXT", "share cached prefixes with requests of this salt only"),
    "repetition_detection": (
        "JSON",
        'end an answer that repeats itself: {"max_pattern_size": 32, "min_count": 4}',
    ),
    "num_loops": ("N", "loop models: how often the core runs for each token"),
    "exit_threshold": (
        "X",
        "loop models: a token leaves the loop when its state turns by less than X (1 − cosine)",
    ),
    "structured": (
        "JSON",
        'the form of the answer: {"json": SCHEMA}, {"json_object": true}, {"regex": "[0-9]+"}, '
        '{"choice": ["yes", "no"]} or {"grammar": LARK}',
    ),
}
ENGINE_HELP: Mapping[str, tuple[str, str]] = {
    "dtype": ("", "numbers to compute with; auto: float32 on a CPU, else the model's"),
    "device": ("NAME", "auto, cpu, cuda, cuda:1, …"),
    "backend": (
        "",
        "who runs the operations: PyTorch, whole steps in one call of C++ that a compiler here "
        "makes for this CPU, our Triton kernels one by one, or the megakernel for decode steps; "
        "the last two are slow on a CPU, where kernels are interpreted",
    ),
    "tensor_parallel_size": (
        "P",
        "cut the model for P processes: each holds its part of every matrix and of the KV cache",
    ),
    "distributed_timeout_seconds": (
        "S",
        "seconds that one of them may keep the others waiting before the engine gives up",
    ),
    "quantize": (
        "",
        "weights as 8- or 4-bit codes, on a CPU: those of the model's GGUF file, or made from any "
        "checkpoint while loading",
    ),
    "max_num_seqs": ("N", "sequences in one step"),
    "max_num_batched_tokens": ("N", "token budget of one step"),
    "enable_chunked_prefill": (
        "",
        "cut prompts into pieces that share steps with decodes (default: yes); without it whole "
        "prompts go first, and one longer than the budget goes alone",
    ),
    "max_prefill_chunk": ("N", "tokens of one prompt in one step; none: the whole budget"),
    "max_model_len": ("N", "tokens of prompt and answer; none: what the model was trained for"),
    "scheduling_policy": (
        "",
        "who goes first: the oldest (fcfs), by priority, the longest cached prefix (lpm), the "
        "shortest prefill, as it began (sjf) or asked anew every step (srpt), who had the fewest "
        "tokens so far (mlfq), or the tenant that had the fewest (vtc)",
    ),
    "priority_ageing_steps": ("N", "steps of waiting worth one level of priority; none: never"),
    "prefill_ageing": (
        "X",
        "sjf, srpt: tokens of prefill that a request is forgiven for each one computed while it "
        "waits; 0: none, and long prompts may wait for ever",
    ),
    "mlfq_quantum": ("N", "mlfq: tokens of the first level; each next one has twice as many"),
    "mlfq_starvation_steps": (
        "N",
        "mlfq: steps of waiting after which a request starts again at the first level; none: never",
    ),
    "block_size": ("N", "tokens in a block of the KV cache"),
    "num_kv_blocks": ("N", "blocks of the KV cache; overrides --kv-cache-bytes"),
    "kv_cache_bytes": (
        "N",
        "bytes of the KV cache, in each process; none: a share of what is free",
    ),
    "enable_prefix_caching": ("", "reuse the KV of equal beginnings (default: yes)"),
    "prefix_index": ("", "how equal beginnings are found"),
    "kv_dram_bytes": ("N", "bytes for copies of KV blocks in DRAM; none: no such tier"),
    "kv_disk_path": ("FOLDER", "keep KV blocks in files there, also over a restart"),
    "kv_disk_bytes": ("N", "bytes that folder may hold"),
    "kv_write_policy": ("", "through: store every full block; second_touch: one used again"),
    "kv_load_policy": ("", "auto: load a block where that beats computing it; always: load it"),
    "kv_load_timeout": ("S", "seconds a request waits for its blocks from disk"),
    "float32_logits": ("", "compute logits in float32 with a smaller dtype"),
    "speculative_method": (
        "",
        "guess the next tokens and let one pass judge them: from what was written before (ngram), "
        "by a second model (draft), or by a loop model's first loops (loops); replies stay the "
        "same",
    ),
    "num_speculative_tokens": ("N", "tokens guessed at a time"),
    "prompt_lookup_min": ("N", "ngram: so many last tokens must have occurred before"),
    "prompt_lookup_max": ("N", "ngram: look for so many of them first"),
    "speculative_model": ("NAME", "draft: the second model; it needs the same vocabulary"),
    "speculative_num_loops": ("N", "loops: iterations of a guess; none: a quarter"),
    "speculative_acceptance": (
        "",
        "above temperature 0: same_noise keeps each reply as it would be, rejection only the "
        "distribution of replies",
    ),
    "max_num_loops": (
        "N",
        "loop models: what a request may ask for, and KV is kept for; none: the mean",
    ),
    "loop_kv_policy": (
        "NAME",
        "loop models: which iterations keep KV: full, terminal, cyclic-M or first-M",
    ),
    "loop_batching": (
        "",
        "loop models: a step ends when one request is through (continuous), half of them "
        "(patient) or all (lockstep)",
    ),
    "guards": ("", "a reply that repeats itself or changes its script: report it, or stop it too"),
    "debug": ("", "poison unused KV memory and check every invariant after every step; slow"),
}
_CHOICES = {
    "dtype": DTYPES,
    "quantize": QUANTIZE,
    "backend": BACKENDS,
    "scheduling_policy": POLICIES,
    "prefix_index": PREFIX_INDEXES,
    "kv_write_policy": KV_WRITE_POLICIES,
    "kv_load_policy": KV_LOAD_POLICIES,
    "speculative_method": SPECULATIVE_METHODS,
    "speculative_acceptance": SPECULATIVE_ACCEPTANCE,
    "guards": GUARD_ACTIONS,
    "loop_batching": tuple(LOOP_BATCHING),
}


class Parser(argparse.ArgumentParser):
    """Raises `ValueError` in one sentence instead of printing a usage text and leaving.

    Options cannot be abbreviated: a new one would change what a script means.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_layout, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def _layout(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=100)


def add_command(
    commands: Any,
    usage: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    about: str,
    examples: Sequence[tuple[str, str]],
    code: Sequence[tuple[str, str]],
    prog: str = "minifer",
) -> Parser:
    """A command whose help explains it, shows examples and names the code behind it.

    usage: the name and what must follow it. examples: (arguments, what they do). code: (place,
    what lives there). prog: what stands before the name.
    """
    description = [textwrap.fill(about, 96), "", "examples:"]
    description += [f"  minifer {args}\n      {does}" for args, does in examples]
    width = max(len(place) for place, _ in code) + 2
    epilog = ["in the code:", *(f"  {place:{width}}{what}" for place, what in code)]
    parser: Parser = commands.add_parser(
        usage.split()[0],
        usage=f"{prog} {usage} [options]",
        help=summary,
        description="\n".join(description),
        epilog="\n".join(epilog),
    )
    parser.set_defaults(run=run)
    return parser


def add_model_options(parser: Parser, skip: Iterable[str] = ()) -> None:
    """--model and all fields of `SamplingParams` and `EngineConfig` but those in `skip`."""
    add_model_option(parser)
    sampling = parser.add_argument_group("sampling (the fields of minifer.SamplingParams)")
    _add_fields(sampling, SamplingParams, SAMPLING_HELP, NOT_SAMPLING_OPTIONS | set(skip))
    add_engine_options(parser)


def add_model_option(parser: Parser) -> None:
    parser.add_argument(
        "--model",
        default="default",
        metavar="NAME",
        help="what `minifer pull` fetched (default), minifer-tiny, the loop model parcae-tiny, a "
        "folder in Hugging Face format, a .gguf file, or a hub id",
    )


def add_engine_options(parser: Parser, only: Iterable[str] | None = None) -> None:
    """All fields of `EngineConfig`, or `only` some."""
    engine = parser.add_argument_group("engine (the fields of minifer.EngineConfig)")
    skip = set() if only is None else {field.name for field in fields(EngineConfig)} - set(only)
    _add_fields(engine, EngineConfig, ENGINE_HELP, NOT_ENGINE_OPTIONS | skip)


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that were given, and no others."""
    return _given(arguments, SamplingParams, NOT_SAMPLING_OPTIONS)


def engine_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EngineConfig` that were given, and no others."""
    return _given(arguments, EngineConfig, NOT_ENGINE_OPTIONS)


def engine_arguments(model: str | None, options: Mapping[str, Any]) -> list[str]:
    """What `engine_fields` has read, written for another command's line."""
    arguments = [] if model is None else ["--model", model]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", "none" if value is None else str(value)]
    return arguments


def _add_fields(
    group: Any, dataclass: type[Any], texts: Mapping[str, tuple[str, str]], skip: set[str]
) -> None:
    hints = get_type_hints(dataclass)
    for field in fields(dataclass):
        if field.name not in skip:
            metavar, text = texts[field.name]
            if dataclass is EngineConfig and type(field.default) in (int, float, str):
                text += f" (default: {field.default})"
            options = _reading(hints[field.name]) | {"help": text}
            if field.name in _CHOICES:
                options["choices"] = _CHOICES[field.name]
            elif metavar:
                options["metavar"] = metavar
            flag = "--" + field.name.replace("_", "-")
            group.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, **options)


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of a type; of a union's members the last that is not None."""
    members = get_args(hint) if NoneType in get_args(hint) else (hint,)
    if str in members and PathLike[str] in members:
        return {"type": Path}
    kind = [member for member in members if member is not NoneType][-1]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind == Sequence[str]:
        return {"action": "append"}
    if kind == Sequence[int]:
        return {"type": _integers, "action": "extend"}
    if kind == Mapping[int, float]:
        return {"type": _pair, "action": "append"}
    if kind in (RepetitionDetection, StructuredOutput):
        return {"type": _json}
    if kind is int and NoneType in members:
        return {"type": _integer_or_none}
    if kind in (int, float, str):
        return {"type": kind}
    raise TypeError(f"no way to read {hint} from a command line")


def _integer_or_none(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"must be an integer or none, got {text!r}") from None


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"must be token ids such as 17 or 17,42, got {text!r}") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"must be JSON, got {text!r}: {error}") from None


def _pair(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ArgumentTypeError(f"must be ID=X such as 17=-2.5, got {text!r}") from None


def _given(
    arguments: argparse.Namespace, dataclass: type[Any], skip: Iterable[str]
) -> dict[str, Any]:
    given = {
        field.name: getattr(arguments, field.name)
        for field in fields(dataclass)
        if field.name not in skip and hasattr(arguments, field.name)
    }
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given
