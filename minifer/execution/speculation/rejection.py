"""Accept or reject: how a draft from another distribution becomes a draw from the right one.

A draft t was drawn from q, the reply wants p::

    q               ███████████░░░                 accept t with probability min(1, p(t) / q(t));
    p               ██████▒▒▒▒▒▒▒▒                 else draw from what p has more of than q:
    residual              where p > q              max(p − q, 0), normalised

    P(token = x) = q(x) min(1, p(x)/q(x)) + P(rejected) · residual(x)
                 = min(q(x), p(x))        + max(p(x) − q(x), 0)        = p(x)

A guess that was drawn from nothing, an n-gram's, has q = 1 at itself: it is accepted with p(t).

This is the rule of the papers. It keeps the distribution, and each reply it gives is another one
than without drafts. The engine's own default keeps the reply itself: with noise that depends on
(seed, place, token) alone, the token that the target would draw at a place is known, and a draft
is right if it is that token (`speculative_acceptance="same_noise"`). The two accept equally often
where drafts were guessed; where they were drawn, the same noise on both sides is what makes them
meet, and the rejection rule, which meets as often as two distributions can, accepts some more.

Sources: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding",
2023, section 2.3; Chen et al., "Accelerating LLM Decoding with Speculative Sampling", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that each token is accepted, had it been drafted: p, q [..., V] → [..., V]."""
    return torch.where(q > p, p / q, torch.ones_like(p))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejected draft is replaced from: p, q [..., V] → probabilities [..., V].

    Where p = q nothing is ever rejected, and p is as good as any.
    """
    left = (p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def judge(p: Tensor, q: Tensor, drafts: Sequence[int], chance: Tensor, noise: Tensor) -> Tensor:
    """The token at each of M places: the draft, or what replaces it. int64 [M].

    p, q: [M, V]. drafts: M tokens, drawn from q. chance: [M], uniform in (0, 1). noise: [M, V],
    exponential; the replacement is the winner of a race, as in `sampler.py`.
    """
    draft = torch.tensor(drafts, device=p.device)[:, None]
    accepted = chance[:, None] < acceptance(p, q).gather(-1, draft)
    replacement = (residual(p, q).log() - noise.log()).argmax(-1, keepdim=True)
    return torch.where(accepted, draft, replacement)[:, 0]
