"""Rules that rewrite one row of logits before a token is picked: masks, bias and penalties.

Most requests have none; `has_rules` says so without touching a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from minifer.request import Request


def has_rules(request: Request) -> bool:
    """Does any rule change this request's next row of logits?"""
    params = request.params
    return (
        params.allowed_token_ids is not None
        or request.grammar is not None
        or bool(request.bad_word_ids)
        or request.num_output_tokens < params.min_tokens
        or bool(params.logit_bias)
        or params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def apply_rules(logits: Tensor, request: Request) -> None:
    """Rewrite logits, float32 [V], in place: masks, then bias, then penalties."""
    params, V = request.params, logits.shape[0]
    if request.grammar is not None:
        allowed = request.grammar.mask(request.eos_token_ids)
        logits.masked_fill_(~allowed.to(logits.device), -math.inf)
    if params.allowed_token_ids is not None:
        masked = torch.ones(V, dtype=torch.bool, device=logits.device)
        masked[_ids(params.allowed_token_ids, logits)] = False
        logits.masked_fill_(masked, -math.inf)
    logits[_ids(bad_word_ends(request), logits)] = -math.inf
    if request.num_output_tokens < params.min_tokens:
        # eos_token_ids is empty with ignore_eos: what does not end the request is not masked.
        logits[_ids(request.eos_token_ids, logits)] = -math.inf
        logits[_ids(params.stop_token_ids, logits)] = -math.inf
    if params.logit_bias:
        bias = {token: value for token, value in params.logit_bias.items() if token < V}
        values = torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)
        logits[_ids(bias, logits)] += values
    apply_penalties(logits, request)


def bad_word_ends(request: Request) -> list[int]:
    """The tokens that would complete a bad word: the output so far ends with the rest of it."""
    output = request.output_token_ids if request.bad_word_ids else []
    return [
        word[-1]
        for word in request.bad_word_ids
        if output[len(output) - len(word) + 1 :] == list(word[:-1])
    ]


def apply_penalties(logits: Tensor, request: Request) -> None:
    """Repetition over prompt and output, then frequency and presence over the output alone.

    Repetition divides a positive logit and multiplies a negative one (Keskar et al., "CTRL",
    2019, section 4.1, with the sign repaired); the other two are subtracted.
    """
    params = request.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(request.token_ids, device=logits.device)
        old, factor = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(old > 0, old / factor, old * factor)
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(request.output_token_ids, dtype=torch.int64, device=logits.device)
        ids, counts = output.unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _ids(token_ids: Iterable[int], logits: Tensor) -> Tensor:
    """Token ids as an index; a token the model has no logit for needs no mask."""
    known = [token for token in token_ids if token < logits.shape[0]]
    return torch.tensor(known, dtype=torch.int64, device=logits.device)
