"""What a step costs before it runs: FLOPs and bytes of every operation, from the shapes alone.

No torch, no measuring: any stage may ask what it costs. One multiply-add is 2 FLOPs.

The bytes are those of the model as it is written, one operation after the other: each reads its
weights, its part of the KV cache and its inputs once, and writes its output once. Attention is one
pass that keeps its scores on the chip (https://arxiv.org/abs/2205.14135). A kernel that joins
operations saves activation bytes; weight and KV bytes are the floor that stays.

A batch is a sequence of pairs (query, context): tokens one request computes this step, and its
length after the step. Prefill of 100 tokens is (100, 100); a decode at position 99 is (1, 100); the
second half of a chunked prefill is (50, 100). Letters as in config.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from minifer.config import ModelConfig

# FLOPs of one element; a reciprocal, a root or an exponential counts as one.
_NORM = 4  # square, sum, scale, weight
_ROPE = 3  # a rotation of a pair is 4 products and 2 sums
_SOFTMAX = 5  # maximum, difference, exponential, sum, division
_SILU_MUL = 5  # negate, exponential, add, divide, multiply


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element: 2 for bfloat16; 0.625 for Q4_1 (20 bytes hold 32 weights)."""

    weight: float = 2.0
    kv: float = 2.0
    activation: float = 2.0


@dataclass(frozen=True)
class OpCost:
    """One kind of operation over a whole step: all layers, all tokens."""

    name: str
    flops: float
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs a byte; infinite for what stays on the chip."""
        return self.flops / self.bytes if self.bytes else math.inf


@dataclass(frozen=True)
class StepCost:
    """The operations of one step, in the order in which they run."""

    ops: tuple[OpCost, ...]

    def __getitem__(self, name: str) -> OpCost:
        return next(op for op in self.ops if op.name == name)

    def total(self) -> OpCost:
        """The sum of all operations, named "total"."""
        return OpCost(
            "total",
            sum(op.flops for op in self.ops),
            sum(op.weight_bytes for op in self.ops),
            sum(op.kv_bytes for op in self.ops),
            sum(op.activation_bytes for op in self.ops),
        )


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Numbers the model holds, by part; a tied embedding counts once, as "embedding".

    Raises `ValueError` for a loop model.
    """
    _refuse_loop(config)
    D, C, L = config.hidden_size, config.head_dim, config.num_layers
    q, kv, hidden = config.num_heads * C, config.num_kv_heads * C, config.intermediate_size
    norms = (2 * L + 1) * D + (2 * L * C if config.qk_norm else 0)
    return {
        "embedding": config.vocab_size * D,
        "norms": norms,
        "qkv": L * (q + 2 * kv) * (D + config.qkv_bias),
        "output": L * D * (q + config.output_bias),
        "gate_up": L * 2 * hidden * (D + config.mlp_bias),
        "down": L * D * (hidden + config.mlp_bias),
        "head": 0 if config.tie_word_embeddings else config.vocab_size * D,
    }


def _refuse_loop(config: ModelConfig) -> None:
    """A loop model has other matrices, and runs some of them more than once."""
    if config.loop is not None:
        raise ValueError(
            f"config must be a plain transformer's, got a loop model ({config.architecture}): "
            "use minifer.parcae.costs"
        )


def num_parameters(config: ModelConfig) -> int:
    """The sum of `parameter_counts`: what `sum(p.numel() for p in model.parameters())` gives."""
    return sum(parameter_counts(config).values())


def kv_bytes_per_token(config: ModelConfig, element_bytes: float = 2.0) -> float:
    """Bytes one token occupies in the KV cache: 2 (K and V) · KV slots · K · C · element."""
    return 2 * config.num_kv_slots * config.num_kv_heads * config.head_dim * element_bytes


def attended_pairs(query: int, context: int, window: int | None = None) -> int:
    """(query, key) pairs that causal attention computes for the last `query` of `context` tokens.

    The query at position p sees min(p + 1, window) keys.
    """
    first, last = context - query + 1, context  # keys the first and the last query would see
    if window is None or window >= last:
        return (first + last) * query // 2
    growing = max(0, window - first + 1)  # queries whose window is not full yet
    return (first + window) * growing // 2 + (query - growing) * window


def step_cost(
    config: ModelConfig,
    batch: Sequence[tuple[int, int]],
    *,
    num_logits: int | None = None,
    element: ElementBytes | None = None,
) -> StepCost:
    """FLOPs and bytes of one forward pass over a batch of (query, context) pairs.

    num_logits: rows the head computes; None is one a request. element: bytes of an element,
    bfloat16 throughout by default. Raises `ValueError` for a pair with not 1 ≤ query ≤ context,
    and for a loop model.
    """
    _refuse_loop(config)
    for query, context in batch:
        if not 1 <= query <= context:
            raise ValueError(
                "batch entries must be (query, context) with 1 <= query <= context, "
                f"got ({query}, {context})"
            )
    e = element if element is not None else ElementBytes()
    D, C, L, V = config.hidden_size, config.head_dim, config.num_layers, config.vocab_size
    H, K, F = config.num_heads, config.num_kv_heads, config.intermediate_size
    T = sum(query for query, _ in batch)
    R = len(batch) if num_logits is None else num_logits
    q, kv = H * C, K * C
    qk_heads = (H + K) if config.qk_norm else 0  # Qwen3's norms, over C each
    weights = parameter_counts(config)

    def linear(name: str, rows: int, inputs: int, outputs: int, layers: int) -> OpCost:
        parameters = weights[name] if name != "head" else V * D  # tied or not, it is read
        biases = parameters - layers * inputs * outputs
        flops = 2 * rows * layers * inputs * outputs + rows * biases
        moved = layers * rows * (inputs + outputs)
        read = parameters * e.weight if rows else 0  # a chunk that asks for no logits has no head
        return OpCost(name, flops, read, 0, moved * e.activation)

    normed = T * ((2 * L + 1) * D + L * qk_heads * C)
    keys = _attention_work(config, batch)
    return StepCost(
        (
            OpCost("embedding", 0, T * D * e.weight, 0, T * D * e.activation),
            OpCost(
                "norms", _NORM * normed, weights["norms"] * e.weight, 0, 2 * normed * e.activation
            ),
            linear("qkv", T, D, q + 2 * kv, L),
            OpCost("rope", _ROPE * L * T * (q + kv), 0, 0, 2 * L * T * (q + kv) * e.activation),
            # K and V are read from where qkv and rope left them.
            OpCost("kv_write", 0, 0, 2 * L * T * kv * e.kv, 2 * L * T * kv * e.activation),
            OpCost(
                "attention_scores",
                2 * q * keys.pairs,
                0,
                kv * keys.read * e.kv,
                L * T * q * e.activation,
            ),
            OpCost("softmax", _SOFTMAX * H * keys.pairs),
            OpCost(
                "attention_values",
                2 * q * keys.pairs,
                0,
                kv * keys.read * e.kv,
                L * T * q * e.activation,
            ),
            linear("output", T, q, D, L),
            linear("gate_up", T, D, 2 * F, L),
            OpCost("silu_mul", _SILU_MUL * L * T * F, 0, 0, 3 * L * T * F * e.activation),
            linear("down", T, F, D, L),
            OpCost("residual", 2 * L * T * D, 0, 0, 3 * 2 * L * T * D * e.activation),
            linear("head", R, D, V, 1),
        )
    )


@dataclass(frozen=True)
class _AttentionWork:
    pairs: int  # (query, key) pairs, summed over layers
    read: int  # tokens whose keys are read, summed over layers


def _attention_work(config: ModelConfig, batch: Sequence[tuple[int, int]]) -> _AttentionWork:
    pairs = read = 0
    for window, layers in Counter(map(config.window, range(config.num_layers))).items():
        for query, context in batch:
            pairs += layers * attended_pairs(query, context, window)
            # The first query's window begins the earliest.
            read += layers * (context if window is None else min(context, query + window - 1))
    return _AttentionWork(pairs, read)


def prefill_cost(
    config: ModelConfig, num_tokens: int, *, cached: int = 0, element: ElementBytes | None = None
) -> StepCost:
    """One prompt of `num_tokens` in one step, of which the first `cached` are in the KV cache."""
    return step_cost(config, [(num_tokens - cached, num_tokens)], element=element)


def decode_cost(
    config: ModelConfig, batch_size: int, context: int, *, element: ElementBytes | None = None
) -> StepCost:
    """One token for each of `batch_size` requests, whose contexts hold `context` with it."""
    return step_cost(config, [(1, context)] * batch_size, element=element)
