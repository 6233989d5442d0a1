"""Log-probabilities of tokens, from the raw logits: what the model said before any sampling rule.

A token the model rules out (logit −inf) has `logprob` −inf, a float that JSON cannot hold: who
writes JSON decides how to spell it. Equal logits are ranked by token id, so ranks are unique and
agree with the greedy pick.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifer.outputs import Logprob, TokenLogprobs

ROWS_AT_ONCE = 64  # of a prompt: bounds the copies of [rows, V] that ranking makes


def exact_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of float32 [M, V], falling; equal values by rising index. → two [M, k].

    `torch.topk` promises no order among equals, and sorting the vocabulary costs fifty times
    more. So value and index are packed into one integer that is never equal to another.
    """
    V = values.shape[-1]
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns −0 into 0: they are equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # now ordered as the floats are
    low = torch.arange(V - 1, -1, -1, device=values.device)
    keys = (bits.long() << 32) | low
    index = V - 1 - (keys.topk(k).values & 0xFFFFFFFF)
    return values.gather(-1, index), index


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """One dictionary a row of logits [M, V]: the chosen token first, then the likeliest by rank.

    token_ids: the M chosen tokens. counts: how many of the likeliest; 0 for the chosen one
    alone, -1 for the whole vocabulary. A row that holds NaN gives NaN.
    """
    if not token_ids:
        return []
    V = logits.shape[-1]
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    logit = logits.gather(-1, chosen)
    earlier = torch.arange(V, device=logits.device) < chosen
    ranks = ((logits > logit) | ((logits == logit) & earlier)).sum(-1) + 1
    widths = [V if count < 0 else min(count, V) for count in counts]
    top = exact_topk(logits, max(widths))[1]

    result: list[TokenLogprobs] = []
    columns = (token_ids, logprobs.gather(-1, chosen)[:, 0].tolist(), ranks.tolist(), widths)
    tops = zip(top.tolist(), logprobs.gather(-1, top).tolist(), strict=True)
    for token, value, rank, width, (ids, values) in zip(*columns, tops, strict=True):
        entry = {token: Logprob(value, rank)}
        for place in range(width):
            entry[ids[place]] = Logprob(values[place], place + 1)
        result.append(entry)
    return result


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-probabilities of prompt tokens: logits [T, V] at T positions, the token after each.

    k as in `token_logprobs`. The first token of a prompt has no logits; its entry is None and
    the caller's to add.
    """
    result: list[TokenLogprobs] = []
    for start in range(0, len(next_token_ids), ROWS_AT_ONCE):
        tokens = next_token_ids[start : start + ROWS_AT_ONCE]
        result += token_logprobs(logits[start : start + len(tokens)], tokens, [k] * len(tokens))
    return result
