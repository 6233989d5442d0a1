"""What a token of training costs: C = 2 N₁ + 6 N₂ FLOPs, counted over what really multiplies.

N₁: parameters whose application carries no gradient (the first loops, under truncated
backpropagation), N₂: those that do, each counted as often as it is applied
(https://arxiv.org/abs/2604.12946, appendix D). A forward pass is 2 FLOPs a parameter, a backward
pass 4.

Which parameters? A looked-up row is no multiplication: neither the embedding nor the
value-embedding tables cost FLOPs, and half of a published checkpoint are such tables. The head
does multiply, also where it is tied to the embedding. The public estimator
(sandyresearch/parcae@dee8363, scripts/cost.py) takes all parameters but the embedding: it counts
the tables, forgets the head and applies the injection once. That flatters depth: at μ = 8 the
140M model costs 2.04 times as much as at μ = 1, not 1.64 times.

Attention adds 4 S FLOPs a dimension, layer and token forward (two products with S keys, not
halved for causality), three times that with gradient. Norms and other vectors are left out.
"""

from __future__ import annotations

import math
from dataclasses import replace

from minifer.config import ModelConfig
from minifer.loops import LoopConfig
from minifer.parcae.costs import Parameters, parameters


def unrolled_parameters(config: ModelConfig, mu: float) -> float:
    """N(μ): as if each of μ iterations had a core of its own; the tables are part of it."""
    held = parameters(config)
    return held.total + (mu - 1) * held.core


def training_flops(
    config: ModelConfig,
    mu: float,
    *,
    backward: float | None = None,
    context: int | None = None,
    hoisted: bool = False,
) -> float:
    """FLOPs of a token of training at μ loops, `backward` of them with gradient (None: ⌈μ / 2⌉).

    Both may be means, and need not be whole. context: S, None for the longest. hoisted: B̄ e is
    computed once a token, as this package does; the published code computes it every iteration.
    Raises `ValueError` unless 1 ≤ μ and 0 ≤ backward ≤ μ.
    """
    tracked, free = _loops(mu, backward)
    m = _matrices(config)
    once = m.prelude + m.coda + m.readout + m.wte
    of_input = m.adapter // 2 if _loop(config).injection == "concat" else m.adapter
    looped = m.core + m.adapter
    if hoisted:
        once, looped = once + of_input, looped - of_input
    matrices = 2 * free * looped + 6 * (once + tracked * looped)
    return matrices + _attention(config, free, tracked, context)


def public_script_flops(
    config: ModelConfig, mu: float, *, backward: float | None = None, context: int | None = None
) -> float:
    """The same by the public estimator's rule: tables count as matrices, the head does not."""
    tracked, free = _loops(mu, backward)
    m = _matrices(config)
    once = m.prelude + m.coda + m.readout + m.adapter + m.value_embeddings
    matrices = 2 * free * m.core + 6 * (once + tracked * m.core)
    return matrices + _attention(config, free, tracked, context)


def _matrices(config: ModelConfig) -> Parameters:
    """The parameters without vectors: norms' gains, A_log and Δ's bias."""
    held, loop, D = parameters(config), _loop(config), config.hidden_size
    return replace(
        held,
        prelude=held.prelude - 2 * D * loop.prelude,
        core=held.core - 2 * D * loop.core,
        coda=held.coda - 2 * D * loop.coda,
        adapter=held.adapter - (2 * D if loop.injection == "diagonal" else 0),
        norms=0,
    )


def _attention(config: ModelConfig, free: float, tracked: float, context: int | None) -> float:
    loop = _loop(config)
    S = config.max_position_embeddings if context is None else context
    if S < 1:
        raise ValueError(f"context must be at least 1, got {S}")
    forward = 4 * S * config.num_heads * config.head_dim  # of one layer
    with_gradient = loop.prelude + loop.coda + tracked * loop.core
    return forward * (free * loop.core + 3 * with_gradient)


def _loops(mu: float, backward: float | None) -> tuple[float, float]:
    """(with gradient, without)."""
    if not (math.isfinite(mu) and mu >= 1):
        raise ValueError(f"mu must be at least 1, got {mu!r}")
    tracked = math.ceil(mu / 2) if backward is None else backward
    if not 0 <= tracked <= mu:
        raise ValueError(f"backward must be between 0 and mu = {mu:g}, got {backward!r}")
    return tracked, mu - tracked


def _loop(config: ModelConfig) -> LoopConfig:
    if config.loop is None:
        raise ValueError(f"config.loop must describe a loop, got None for {config.architecture}")
    return config.loop
