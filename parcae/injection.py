"""How the state is kept and the input is added at the start of every iteration: x = Ā h + B̄ e.

Drop the blocks and a looped model is the linear system h ← Ā h + B̄ e: it forgets its start when
the spectral radius ρ(Ā) is below 1, drifts at 1, explodes above. Pre-norm blocks add a residual
that is bounded whatever h is, ‖R̄‖ ≤ M, so with them the same holds: for a diagonal Ā
‖h_t‖ ≤ ρᵗ ‖h_0‖ + (‖B̄ e‖ + M) / (1 − ρ) below 1, growth by ρ an iteration above.

=========  ======================  =============  ==================================
kind       Ā                       B̄ e            ρ(Ā)
=========  ======================  =============  ==================================
diagonal   exp(−Δ · exp(A_log))    Δ · (B e)      below 1, whatever is learned
concat     W[:, :D], free          W[:, D:] e     anything
add        1                       e              1
=========  ======================  =============  ==================================

`diagonal` is Parcae's (https://arxiv.org/abs/2604.12946, section 4.1): a negative diagonal A,
discretised exactly (zero-order hold) with a step Δ = softplus(dt_bias); B by Euler's rule. e is
the same in every iteration, so B̄ e is computed once a token. Decay and B̄ e stay float32: in
bfloat16 a decay above 0.998 is 1. (So is one above 1 − 3·10⁻⁸ in float32: "below 1" is of real
numbers.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from minifer.execution.backend import Backend

INITIAL_DECAY = math.sqrt(1 / 5)


class Injection(nn.Module, ABC):
    """What the three kinds have in common. D: the width of h and e."""

    FLOAT32: tuple[str, ...] = ()  # what `model.to(dtype)` must not round

    @abstractmethod
    def retention(self) -> Tensor:
        """Ā in float32: a vector [D] stands for a diagonal matrix, else [D, D]."""

    @abstractmethod
    def input_matrix(self) -> Tensor:
        """B̄ in float32, as `retention`."""

    def discretise(self) -> tuple[Tensor, Tensor]:
        """Ā and B̄ in float32: a vector [D] stands for a diagonal matrix, else [D, D]."""
        return self.retention(), self.input_matrix()

    def input_term(self, e: Tensor) -> Tensor:
        """e [T, D] → B̄ e [T, D], float32: once a token."""
        B = self.input_matrix()
        return e.float() * B if B.dim() == 1 else F.linear(e.float(), B)

    def forward(self, h: Tensor, term: Tensor, backend: Backend) -> Tensor:
        """h [T, D] and the input term [T, D] → Ā h + B̄ e in h's dtype: once an iteration."""
        A = self.retention()
        if A.dim() == 1:
            return backend.inject(h, A, term)
        return (F.linear(h.float(), A) + term).to(h.dtype)

    @torch.no_grad()
    def spectral_radius(self) -> float:
        """ρ(Ā): the largest |eigenvalue|."""
        A = self.retention()
        values = A if A.dim() == 1 else torch.linalg.eigvals(A)
        return float(values.abs().max())

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """The start of training. std: of a free matrix."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Injection:
        """Follow `model.to(device)`, but keep FLOAT32 when `model.to(dtype)` rounds the rest."""
        exact = {name: getattr(self, name).detach() for name in self.FLOAT32}
        super()._apply(fn, recurse)
        for name, values in exact.items():
            now = getattr(self, name)
            if now.dtype != torch.float32:
                now.data = values.to(now.device)
        return self


class DiagonalInjection(Injection):
    """A_log, dt_bias [D] float32; B [D, D]. ρ < 1 by construction."""

    FLOAT32 = ("A_log", "dt_bias")

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(width, dtype=torch.float32, device=device))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32, device=device))
        self.B = nn.Parameter(torch.empty(width, width, dtype=dtype, device=device))

    def delta(self) -> Tensor:
        """Δ [D], the step between two iterations."""
        return F.softplus(self.dt_bias)

    def retention(self) -> Tensor:
        return torch.exp(-self.delta() * self.A_log.exp())

    def input_matrix(self) -> Tensor:
        return self.delta()[:, None] * self.B.float()

    def input_term(self, e: Tensor) -> Tensor:
        return self.delta() * F.linear(e, self.B).float()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Ā = √(1/5), B = 1."""
        delta = -math.log(INITIAL_DECAY)
        self.A_log.zero_()
        self.dt_bias.fill_(delta + math.log(-math.expm1(-delta)))  # softplus⁻¹
        nn.init.eye_(self.B)


class ConcatInjection(Injection):
    """W [D, 2 D] over (h, e): free (Huginn, RDM: https://arxiv.org/abs/2502.05171)."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(width, 2 * width, dtype=dtype, device=device))

    def retention(self) -> Tensor:
        return self.W[:, : self.W.shape[0]].float()

    def input_matrix(self) -> Tensor:
        return self.W[:, self.W.shape[0] :].float()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, std: float) -> None:
        W = torch.empty(self.W.shape)
        nn.init.trunc_normal_(W, std=std, a=-3 * std, b=3 * std, generator=generator)
        self.W.copy_(W)


class AddInjection(Injection):
    """x = h + e: no parameters."""

    FLOAT32 = ("ones",)

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        ones = torch.ones(width, device=device)
        self.register_buffer("ones", ones, persistent=False)

    ones: Tensor

    def retention(self) -> Tensor:
        return self.ones

    def input_matrix(self) -> Tensor:
        return self.ones


KINDS: dict[str, type[DiagonalInjection | ConcatInjection | AddInjection]] = {
    "diagonal": DiagonalInjection,
    "concat": ConcatInjection,
    "add": AddInjection,
}
