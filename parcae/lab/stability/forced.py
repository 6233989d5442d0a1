"""What keeps a loop stable: a spectral radius that is forced, and one that is learned.

An iteration is h ← Ā h + B̄ e + R̄. Without the blocks' part R̄ it is a linear system, and a linear
system gives a bounded answer to a bounded input (BIBO) exactly when ρ(Ā) < 1. R̄ does not change
that: pre-norm blocks read x / rms(x), so ‖R̄‖ stays below a constant M however large h is, and R̄ is
one more bounded input (`bounds`). Hence

    ρ < 1   ‖h_t‖ ≤ ‖Āᵗ‖ ‖h_0‖ + Σ_{k<t} ‖Āᵏ‖ (‖B̄ e‖ + M), which has a limit; for a diagonal Ā
            it is (‖B̄ e‖ + M) / (1 − ρ)
    ρ = 1   with Ā = 1 ‖h_t‖ may grow with t: by ‖B̄ e‖ + M an iteration, and no more
    ρ > 1   h grows until ‖B̄ e‖ + M no longer counts, then by the factor ρ an iteration

`forced_radius` shows the three cases on random weights: nothing is trained, only Ā is set.
`sweep` trains: Parcae's diagonal Ā has ρ < 1 whatever is learned, a free matrix (RDM's concat)
crosses 1 at a high learning rate and the state explodes, addition stands at 1.

What is not shown. No run ends in NaN: at this scale gradient clipping and the last norm hide the
explosion from the loss, so look at ρ, ‖h_T‖ and the relative residual. And ρ < 1 bounds the state
by M and B̄, which are learned and not bounded: a high learning rate inflates ‖h‖ of the diagonal
model too. Nor does ρ < 1 make the iteration contract to a fixed point.

Sources: the argument, Prairie et al., https://arxiv.org/abs/2604.12946, sections 2.2 and 3; concat,
Geiping et al., https://arxiv.org/abs/2502.05171; BIBO stability and Gelfand's formula, any text on
linear systems, such as Kailath, "Linear Systems", 1980, section 2.6.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minifer.execution.backends.dense import RowsBackend, row_batch
from minifer.parcae.injection import ConcatInjection
from minifer.parcae.lab.data import Corpus, help_topics, sample_rows
from minifer.parcae.lab.models import lab_model
from minifer.parcae.lab.stability.bounds import Gains, block_bound, gains
from minifer.parcae.model import Parcae
from minifer.weights.quantized import Weight, dense

RADII = (0.447, 0.9, 1.0, 1.05, 1.2)
SHOWN_LOOPS = (1, 8, 16, 32, 64)
INPUT_GAIN = 0.8
LIMIT = 1e18  # the square of a longer state overflows in the float32 norms
SLACK = 1e-6  # relative: of the float32 blocks, when a bound is compared


class _WideResidual(RowsBackend):
    """The blocks compute in their weights' dtype, what flows past them stays float64.

    A float32 state of length 10⁸ would swallow what a block adds to it.
    """

    name = "wide residual"

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        matrix = dense(weight)
        return super().linear(x.to(matrix.dtype), matrix, bias, residual)


@dataclass(frozen=True)
class Trace:
    """The norms of N tokens over t = 0 … T, float64.

    state [T + 1, N]: ‖h_t‖. step [T, N]: ‖h_t − h_{t−1}‖. block [T, N]: ‖R̄‖ of iteration t.
    drive [N]: ‖B̄ e‖.
    """

    state: Tensor
    step: Tensor
    block: Tensor
    drive: Tensor

    @property
    def num_loops(self) -> int:
        """T: fewer than asked for if the state passed `LIMIT`."""
        return len(self.step)

    def growth(self) -> float:
        """Mean ‖h_T‖ over mean ‖h_{T−1}‖."""
        return float(self.state[-1].mean() / self.state[-2].mean())

    def relative_residual(self, t: int) -> float:
        """Mean ‖h_t − h_{t−1}‖ over mean ‖h_t‖."""
        return float(self.step[t - 1].mean() / self.state[t].mean())

    def fits(self, gains: Gains, block: float) -> float:
        """The largest ‖h_t‖ / bound of all tokens and t: at most 1 if the bound holds.

        block: M.
        """
        bound = gains.bound(self.state[0], self.drive + block)[: self.num_loops + 1]
        return float((self.state[1:] / bound[1:]).max())


@torch.no_grad()
def trace(
    model: Parcae,
    rows: Tensor,
    num_loops: int,
    generator: torch.Generator | None = None,
    scale: float = 1.0,
) -> Trace:
    """Run the loop over rows of ids, int64 [B, S], and keep every token's norms.

    The state is float64 and Ā is applied to it as the matrix it is. generator: of h_0; None: zeros.
    scale: h_0 is multiplied by it.
    """
    backend = _WideResidual()
    batch = replace(row_batch(*rows.shape), token_ids=rows.flatten())
    e, p = model.encode(batch, None, backend)
    term = model.input_term(e).double()
    A = model.adapter.discretise()[0].double()
    h = model.initial_state(e, generator).double() * scale
    state, steps, blocks = [h], [], []
    for t in range(num_loops):
        x = (h * A if A.dim() == 1 else h @ A.T) + term
        after = model._run(model.core, x, model.core_pass(p, batch, t))
        state.append(after)
        steps.append((after - h).norm(dim=-1))
        blocks.append((after - x).norm(dim=-1))
        h = after
        if not float(h.abs().max()) < LIMIT:
            break
    return Trace(
        torch.stack([h.norm(dim=-1) for h in state]),
        torch.stack(steps),
        torch.stack(blocks),
        term.norm(dim=-1),
    )


@dataclass(frozen=True)
class BoundCheck:
    """A trace against the bounded-input bound, every token at every iteration.

    block: the largest ‖R̄‖ that was met; block_limit: what it can be at all, by the weights.
    drive: the largest ‖B̄ e‖. state: the largest ‖h_t‖. bound, bound_by_weights: of ‖h_T‖, with
    either M and the largest ‖B̄ e‖ and ‖h_0‖. fits, fits_by_weights: the largest ‖h_t‖ ÷ bound over
    tokens and t, each token with its own ‖B̄ e‖. limit: the bound for t → ∞, infinite for ρ ≥ 1 and
    for a free Ā not computed (None).
    """

    num_loops: int
    block: float
    block_limit: float
    drive: float
    state: float
    bound: float
    bound_by_weights: float
    fits: float
    fits_by_weights: float
    limit: float | None

    @property
    def holds(self) -> bool:
        """Is no state above its bound, and no ‖R̄‖ above what the weights allow?"""
        worst = max(self.fits, self.fits_by_weights, self.block / self.block_limit)
        return worst <= 1 + SLACK


def check_bound(model: Parcae, seen: Trace, diagonal: bool = False) -> BoundCheck:
    """Compare a trace of a model with its bound.

    diagonal: take Ā for ρ · 1, as in `forced_radius`, where a limit can be written down.
    """
    loops = seen.num_loops
    gain = gains(model.adapter, loops)
    block, limit = float(seen.block.max()), block_bound(model)
    start, drive = float(seen.state[0].max()), float(seen.drive.max())
    rho = model.adapter.spectral_radius()
    far: float | None = None
    if diagonal or model.loop.injection != "concat":
        far = (drive + block) / (1 - rho) if rho < 1 else math.inf
    return BoundCheck(
        num_loops=loops,
        block=block,
        block_limit=limit,
        drive=drive,
        state=float(seen.state[1:].max()),
        bound=float(gain.bound(start, drive + block)[-1]),
        bound_by_weights=float(gain.bound(start, drive + limit)[-1]),
        fits=seen.fits(gain, block),
        fits_by_weights=seen.fits(gain, limit),
        limit=far,
    )


@dataclass(frozen=True)
class ForcedRow:
    """One radius.

    norms: mean ‖h_t‖ of t = 0 … T; bounds: what no token's ‖h_t‖ exceeds; blocks: mean ‖R̄‖ of
    iteration 1 … T, and block the largest of them.
    """

    rho: float
    norms: tuple[float, ...]
    bounds: tuple[float, ...]
    blocks: tuple[float, ...]
    growth: float
    relative_residual: float
    block: float
    check: BoundCheck


def forced_model(rho: float, *, width: int = 64, seed: int = 0) -> Parcae:
    """Untrained, no block silent, retention ρ · 1 and input 0.8 · 1; the layers are 1/2/1."""
    model = lab_model(
        text().num_symbols, width=width, injection="concat", zero_out=False, seed=seed
    )
    assert isinstance(model.adapter, ConcatInjection)
    eye = torch.eye(width)
    with torch.no_grad():
        model.adapter.W.copy_(torch.cat([rho * eye, INPUT_GAIN * eye], dim=1))
    return model


def forced_radius(
    radii: Sequence[float] = RADII, *, num_loops: int = 64, width: int = 64, seed: int = 0
) -> list[ForcedRow]:
    """The same random weights, text and h_0 with one retention after the other; nothing is trained.

    Four rows of 64 characters. Raises `ValueError` for a radius that is not above 0 or fewer than
    two loops.
    """
    if num_loops < 2:
        raise ValueError(f"num_loops must be at least 2, got {num_loops}")
    if bad := [rho for rho in radii if not 0 < rho < math.inf]:
        raise ValueError(f"radii must be above 0 and finite, got {bad[0]}")
    rows = validation_rows(4, seed=seed)
    found = []
    for rho in radii:
        model = forced_model(rho, width=width, seed=seed)
        seen = trace(model, rows, num_loops, torch.Generator().manual_seed(seed))
        check = check_bound(model, seen, diagonal=True)
        gain = gains(model.adapter, seen.num_loops)
        bounds = gain.bound(float(seen.state[0].max()), check.drive + check.block)
        found.append(
            ForcedRow(
                rho=rho,
                norms=tuple(seen.state.mean(1).tolist()),
                bounds=tuple(bounds.tolist()),
                blocks=tuple(seen.block.mean(1).tolist()),
                growth=seen.growth(),
                relative_residual=seen.relative_residual(seen.num_loops),
                block=float(seen.block.mean(1).max()),
                check=check,
            )
        )
    return found


def validation_rows(count: int, *, length: int = 64, seed: int = 0) -> Tensor:
    """int64 [count, length] of the validation text."""
    generator = torch.Generator().manual_seed(seed)
    return sample_rows(text().validation, count, length, generator)[:, :-1]


@functools.cache
def text() -> Corpus:
    """The laboratory's text, read once a process."""
    return help_topics()
