"""Which part of a model a rank holds.

A rank of p holds, of every layer, H/p query heads with the KV heads they read, and F/p of the
MLP's inner width; of the vocabulary V/p rows. Norms are small, and whole on every rank::

    q_proj [H·C, D]     rows of its heads             o_proj [D, H·C]       columns of its heads
    k, v   [K·C, D]     rows of its KV heads          down_proj [D, F]      columns
    gate, up [F, D]     rows                          embed, lm_head [V, D] rows

What is left is a model of the same kind with fewer heads and a narrower MLP: `shard_config` is
its configuration, and `minifer.models.transformer.Transformer` runs it. With fewer KV heads than
ranks, several ranks hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from minifer.config import ModelConfig

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # outputs are split
_COLUMNS = ("o_proj", "down_proj")  # inputs are split
_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Shard:
    """The part of rank `rank` among `size`. Raises `ValueError` for a rank that is not there."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), got {self.rank}")

    def span(self, units: int) -> range:
        """Its share of units that divide evenly, or the one unit it shares with other ranks."""
        start = self.rank * units // self.size
        return range(start, start + max(1, units // self.size))

    def vocabulary(self, vocab_size: int) -> range:
        """Its token ids. The last rank may have fewer: a vocabulary need not divide."""
        width = -(-vocab_size // self.size)
        return range(self.rank * width, min(vocab_size, (self.rank + 1) * width))

    def part(self, config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
        """A view of this rank's part of a checkpoint's tensor. config: of the whole model.

        name: in a Hugging Face checkpoint, such as `model.layers.3.self_attn.q_proj.weight`.
        """
        module, kind = name.split(".")[-2:]
        if module in _VOCABULARY:
            ids = self.vocabulary(config.vocab_size)
            return tensor[ids.start : ids.stop]
        if module in _ROWS:
            rows = self._inner(config, module)
            return tensor[rows.start : rows.stop]
        if module in _COLUMNS and kind == "weight":
            columns = self._inner(config, module)
            return tensor[:, columns.start : columns.stop]
        return tensor  # norms, and biases that are added to a sum over all ranks

    def _inner(self, config: ModelConfig, module: str) -> range:
        """Places between the two products of a half-layer: of heads, or of the MLP."""
        units, width = {
            "q_proj": (config.num_heads, config.head_dim),
            "k_proj": (config.num_kv_heads, config.head_dim),
            "v_proj": (config.num_kv_heads, config.head_dim),
            "o_proj": (config.num_heads, config.head_dim),
        }.get(module, (config.intermediate_size, 1))
        span = self.span(units)
        return range(span.start * width, span.stop * width)


def valid_sizes(config: ModelConfig) -> list[int]:
    """How many ranks a model can be cut for, 1 included, ascending.

    p must divide the query heads and the MLP; and divide the KV heads or be a multiple of them,
    so that the query heads of a rank read whole KV heads, or one.
    """
    H, K, F = config.num_heads, config.num_kv_heads, config.intermediate_size
    return [
        p
        for p in range(1, H + 1)
        if H % p == 0 and F % p == 0 and (K % p == 0 or p % K == 0) and _fills(config, p)
    ]


def _fills(config: ModelConfig, size: int) -> bool:
    """Does every rank get a token of the vocabulary?"""
    return bool(Shard(size - 1, size).vocabulary(config.vocab_size))


def check_size(config: ModelConfig, size: int) -> None:
    """Raises `ValueError`, with the sizes that would do, where a model cannot be cut for `size`."""
    if config.loop is not None:
        raise ValueError(
            f"tensor_parallel_size must be 1 for {config.architecture}, a loop model, got {size}"
        )
    sizes = valid_sizes(config)
    if size not in sizes:
        listed = ", ".join(map(str, sizes))
        raise ValueError(
            f"tensor_parallel_size must be one of {listed} for this model "
            f"({config.num_heads} heads, {config.num_kv_heads} KV heads, MLP width "
            f"{config.intermediate_size}), got {size}"
        )


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The configuration of one rank's part. Raises `ValueError` as `check_size` does."""
    check_size(config, shard.size)
    return replace(
        config,
        num_heads=len(shard.span(config.num_heads)),
        num_kv_heads=len(shard.span(config.num_kv_heads)),
        intermediate_size=len(shard.span(config.intermediate_size)),
        vocab_size=len(shard.vocabulary(config.vocab_size)),
    )
