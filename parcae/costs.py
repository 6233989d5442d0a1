"""What a loop model holds, and what one of its decoded tokens costs: from the shapes alone.

Parameters: about half of a published model is value-embedding tables, of which a token reads a row
each. They take memory and next to no arithmetic.

FLOPs and weight bytes of one decoded token, T loops, D the width (a multiply-add is 2 FLOPs; only
matrix products count)::

    prelude, coda   once      2 · 12 D² a layer (4 D² of attention, 8 D² of the MLP)
    core            T times   2 · 12 D² a layer
    B e             once      2 · D²           it is kept over the loop
    readout         once      2 · D²
    head            once      2 · V D
    attention       in each of these layers, each time: 4 · H · C over every token of the context

KV: a token takes one slot in every layer of prelude and coda, and S slots in every layer of the
core, each of 2 · K · C numbers (a key and a value for each of K heads of C)::

    bytes a token = 2 · K · C · bytes · (prelude + S · core + coda)

    policy      full   terminal   cyclic-m    first-m
    S           T      1          min(m, T)   min(m, T)

Letters: D model width, H query heads, K KV heads, C head dim, V vocabulary. No torch. Source of the
model: https://arxiv.org/abs/2604.12946, https://github.com/sandyresearch/parcae.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minifer.config import ModelConfig
from minifer.loops import LoopConfig
from minifer.perf import costs
from minifer.perf.costs import ElementBytes, OpCost, StepCost

GATE_CHANNELS = 32  # of its input that a value embedding's gate reads; as in layers.py


@dataclass(frozen=True)
class Parameters:
    """Numbers a loop model holds, by part. value_embeddings: the tables; their gates are in the
    stacks. adapter: the injection. norms: of prelude's output and of the end."""

    wte: int
    value_embeddings: int
    prelude: int
    core: int
    coda: int
    adapter: int
    readout: int
    norms: int

    @property
    def total(self) -> int:
        return (
            self.wte
            + self.value_embeddings
            + self.prelude
            + self.core
            + self.coda
            + self.adapter
            + self.readout
            + self.norms
        )

    @property
    def outside_tables(self) -> int:
        """Without the embeddings: what is multiplied with, the tied head apart."""
        return self.total - self.wte - self.value_embeddings


def parameters(config: ModelConfig) -> Parameters:
    """The split of a loop model; the sum is what its modules hold. Raises `ValueError` for a
    model without a loop."""
    loop, D = _loop(config), config.hidden_size
    tables = sum(loop.has_value_embedding(layer) for layer in range(loop.num_layers))

    def stack(first: int, count: int) -> int:
        return sum(_layer(config, layer) for layer in range(first, first + count))

    P, R, C = loop.prelude, loop.core, loop.coda
    return Parameters(
        wte=config.vocab_size * D,
        value_embeddings=tables * config.vocab_size * config.num_kv_heads * config.head_dim,
        prelude=stack(0, P),
        core=stack(P, R),
        coda=stack(P + R, C),
        adapter={"diagonal": D * D + 2 * D, "concat": 2 * D * D, "add": 0}[loop.injection],
        readout=D * D,
        norms=D * (1 + loop.prelude_norm),
    )


def kv_bytes_per_token(
    config: ModelConfig,
    num_loops: int | None = None,
    policy: str = "full",
    element_bytes: float = 2.0,
) -> float:
    """KV bytes of one token under a policy, for up to `num_loops` loops (None: the mean depth)."""
    depth = _depth(config, num_loops)
    loop = replace(_loop(config), max_num_loops=depth, kv_policy=policy)
    return costs.kv_bytes_per_token(replace(config, loop=loop), element_bytes)


def decode_cost(
    config: ModelConfig,
    num_loops: int | None = None,
    *,
    context: int = 0,
    core_resident: bool = False,
    hoisted: bool = True,
    element: ElementBytes | None = None,
) -> StepCost:
    """FLOPs, weight and KV bytes of one decoded token, one `OpCost` a part.

    num_loops: None for the mean depth. context: tokens it attends to, itself among them, whose KV
    it reads in every layer and iteration before it writes its own; 0 leaves attention out.
    core_resident: the core's weights are read once and stay on the chip; else once a loop.
    hoisted: B e is computed once a token, as here; False: once a loop, as the published code does
    (B is counted as read once either way). Activations are not counted. Raises `ValueError`.
    """
    depth, loop = _depth(config, num_loops), _loop(config)
    if context < 0:
        raise ValueError(f"context must be at least 0 tokens, got {context}")
    e, D, held = element or ElementBytes(), config.hidden_size, parameters(config)
    kv = config.num_kv_heads * config.head_dim

    def part(name: str, count: int, products: float, runs: int, reads: int) -> OpCost:
        return OpCost(name, 2 * products * runs, count * reads * e.weight)

    def stack(name: str, first: int, layers: int, count: int, runs: int, reads: int) -> OpCost:
        products = sum(_matrices(config, layer) for layer in range(first, first + layers))
        return part(name, count, products, runs, reads)

    P, R, C = loop.prelude, loop.core, loop.coda
    rows = held.value_embeddings // config.vocab_size
    once = 1 if hoisted else depth
    # Of a matrix over (h, e) only e's half is the same in every loop.
    products = {"diagonal": once, "concat": once + depth, "add": 0}[loop.injection] * D * D
    applications = P + depth * R + C
    return StepCost(
        (
            OpCost("value embeddings", 0, rows * e.weight),
            stack("prelude", 0, P, held.prelude, 1, 1),
            OpCost("injection", 2 * products, held.adapter * e.weight),
            stack("core", P, R, held.core, depth, 1 if core_resident else depth),
            part("readout", held.readout, D * D, 1, 1),
            stack("coda", P + R, C, held.coda, 1, 1),
            OpCost("norms", 0, held.norms * e.weight),
            OpCost(
                "attention",
                4 * config.num_heads * config.head_dim * context * applications,
                0,
                2 * kv * e.kv * (context + 1) * applications if context else 0.0,
            ),
            part("head", held.wte, config.vocab_size * D, 1, 1),
        )
    )


def _loop(config: ModelConfig) -> LoopConfig:
    if config.loop is None:
        raise ValueError("loop must say how many layers each stack has, got None")
    return config.loop


def _depth(config: ModelConfig, num_loops: int | None) -> int:
    depth = _loop(config).mean_recurrence if num_loops is None else num_loops
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"num_loops must be an integer of at least 1, got {num_loops!r}")
    return depth


def _matrices(config: ModelConfig, layer: int) -> int:
    """Weights of one layer that every token is multiplied with."""
    D, C = config.hidden_size, config.head_dim
    H, K = config.num_heads, config.num_kv_heads
    gated = _loop(config).has_value_embedding(layer)
    attention = D * (H + 2 * K) * C + H * C * D
    return attention + 2 * D * config.intermediate_size + (GATE_CHANNELS * K if gated else 0)


def _layer(config: ModelConfig, layer: int) -> int:
    return _matrices(config, layer) + 2 * config.hidden_size
