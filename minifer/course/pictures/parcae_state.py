"""The state of a loop model: how it grows, what bounds it, what an injection makes of it.

Nothing here is trained. Models are the laboratory's (`minifer.parcae.lab`), texts are seeded ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minifer.course.figures import PALETTE, SERIES, label_axes, new_figure
from minifer.execution.backends.dense import RowsBackend, row_batch
from minifer.parcae.injection import KINDS, ConcatInjection, DiagonalInjection
from minifer.parcae.lab.models import lab_model
from minifer.parcae.lab.stability.forced import Trace, forced_model, trace
from minifer.parcae.model import Parcae

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_SYMBOLS = 95


def some_ids(rows: int = 4, length: int = 24, seed: int = 13) -> Tensor:
    """int64 [rows, length], the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(NUM_SYMBOLS, (rows, length), generator=generator)


def forced_traces(radii: Sequence[float], num_loops: int) -> dict[float, Trace]:
    """The same random blocks, ids and h₀ under one retention Ā = ρ · 1 after the other."""
    found = {}
    for rho in radii:
        start = torch.Generator().manual_seed(0)
        found[rho] = trace(forced_model(rho), some_ids(), num_loops, start)
    return found


@torch.no_grad()
def free_injection(matrix: Tensor) -> ConcatInjection:
    """The concat injection whose Ā is this matrix [D, D], with B̄ = 1."""
    width = len(matrix)
    injection = ConcatInjection(width, torch.float32, "cpu")
    injection.W.copy_(torch.cat([matrix.float(), torch.eye(width)], dim=1))
    return injection.requires_grad_(False)


@torch.no_grad()
def diagonal_injection(A_log: Sequence[float], dt_bias: Sequence[float]) -> DiagonalInjection:
    """Parcae's injection with these parameters, a channel each, and B = 1."""
    injection = DiagonalInjection(len(A_log), torch.float32, "cpu")
    injection.A_log.copy_(torch.tensor(A_log))
    injection.dt_bias.copy_(torch.tensor(dt_bias))
    torch.nn.init.eye_(injection.B)
    return injection.requires_grad_(False)


@torch.no_grad()
def pushed_model(kind: str, push: float, seed: int = 0) -> Parcae:
    """An untrained model whose injection has been pushed about, as a high learning rate would.

    push: deviation of the noise on `A_log` and `dt_bias`, and, in units of their own deviation at
    the start, on the entries of W or B. An injection without parameters stays as it is.
    """
    model = lab_model(NUM_SYMBOLS, injection=kind, zero_out=False, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.adapter.parameters():
        scale = 1.0 if parameter.dim() == 1 else model.state_std
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(push * scale * noise)
    return model


@dataclass(frozen=True)
class Pushed:
    """rho: of the pushed injection. norms: mean ‖h_t‖ of t = 0 … T, shorter if it overflows."""

    rho: float
    norms: tuple[float, ...]


def pushed_states(push: float, num_loops: int) -> dict[str, Pushed]:
    """What becomes of the state under each of the three injections."""
    found = {}
    for kind in KINDS:
        model = pushed_model(kind, push)
        seen = trace(model, some_ids(), num_loops, torch.Generator().manual_seed(0))
        norms = tuple(seen.state.mean(1).tolist())
        found[kind] = Pushed(model.adapter.spectral_radius(), norms)
    return found


def state_with_input(factor: float, *, norm: bool, num_loops: int = 8) -> float:
    """Largest ‖h_T‖ of an untrained diagonal model whose embeddings are `factor` times as large.

    norm: is the input normalised before it enters the loop?
    """
    model = lab_model(NUM_SYMBOLS, prelude_norm=norm, layers=(0, 2, 0), zero_out=False)
    with torch.no_grad():
        model.wte.weight.mul_(factor)
    return float(trace(model, some_ids(), num_loops).state[-1].max())


def start_gradient(kind: str, push: float, num_loops: int) -> tuple[float, bool]:
    """‖∂‖h_T‖ / ∂h₀‖ of a pushed model, and whether all gradients, weights' too, are finite."""
    model = pushed_model(kind, push)
    ids, backend = some_ids(), RowsBackend()
    batch = replace(row_batch(*ids.shape), token_ids=ids.flatten())
    e, p = model.encode(batch, None, backend)
    h = start = model.initial_state(e, torch.Generator().manual_seed(0)).requires_grad_()
    term = model.input_term(e)
    for t in range(num_loops):
        h = model.step(h, term, model.core_pass(p, batch, t))
    h.norm().backward()
    assert start.grad is not None
    grads = [start.grad, *(x.grad for x in model.parameters() if x.grad is not None)]
    return float(start.grad.norm()), all(bool(g.isfinite().all()) for g in grads)


def norms_figure(
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    y: str = "mean ‖h_t‖ of a token's state",
    log_x: bool = False,
) -> Figure:
    """Lines over the iterations, on a logarithmic axis. log_x: iteration 0 is left out."""
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    first = 1 if log_x else 0
    for (colour, marker, line), (label, values) in zip(SERIES, series.items(), strict=False):
        shown = values[first:]
        axes.plot(
            range(first, first + len(shown)), shown, color=colour, marker=marker, linestyle=line,
            label=label, markersize=5, markevery=0.12 if log_x else max(1, len(shown) // 9),
        )  # fmt: skip
    axes.set_yscale("log")
    if log_x:
        axes.set_xscale("log")
    label_axes(axes, title=title, x="iteration t", y=y)
    return figure


def injection_view(push: float, loops: int) -> Figure:
    """The view of the widget: three injections, pushed alike."""
    found = pushed_states(push, loops)
    series = {f"{kind}, ρ = {p.rho:.2f}": p.norms for kind, p in found.items()}
    above = [kind for kind, p in found.items() if p.rho > 1]
    title = f"Pushed by {push:g}: " + (
        f"ρ of {' and '.join(above)} is above 1" if above else "no ρ is above 1"
    )
    return norms_figure(series, title=title)


def decay_figure(*, title: str) -> Figure:
    """Ā against dt_bias for three A_log; and Euler's rule for one of them."""
    import torch.nn.functional as F

    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    dt = torch.linspace(-6, 6, 121)
    curves: dict[str, Any] = {
        f"exp(−Δ · exp(A_log)), A_log = {a}": torch.exp(-F.softplus(dt) * torch.tensor(a).exp())
        for a in (-2, 0, 2)
    }
    curves["Euler's 1 − Δ · exp(A_log), A_log = 2"] = 1 - F.softplus(dt) * torch.tensor(2).exp()
    for (colour, marker, line), (label, values) in zip(SERIES, curves.items(), strict=False):
        axes.plot(dt, values, color=colour, marker=marker, linestyle=line, label=label,
                  markevery=15, markersize=5)  # fmt: skip
    axes.axhspan(0, 1, color=PALETTE["free"], zorder=0)
    axes.set_ylim(-2.2, 1.4)
    label_axes(axes, title=title, x="dt_bias, learned; Δ = softplus(dt_bias)", y="Ā of a channel")
    axes.legend(fontsize=9, frameon=False, loc="lower left")
    return figure
