"""The sampler's slow twin: one row, one token at a time, in Python's integers and 64-bit floats.

It shares no code with `sampler.py`, only the rule that a relative 1e-6 counts as equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from minifer.request import Request


def reference_noise(seed: int, output_index: int, token_id: int) -> float:
    """Exp(1) noise of one token of one draw: Philox-4x32-10, written as in the paper."""
    c = [token_id // 4, output_index, 0, 0]
    k = [seed % 2**32, seed // 2**32 % 2**32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    uniform = min((c[token_id % 4] + 0.5) / 2**32, 1 - 2**-24)
    return -math.log1p(-uniform)


def reference_scores(logits: Sequence[float], request: Request) -> list[float]:
    """Masks, logit bias and penalties."""
    params, output = request.params, request.output_token_ids
    scores = list(logits)
    masked: set[int] = set()
    if request.grammar is not None:
        allowed = request.grammar.mask(request.eos_token_ids).tolist()
        masked |= {token for token, legal in enumerate(allowed) if not legal}
    if params.allowed_token_ids is not None:
        masked |= set(range(len(scores))) - set(params.allowed_token_ids)
    for *start, last in request.bad_word_ids:
        if output[max(0, len(output) - len(start)) :] == start:
            masked.add(last)
    if len(output) < params.min_tokens:
        masked |= request.eos_token_ids | set(params.stop_token_ids)
    for token in range(len(scores)):
        score = -math.inf if token in masked else scores[token]
        score += (params.logit_bias or {}).get(token, 0.0)
        if token in request.token_ids:
            penalty = params.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        if token in output:
            score -= params.frequency_penalty * output.count(token) + params.presence_penalty
        scores[token] = score
    return scores


def reference_probabilities(logits: Sequence[float], request: Request) -> dict[int, float]:
    """The tokens that may be drawn, likeliest first, and their probabilities.

    One token at temperature 0; none where every token is masked.
    """
    params = request.params
    scores = reference_scores(logits, request)
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    best = scores[order[0]]
    if best == -math.inf:
        return {}
    if params.is_greedy:
        return {order[0]: 1.0}
    weight = {t: math.exp((scores[t] - best) / params.temperature) for t in order}
    kept = [t for t in order if weight[t] > 1e-300 and weight[t] >= params.min_p * (1 - 1e-6)]
    kept = kept[: params.top_k] if params.top_k > 0 else kept
    total = sum(weight[t] for t in kept)
    if params.top_p < 1:
        before = accumulate((weight[t] / total for t in kept), initial=0.0)
        kept = [t for t, mass in zip(kept, before) if mass < params.top_p * (1 - 1e-6)]  # noqa: B905
        total = sum(weight[t] for t in kept)
    return {t: weight[t] / total for t in kept}


def reference_race(logits: Sequence[float], request: Request, seed: int) -> dict[int, float]:
    """log(p / noise) of every token that may be drawn: the largest is the token."""
    index = request.num_output_tokens
    return {
        token: math.log(p / reference_noise(seed, index, token))
        for token, p in reference_probabilities(logits, request).items()
    }
