"""Faults that make numbers wrong: NaN, overflow, a kernel that prefers the wrong token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minifer.engine import Engine
from minifer.execution import attention, sampler
from minifer.faults.registry import Fault, Source, github, patched
from minifer.faults.scenes import QUESTIONS, ask, written
from minifer.kv.step_input import StepInput


@contextmanager
def nan_in_cache(engine: Engine, layer: int = 0) -> Iterator[None]:
    """Each time a reply grows to 16 tokens, one number of one value of a layer becomes NaN."""
    runner: Any = engine.runner
    forward = runner.forward

    def faulty(step: StepInput) -> Tensor:
        logits: Tensor = forward(step)
        for entry, _ in step.sampled:
            if entry.request.num_output_tokens == 16:
                block, offset = divmod(entry.end - 1, step.block_size)
                where = entry.request.block_table[block], offset, 0, 0
                runner.kv.values[layer][where] = torch.nan
        return logits

    with patched(runner, forward=faulty):
        yield


@contextmanager
def unchecked_nan(engine: Engine, layer: int = 0) -> Iterator[None]:
    """The same NaN, in an engine that draws from whatever logits it gets."""
    with nan_in_cache(engine, layer), patched(sampler, _error=lambda raw_best, best: None):
        yield


@contextmanager
def softmax_without_max(engine: Engine) -> Iterator[None]:
    """Attention weights as exp(s) / sum(exp(s)) in half precision, largest score not taken off."""

    def naive(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * options["scale"]
        if options.get("is_causal"):
            attn_mask = attention.causal_mask(q.shape[2], k.shape[2], None, q.device)
        weights = scores.half().exp().float()  # overflows above 11.09
        if attn_mask is not None:
            weights = weights.masked_fill(~attn_mask, 0)
        return weights / weights.sum(-1, keepdim=True) @ v

    with patched(attention.F, scaled_dot_product_attention=naive):
        yield


@contextmanager
def wrong_script(engine: Engine) -> Iterator[None]:
    """A misconfigured kernel gives rare tokens a high probability: every 8th, the character 你."""
    runner: Any = engine.runner
    forward = runner.forward
    character = engine.tokenizer.encode("你") if engine.tokenizer else [0]

    def faulty(step: StepInput) -> Tensor:
        logits = forward(step).clone()
        for entry, row in step.sampled:
            place = entry.request.num_output_tokens % 8
            if place < len(character):
                logits[row, character[place]] += 50
        return logits

    with patched(runner, forward=faulty):
        yield


def _one_long(engine: Engine) -> str:
    return written(ask(engine, QUESTIONS[0], max_tokens=60)[0])


def _each(engine: Engine) -> str:
    return "\n".join(map(written, ask(engine, *QUESTIONS)))


FAULTS = (
    Fault(
        name="nan-row",
        title="One NaN in the cache",
        mechanism="A kernel writes one NaN into a value of the KV cache: an overflow in half "
        "precision, a bad scale, an empty softmax. Every later token of the sequence attends to "
        "it, and 0 · NaN is NaN, so its rows stay NaN for good. A full block can be found by "
        "others: withdrawn in time, it stays this request's alone.",
        symptom="The reply breaks off with an error. Without the check of the logits: see "
        "unchecked-nan.",
        sources=(
            github("vllm-project/vllm", 22881, "NaN in the MLP, '!!!!' in the reply"),
            github("flashinfer-ai/flashinfer", 358, "why V must be filled with zeros and K not"),
            github("Dao-AILab/flash-attention", 1745, "NaN in the padding of the KV cache"),
        ),
        detectors=("finite-logits",),
        inject=nan_in_cache,
        scene=_one_long,
    ),
    Fault(
        name="unchecked-nan",
        title="NaN becomes one token for ever",
        mechanism="Nobody looks at the logits before a token is drawn. The largest of a row of "
        "NaN is its first element, so token 0 is drawn, appended, attended to, and drawn again. "
        "The reply ends at its length limit and looks like a success.",
        symptom="One token for ever. Token 0 is '!' for GPT-2, Llama 3 and Qwen, a byte that does "
        "not print for minifer-tiny, and for SmolLM2 the end of the text: a silent, empty reply.",
        sources=(
            github("vllm-project/vllm", 13035, "replies of '!' only; logprobs crash the server"),
            github("vllm-project/vllm", 14126, "all '!' for any prompt"),
            github("QwenLM/Qwen3", 269, "id 0 up to the limit after short prompts"),
            github("turboderp/exllama", 222, "please handle NaN logits"),
        ),
        detectors=("repetition", "replay", "tier-check"),
        inject=unchecked_nan,
        scene=_one_long,
    ),
    Fault(
        name="softmax-without-max",
        title="A softmax that overflows",
        mechanism="Attention weights are computed as exp(s) / sum(exp(s)) in half precision. "
        "Above s = 11.09 the exponential is infinite, and infinity over infinity is NaN. Taking "
        "the largest score off first changes nothing but that.",
        symptom="Models with small scores work, others fail, and so do some prompts only: the "
        "logits are NaN.",
        sources=(
            Source(
                "Milakov, Gimelshein: Online normalizer calculation for softmax (2018)",
                "https://arxiv.org/abs/1805.02867",
            ),
            github("QwenLM/Qwen3", 269, "NaN after short prompts, long ones are fine"),
        ),
        detectors=("finite-logits", "canary", "tier-check"),
        inject=softmax_without_max,
        scene=_each,
    ),
    Fault(
        name="wrong-script",
        title="A rare token becomes likely",
        mechanism="A misconfigured kernel, or an approximate top-k, now and then gives a high "
        "probability to a token that should have none. The model goes on from it as if it had "
        "meant it.",
        symptom="Chinese or Thai characters in the middle of an English reply.",
        sources=(
            Source(
                "Anthropic: A postmortem of three recent issues (17 September 2025)",
                "https://www.anthropic.com/engineering/a-postmortem-of-three-recent-issues",
            ),
            github("deepseek-ai/DeepSeek-V3", 1045, "the same symptom from training data"),
        ),
        detectors=("script-drift", "replay", "canary"),
        inject=wrong_script,
        scene=_each,
    ),
)
