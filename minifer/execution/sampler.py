"""Stage 4's last step: from logits to one token a draw.

Work on whole batches wherever requests agree, on one row only where a request asks for something
of its own. `sampler_reference.py` is the slow twin: one row, one token at a time, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.execution.logits_rules import apply_rules, has_rules
from minifer.execution.logprobs import exact_topk, prompt_logprobs, token_logprobs
from minifer.execution.noise import REPLACE, chance, token_noise, vocabulary_noise
from minifer.execution.speculation.rejection import judge
from minifer.outputs import TokenLogprobs
from minifer.request import Request, SamplingParams

__all__ = ["SampleRow", "Sampled", "Sampler", "prompt_logprobs", "scaled_logits", "survivors"]

# What is wrong with logits before any rule has touched them.
NON_FINITE = ("logits hold NaN", "logits hold +inf", "every logit is -inf")
# What a request's own rules have made of sound logits: the caller's mistake, not the engine's.
UNDRAWABLE = (
    "every token is masked by structured, allowed_token_ids, bad_words, min_tokens or logit_bias",
    "logit_bias or penalties overflow float32",
)

# min-p and top-p compare probabilities with a limit. Relative to the limit, this much counts as
# equal: more than what float32 rounds, so that [.5, .3, .2] at top_p = .8 keeps two tokens.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class SampleRow:
    """One draw: which row of the logits, for whom, with which noise.

    seed: 64 bits; n sequences that fork from one prompt read one row and differ in it only.
    num_drafts: how many of the request's drafts the row has seen, all of them taken for accepted.
    """

    logits_row: int
    request: Request
    seed: int
    num_drafts: int = 0

    @property
    def output_index(self) -> int:
        """Of the draw: which output token it is for."""
        return self.request.num_output_tokens + self.num_drafts

    @property
    def draft(self) -> int | None:
        """The token that was drafted for this place."""
        drafts = self.request.draft_token_ids
        return drafts[self.num_drafts] if self.num_drafts < len(drafts) else None


@dataclass(frozen=True)
class Sampled:
    """What a draw gave. token_id is -1 when it failed, and `error` says why.

    logprobs, and logprob of the token itself, from the raw logits; None unless
    `params.logprobs` asks for them.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    logprob: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Picked:
    """What a runner found where every row is greedy, in place of logits.

    tokens: int64 [R], the lowest index of each row's largest logit. logits: float32 [R], that
    logit, NaN where any of the row is.
    """

    tokens: Tensor
    logits: Tensor


def reads_largest_only(request: Request) -> bool:
    """Does its next draw need nothing of the logits but where the largest is?"""
    params = request.params
    return params.is_greedy and params.logprobs is None and not has_rules(request)


class Sampler:
    """Draws tokens in a fixed order of steps, which is vLLM's:

    1.  raw log-probabilities are taken aside, for rows that ask;
    2.  logits become float32;
    3.  tokens that the grammar of `structured` or allowed_token_ids rules out are masked (set
        to −inf);
    4.  a token that would complete a bad word is masked;
    5.  end tokens and stop_token_ids are masked while there are fewer than min_tokens outputs,
        then logit_bias is added;
    6.  penalties: repetition (prompt and output), frequency and presence (output only);
    7.  at temperature 0 the largest logit is picked, the lowest id among equals: done;
    8.  logits are divided by temperature;
    9.  min-p masks tokens less than min_p times as likely as the likeliest;
    10. top-k keeps exactly k tokens, the lowest ids among equals;
    11. top-p renormalises and keeps, from the likeliest on, a token while the mass before it is
        below p: the token that crosses p stays, equality adds none, one always survives;
    12. the token is drawn: each survivor runs for an exponential time of rate p, the first to
        arrive wins. That is argmax(log p − log q) with q ~ Exp(1) of `noise.py`.

    A row whose logits hold NaN or +inf, or whose tokens are all masked, fails alone.

    A row with a draft is drawn as any other, and the draft is right if it is the token drawn.
    With rejection=True its draw follows the rule of `speculation/rejection.py` instead, and again
    the draft is right if it is the token drawn.

    nucleus_width: how many of the likeliest tokens top-p looks at before it sorts them all.
    """

    def __init__(self, nucleus_width: int = 1024, rejection: bool = False) -> None:
        self.nucleus_width = nucleus_width
        self.rejection = rejection

    @torch.inference_mode()
    def __call__(self, logits: Tensor | Picked, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Logits [R, V] of any float type → one `Sampled` a row. The logits are not changed."""
        if not rows:
            return []
        if isinstance(logits, Picked):
            picks = list(zip(logits.tokens.tolist(), logits.logits.tolist(), strict=True))
            return [
                _sampled(token, best, best) for token, best in (picks[r.logits_row] for r in rows)
            ]
        ruled = [i for i, row in enumerate(rows) if has_rules(row.request)]
        wanted = [row.logits_row for row in rows]
        as_they_are = not ruled and wanted == list(range(len(logits)))
        scores = (logits if as_they_are else logits[wanted]).float()  # a copy where rules write
        raw_best = scores.amax(-1) if ruled else None  # NaN if any logit is
        asked = [i for i, row in enumerate(rows) if row.request.params.logprobs is not None]
        raw = scores[asked]
        for i in ruled:
            apply_rules(scores[i], rows[i].request.with_drafts(rows[i].num_drafts))

        tokens = first_argmax(scores)
        best = scores.gather(-1, tokens[:, None])[:, 0]
        drawn = [i for i, row in enumerate(rows) if not row.request.params.is_greedy]
        judged = [i for i in drawn if self.rejection and rows[i].draft is not None]
        if judged:
            tokens[judged] = self._judge(scores[judged], best[judged], [rows[i] for i in judged])
            drawn = sorted(set(drawn) - set(judged))
        if drawn:
            tokens[drawn] = self._draw(scores[drawn], best[drawn], [rows[i] for i in drawn])

        if raw_best is None:
            raw_best = best
        found, checks = tokens.tolist(), torch.stack((raw_best, best), dim=1).tolist()
        result = [_sampled(token, *check) for token, check in zip(found, checks, strict=True)]
        kept = [place for place, i in enumerate(asked) if result[i].error is None]
        asked = [asked[place] for place in kept]
        counts = [rows[i].request.params.logprobs or 0 for i in asked]
        ranked = token_logprobs(raw[kept], [found[i] for i in asked], counts)
        for i, entry in zip(asked, ranked, strict=True):
            result[i] = Sampled(found[i], entry, entry[found[i]].logprob)
        return result

    def _draw(self, scores: Tensor, best: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Steps 8 to 12 for scores [M, V] with row maxima best [M] → token ids [M]."""
        params = [row.request.params for row in rows]
        x = scaled_logits(scores, best, params)
        V = x.shape[1]
        tokens = torch.empty(len(rows), dtype=torch.int64, device=x.device)
        cut = [i for i, p in enumerate(params) if 0 < p.top_k < V or p.top_p < 1]
        whole = sorted(set(range(len(rows))) - set(cut))
        if whole:
            noise = vocabulary_noise(*_draw_keys(rows, whole), V, x.device)
            tokens[whole] = first_argmax(x[whole] - noise.log())
        if cut:
            values, ids = survivors(x[cut], [params[i] for i in cut], self.nucleus_width)
            if 4 * ids.shape[1] < V:
                noise = token_noise(*_draw_keys(rows, cut), ids)
            else:
                noise = vocabulary_noise(*_draw_keys(rows, cut), V, x.device).gather(-1, ids)
            tokens[cut] = ids.gather(-1, (values - noise.log()).argmax(-1, keepdim=True))[:, 0]
        return tokens

    @torch.inference_mode()
    def probabilities(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """What tokens are drawn from after steps 2 to 11: float32 [rows, V]."""
        scores = logits[[row.logits_row for row in rows]].float()
        for i, row in enumerate(rows):
            if has_rules(row.request):
                apply_rules(scores[i], row.request.with_drafts(row.num_drafts))
        return self._probabilities(scores, scores.amax(-1), [row.request.params for row in rows])

    def _probabilities(
        self, scores: Tensor, best: Tensor, params: Sequence[SamplingParams]
    ) -> Tensor:
        x = scaled_logits(scores, best, params)
        cut = [i for i, p in enumerate(params) if 0 < p.top_k < x.shape[1] or p.top_p < 1]
        if cut:
            values, ids = survivors(x[cut], [params[i] for i in cut], self.nucleus_width)
            x[cut] = torch.full_like(x[cut], -math.inf).scatter(-1, ids, values)
        return x.softmax(-1)

    def _judge(self, scores: Tensor, best: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Drafts, accepted or replaced: scores [M, V] → token ids [M]."""
        p = self._probabilities(scores, best, [row.request.params for row in rows])
        drafts = [row.draft for row in rows if row.draft is not None]
        q = F.one_hot(torch.tensor(drafts, device=p.device), p.shape[1]).float()
        for i, row in enumerate(rows):
            if row.request.draft_probs is not None:
                q[i] = row.request.draft_probs[row.num_drafts]
        keys = _draw_keys(rows, range(len(rows)))
        noise = vocabulary_noise(*keys, p.shape[1], p.device, REPLACE)
        return judge(p, q, drafts, chance(*keys, p.device), noise)


def first_argmax(scores: Tensor) -> Tensor:
    """Place of the largest of each row, the lowest among equals: [M, V] → int64 [M].

    NaN counts as the largest. `Tensor.argmax` is the same, but on a CPU it compares number by
    number and takes ten times as long.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.from_numpy(scores.numpy().argmax(-1))


def scaled_logits(scores: Tensor, best: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature and min-p: scores [M, V] with maxima best [M] → log(p / largest p), float32.

    The largest is taken off before the division: what is left cannot overflow, and the likely
    tokens keep float32's full resolution at any temperature.
    """
    x = (scores - best[:, None]) / _column([p.temperature for p in params], scores)
    if any(p.min_p for p in params):
        floors = [math.log(p.min_p) - TOLERANCE if p.min_p else -math.inf for p in params]
        x = x.masked_fill(x < _column(floors, scores), -math.inf)
    return x


def survivors(
    x: Tensor, params: Sequence[SamplingParams], nucleus_width: int
) -> tuple[Tensor, Tensor]:
    """Top-k and top-p over x [M, V] of `scaled_logits` → values, ids [M, n], falling.

    The value of a candidate that was cut is −inf; every other token of the vocabulary was cut
    too. n is the largest k, or for rows without k the nucleus_width, or V where that is short.
    """
    V = x.shape[1]
    ks = [min(p.top_k, V) if p.top_k > 0 else V for p in params]
    n = max(min(V, nucleus_width) if k == V else k for k in ks)
    limit = torch.tensor(ks, device=x.device)[:, None]
    # top_p = 1 is off: the mass of all tokens, rounded, may reach 1 before the last.
    masses = [p.top_p * (1 - TOLERANCE) if p.top_p < 1 else math.inf for p in params]
    p = _column(masses, x, torch.float64)

    values, ids = exact_topk(x, n)
    values = values.masked_fill(torch.arange(n, device=x.device) >= limit, -math.inf)
    mass = values.double().exp()
    reached = mass.cumsum(-1)
    everything = x.exp().sum(-1, keepdim=True, dtype=torch.float64)
    enough = p * torch.where(limit == V, everything, reached[:, -1:])
    if n < max(ks) and bool((reached[:, -1:] < enough)[limit == V].any()):
        return survivors(x, params, V)
    return values.masked_fill(reached - mass >= enough, -math.inf), ids


def _draw_keys(rows: Sequence[SampleRow], members: Sequence[int]) -> tuple[list[int], list[int]]:
    """Seeds and output indices of some rows."""
    chosen = [rows[i] for i in members]
    return [row.seed for row in chosen], [row.output_index for row in chosen]


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Python numbers → [M, 1] on the device of `like`."""
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _sampled(token: int, raw_best: float, best: float) -> Sampled:
    error = _error(raw_best, best)
    return Sampled(token) if error is None else Sampled(-1, error=error)


def _error(raw_best: float, best: float) -> str | None:
    """Why a row with these maxima, of the raw logits and after the rules, cannot be drawn from."""
    nan, infinite, nothing = NON_FINITE
    if math.isnan(raw_best):
        return nan
    if math.isinf(raw_best):
        return infinite if raw_best > 0 else nothing
    masked, overflow = UNDRAWABLE
    if best == -math.inf:
        return masked
    return None if math.isfinite(best) else overflow
