"""How far a state can go: the bounded-input bound of a loop, from its weights.

An iteration is h ← Ā h + B̄ e + R̄, where R̄ is what the core's blocks add. A pre-norm block reads
only x / rms(x), so ‖R̄‖ ≤ M whatever the state is: attention mixes values with weights that add up
to 1, the MLP is a quadratic of a vector of length √D. So, token by token, for any Ā, and every t::

    ‖h_t‖ ≤ ‖Āᵗ‖ ‖h_0‖ + (‖Ā⁰‖ + … + ‖Āᵗ⁻¹‖) (‖B̄ e‖ + M)

For a diagonal Ā of radius ρ the sum is (1 − ρᵗ) / (1 − ρ): bounded for ρ < 1, t for ρ = 1, and a
power of ρ above. A free matrix has ‖Āᵗ‖ > ρᵗ at first, and the sum stays bounded just the same if
ρ < 1 (Gelfand). What the bound does not say: that M and B̄ are small. They are learned.

Norms are Euclidean, of matrices the largest singular value; all in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from minifer.parcae.injection import Injection
from minifer.parcae.layers import Block
from minifer.parcae.model import Parcae
from minifer.weights.quantized import Weight, dense


@dataclass(frozen=True)
class Gains:
    """What t iterations do to a start and to a constant input; index t = 0 … T.

    power[t]: ‖Āᵗ‖. total[t]: ‖Ā⁰‖ + … + ‖Āᵗ⁻¹‖. Both float64 [T + 1].
    """

    power: Tensor
    total: Tensor

    def bound(self, start: Tensor | float, drive: Tensor | float) -> Tensor:
        """‖h_t‖ at most, [T + 1, …]: start is ‖h_0‖, drive is ‖B̄ e‖ + M, each a number or [N]."""
        shape = (-1,) + (1,) * torch.as_tensor(drive).dim()
        return self.power.view(shape) * start + self.total.view(shape) * drive


@torch.no_grad()
def gains(injection: Injection, num_loops: int) -> Gains:
    """The gains of an injection's Ā over `num_loops` iterations."""
    A = injection.discretise()[0].double()
    if A.dim() == 1:
        power = A.abs().max() ** torch.arange(num_loops + 1, dtype=torch.float64)
    else:
        matrix, norms = torch.eye(len(A), dtype=torch.float64), []
        for _ in range(num_loops + 1):
            norms.append(torch.linalg.matrix_norm(matrix, 2))
            matrix = A @ matrix
        power = torch.stack(norms)
    before = torch.cat([torch.zeros(1, dtype=torch.float64), power[:-1]])
    return Gains(power, before.cumsum(0))


@torch.no_grad()
def block_bound(model: Parcae) -> float:
    """M: no state makes the core's blocks add more than this to it, by their weights alone.

    A bound, several times what a text brings about: triangle inequality over the blocks, and in
    each a product of the norms of its matrices.
    """
    core: Iterable[Block] = model.core  # type: ignore[assignment]
    total = 0.0
    for block in core:
        total += _attention_bound(model, block) + _mlp_bound(block)
    return total


def _attention_bound(model: Parcae, block: Block) -> float:
    """‖W_o‖ · √(Σ over query heads of max ‖v‖²)."""
    H, K, _ = block.attn.heads
    C = block.attn.head_dim
    _, _, W = _after_norm(block.attn.qkv_proj.weight, block.norm_1.weight).split(
        (H * C, K * C, K * C)
    )
    values = torch.linalg.matrix_norm(W.view(K, C, -1), 2)  # [K], of inputs no longer than 1
    name = str(block.layer)
    if block.attn.ve_gate is not None and name in model.value_embeds:
        table: Tensor = model.value_embeds[name].weight  # type: ignore[assignment]
        rows = table.double().view(-1, K, C).norm(dim=-1).amax(0)
        values = values + 2 * rows  # the gate is below 2
    values = values.repeat_interleave(H // K)
    return float(_norm(block.attn.o_proj.weight) * values.norm())


def _mlp_bound(block: Block) -> float:
    """½ ‖W_down‖ · max |up| · ‖up‖, which is at least ½ ‖W_down relu(up)²‖."""
    up = _after_norm(block.mlp.up_proj.weight, block.norm_2.weight)
    largest = up.norm(dim=1).max()
    return float(
        0.5 * _norm(block.mlp.down_proj.weight) * largest * torch.linalg.matrix_norm(up, 2)
    )


def _after_norm(weight: Weight, norm: Tensor) -> Tensor:
    """weight [out, D] as a map of x / ‖x‖: a root-mean-square norm makes vectors of length √D."""
    return dense(weight).double() * norm.double() * len(norm) ** 0.5


def _norm(weight: Weight) -> Tensor:
    return torch.linalg.matrix_norm(dense(weight).double(), 2)
