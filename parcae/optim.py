"""Which optimiser moves which parameter.

AdamW for all, or Muon for the matrices inside the blocks and AdamW for the rest: embeddings, norms,
gates, the adapter and the readout (https://arxiv.org/abs/2604.12946, table 20). Muon makes the step
of a matrix orthogonal, so it must see the matrices that mean something: q, k and v each by itself,
although the model keeps them in one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minifer.parcae.model import Parcae

OPTIMIZERS = ("adamw", "muon")
_IN_BLOCKS = ("qkv_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class _View:
    """Rows of a parameter as a leaf that an optimiser can step; they share memory."""

    leaf: nn.Parameter
    whole: nn.Parameter
    start: int
    stop: int


def is_block_matrix(name: str) -> bool:
    """Is a parameter of `Parcae` a matrix of attention or MLP?"""
    return name.endswith(_IN_BLOCKS)


class Optimizer:
    """The optimiser, or both of them, behind the few calls that training needs."""

    def __init__(
        self,
        model: Parcae,
        kind: str,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        """kind: one of OPTIMIZERS. weight_decay: of the blocks' matrices alone."""
        if kind not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {kind!r}")
        parameters = dict(model.named_parameters())
        matrices = [p for name, p in parameters.items() if is_block_matrix(name)]
        rest = [p for name, p in parameters.items() if not is_block_matrix(name)]
        groups: list[dict[str, Any]] = [{"params": rest, "weight_decay": 0.0}]
        self.views: list[_View] = []
        if kind == "adamw":
            groups.append({"params": matrices, "weight_decay": weight_decay})
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)
        ]
        if kind == "muon":
            for part in model.weight_parts():
                if is_block_matrix(part.parameter):
                    whole = parameters[part.parameter]
                    leaf = nn.Parameter(whole.detach()[part.start : part.stop])
                    self.views.append(_View(leaf, whole, part.start, part.stop))
            self.parts.append(
                torch.optim.Muon(
                    [view.leaf for view in self.views], lr=learning_rate, weight_decay=weight_decay
                )
            )
        self.parameters = list(parameters.values())

    def step(self, loss: Tensor, learning_rate: float, clip: float) -> float:
        """Gradients of `loss`, cut to a norm of `clip`, and one step; returns their norm before."""
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self.parameters, clip))
        for view in self.views:
            gradient = view.whole.grad
            view.leaf.grad = None if gradient is None else gradient[view.start : view.stop]
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
