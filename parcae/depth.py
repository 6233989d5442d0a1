"""How many loops a sequence runs in training: drawn, split, unrolled.

A depth is drawn for every sequence of a batch, T = max(1, Poisson(μ)), so that the model learns to
be read out after any number of loops. Only its last k = min(T, limit) loops carry gradients; the
n = T − k before them run free::

    T = 6, limit 4      free  free | tracked tracked tracked tracked | readout
    T = 3, limit 4                 | tracked tracked tracked   idle  | readout

The limit bounds memory and time: activations are kept for k loops, whatever T is. The gradient
still reaches the prelude, through the input term of each tracked loop.

Source: https://arxiv.org/abs/2604.12946, section 4.2 and appendix G.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minifer.execution.backend import Backend
    from minifer.execution.forward_batch import ForwardBatch
    from minifer.parcae.layers import Pass
    from minifer.parcae.model import Parcae

DEPTHS = ("poisson", "poisson-batch", "constant")


def sample_depths(kind: str, mean: float, size: int, generator: torch.Generator) -> Tensor:
    """int64 [size]: the depth of every sequence of a batch, each at least 1.

    kind: "poisson" draws max(1, Poisson(mean)) for each, "poisson-batch" one for all, "constant"
    draws nothing and takes the mean.

    Raises `ValueError`: a kind that is none of these; a mean below 1, or not whole where it is
    constant; a size below 1.
    """
    if kind not in DEPTHS:
        raise ValueError(f"depth must be one of {', '.join(DEPTHS)}, got {kind!r}")
    if isinstance(mean, bool) or not isinstance(mean, (int, float)) or not 1 <= mean < math.inf:
        raise ValueError(f"mean must be a number of at least 1, got {mean!r}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be an integer of at least 1, got {size!r}")
    if kind == "constant":
        if mean != int(mean):
            raise ValueError(f"mean must be whole for a constant depth, got {mean!r}")
        return torch.full((size,), int(mean))
    rates = torch.full((size if kind == "poisson" else 1,), float(mean))
    return torch.poisson(rates, generator=generator).long().clamp(min=1).expand(size)


def split_depths(depths: Tensor, max_backward: int) -> tuple[Tensor, Tensor]:
    """depths int64 [B] → loops without and with gradients, int64 [B] each: n + k = T.

    Raises `ValueError` for a limit below 1.
    """
    if max_backward < 1:
        raise ValueError(f"max_backward must be at least 1, got {max_backward!r}")
    tracked = depths.clamp(max=max_backward)
    return depths - tracked, tracked


@dataclass(frozen=True)
class Unrolled:
    """hidden: after the final norm. state, previous: h_T and h_{T−1}. All [B · S, D]."""

    hidden: Tensor
    state: Tensor
    previous: Tensor


def unroll(
    model: Parcae,
    batch: ForwardBatch,
    backend: Backend,
    depths: Tensor,
    max_backward: int,
    generator: torch.Generator | None = None,
) -> Unrolled:
    """The forward pass of training: every sequence to its own depth.

    batch: B sequences of S tokens; backend: one without a KV cache. depths: int64 [B]. generator:
    of the initial state's noise; None starts from zeros.
    """
    free, tracked = split_depths(depths, max_backward)
    e, p = model.encode(batch, None, backend)
    term = model.input_term(e)
    h = model.initial_state(e, generator)
    previous = h
    with torch.no_grad():
        h, previous = _iterate(model, h, previous, term, p, batch, free)
    h, previous = _iterate(model, h, previous, term, p, batch, tracked)
    return Unrolled(model.finish(h, model.coda_pass(p, batch)), h, previous)


def _iterate(
    model: Parcae,
    h: Tensor,
    previous: Tensor,
    term: Tensor,
    p: Pass,
    batch: ForwardBatch,
    loops: Tensor,
) -> tuple[Tensor, Tensor]:
    """`loops` int64 [B] iterations; a sequence that has had its own keeps its state."""
    rows = loops.repeat_interleave(batch.num_tokens // batch.num_requests)[:, None]
    core = model.core_pass(p, batch, 0)  # no cache, so every iteration is like the first
    for t in range(int(loops.max())):
        active = t < rows
        step = model.step(h, term, core)
        h, previous = torch.where(active, step, h), torch.where(active, h, previous)
    return h, previous
