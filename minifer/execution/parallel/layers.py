"""Tensor parallelism in two ideas (Megatron-LM, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).

A half-layer is two products with something in between that works on each place alone: heads that
attend, or SiLU. Cut the first matrix by its outputs, the second by its inputs, at the same places::

              rank 0:  x [T, D] ─ A₀ ─▶ [T, F/2] ─ silu ─ B₀ ─▶ [T, D] ─┐
                                                                        + ─▶ all-reduce ─▶ [T, D]
              rank 1:  x [T, D] ─ A₁ ─▶ [T, F/2] ─ silu ─ B₁ ─▶ [T, D] ─┘

1. *Column-parallel.* A rank computes some of the outputs of the first product. It needs all of x,
   which every rank has, and nothing of the others. (Megatron writes x · A, and outputs are columns;
   our matrices are [out, in], and outputs are rows.) There is no code for it: a rank's layer is an
   ordinary one with fewer heads and a narrower MLP.
2. *Row-parallel.* The second product is a sum over its inputs. A rank has some of them, so it
   computes a part of the sum, for every output; the sum over all ranks is the product.

One all-reduce a half-layer is all that the ranks say to each other. Everything that is not split
(norms, the residual stream, rotary positions) each of them computes for itself.

What it costs: an all-reduce over a ring sends 2 · (p − 1)/p · D · element bytes from each of p
ranks for each token, twice a layer and once for the embedding (`all_reduce_bytes`). For Llama-3 70B
(L = 80, D = 8192, bfloat16) and p = 8 that is 28,672 bytes an all-reduce and 4.6 MB a token. At
NVLink's hundreds of GB/s that is 10 µs or so; 161 waits for the slowest rank cost a step more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifer.config import ModelConfig
from minifer.execution.backend import Backend
from minifer.execution.parallel.group import Group
from minifer.execution.parallel.shard import Shard, shard_config
from minifer.execution.sampler import first_argmax
from minifer.models.transformer import Linear, Transformer


class RowParallelLinear(nn.Module):
    """The second product of a half-layer: a part of a sum, then the sum over all ranks.

    Takes over the parameters of a rank's `Linear`: weight [out, in/p], bias [out] or None.
    """

    def __init__(self, part: Linear, group: Group) -> None:
        super().__init__()
        self.weight, self.bias, self.group = part.weight, part.bias, group

    def forward(self, x: Tensor, backend: Backend, residual: Tensor | None = None) -> Tensor:
        """x [T, in/p] → [T, out], the same on every rank."""
        out = self.group.all_reduce(backend.linear(x, self.weight, None))
        if self.bias is not None:  # after the sum, which would add it p times
            out = out + self.bias
        return out if residual is None else residual + out


class ParallelTransformer(Transformer):
    """One rank's part of a `Transformer`: that class with fewer heads, and sums where ranks meet.

    config: of the whole model; `self.config` is the part's. Every rank's hidden states are whole
    and equal; logits come together on rank 0. source: the model's files, for the other ranks.
    Raises `ValueError` as `shard_config` does.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: Group,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shard = Shard(group.rank, group.size)
        super().__init__(shard_config(config, shard), dtype, device)
        self.group = group
        self.vocab_size = config.vocab_size
        self.ids = shard.vocabulary(config.vocab_size)
        self.source: Path | None = None
        layers: Any = self.layers
        for layer in layers:
            layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj, group)
            layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, group)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] → [T, D]: a rank looks up the ids it holds, and the sum has all of them."""
        mine = (token_ids >= self.ids.start) & (token_ids < self.ids.stop)
        rows = F.embedding((token_ids - self.ids.start).where(mine, 0), self.embed_tokens.weight)
        return self.group.all_reduce(rows.masked_fill(~mine[:, None], 0.0))

    def logits(self, hidden: Tensor, backend: Backend, float32: bool = False) -> Tensor:
        """hidden [R, D] → float32 logits [R, V] on rank 0; elsewhere those of the rank's ids."""
        part = super().logits(hidden, backend, float32)
        if not len(hidden):
            return part.new_empty(0, self.vocab_size)
        width = -(-self.vocab_size // self.group.size)
        parts = self.group.gather(F.pad(part, (0, width - part.shape[1])))
        return torch.cat(parts, dim=1)[:, : self.vocab_size] if parts else part

    def largest(
        self, hidden: Tensor, backend: Backend, float32: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Token ids int64 [R] and logits float32 [R] of the largest on rank 0, the lowest id among
        equals; NaN is the largest. Each rank sends its own best: 16 bytes a row in place of 4 V/p.
        """
        part = super().logits(hidden, backend, float32)
        place = first_argmax(part)
        best = part.gather(-1, place[:, None])[:, 0]
        if not len(hidden):
            return place, best
        offer = torch.stack((best.double(), (place + self.ids.start).double()), dim=1)
        offers = self.group.gather(offer)
        if not offers:
            return place, best
        everybody = torch.stack(offers, dim=1)  # [R, p, 2]; ascending ids, so ties go to the lowest
        winner = first_argmax(everybody[..., 0].contiguous())
        rows = torch.arange(len(hidden), device=winner.device)
        logit, token = everybody[rows, winner].unbind(-1)
        return token.long(), logit.float()


# -- the same in one process, for reading and for comparing


def column_parallel(x: Tensor, weight: Tensor, size: int) -> list[Tensor]:
    """x [T, in], weight [out, in] → what each of `size` ranks computes of x · weightᵀ: [T, out/p].

    Raises `ValueError` when `size` does not divide out.
    """
    _check_divides(size, weight.shape[0])
    return [x @ part.T for part in weight.chunk(size, dim=0)]


def row_parallel(parts: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """The inputs [T, in/p] of each rank, weight [out, in] → each rank's summand [T, out].

    Their sum is the product; an all-reduce computes it. Raises `ValueError` when the number of
    ranks does not divide in.
    """
    _check_divides(len(parts), weight.shape[1])
    columns = weight.chunk(len(parts), dim=1)
    return [x @ column.T for x, column in zip(parts, columns, strict=True)]


def _check_divides(size: int, width: int) -> None:
    if size < 1 or width % size:
        raise ValueError(f"size must divide the {width} places that are split, got {size}")


def all_reduce_bytes(config: ModelConfig, size: int, element: int, tokens: int = 1) -> int:
    """Bytes that each of `size` ranks sends in the all-reduces of a step, over a ring.

    element: bytes of a number. Two all-reduces a layer and one for the embedding; the logits that
    rank 0 gathers are not counted.
    """
    each = 2 * (size - 1) * config.hidden_size * element * tokens / size
    return round(each * (2 * config.num_layers + 1))
