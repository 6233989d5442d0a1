"""What to watch in a loop model: the loss at each depth, and how the state moves.

A stable loop shows a state norm that levels off, a relative residual ‖h_t − h_{t−1}‖ / ‖h_t‖ that
falls towards 0, and a loss that falls and then stays. The contribution of the blocks, ‖core(x) − x‖
for x = Ā h + B̄ e, is bounded whatever h is: an exploding state is the linear part's doing.

Source: https://arxiv.org/abs/2604.12946, appendix A.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.execution.backend import Backend
from minifer.execution.backends.dense import RowsBackend, row_batch
from minifer.parcae.layers import Pass
from minifer.parcae.model import Parcae


@dataclass(frozen=True)
class StateRecord:
    """The state after an iteration 1, 2, …; norms are of a token's vector.

    norm, max_norm: mean and largest ‖h_t‖. residual: mean ‖h_t − h_{t−1}‖; relative_residual: over
    `norm`. block_norm, max_block_norm: mean and largest ‖core(x) − x‖. token_correlation: mean
    cosine between the states of different positions of a row; 1 when all are the same.
    """

    iteration: int
    norm: float
    max_norm: float
    residual: float
    relative_residual: float
    block_norm: float
    max_block_norm: float
    token_correlation: float


@torch.inference_mode()
def loss_by_depth(
    model: Parcae,
    rows: Tensor,
    depths: Iterable[int],
    generator: torch.Generator | None = None,
    *,
    targets: Tensor | None = None,
    backend: Backend | None = None,
) -> dict[int, float]:
    """Mean cross-entropy in nats a token at each of `depths`, from one pass over the loops.

    rows: int64 [B, S + 1]. targets: int64 [B, S] where −100 does not count; None: each row's next
    tokens. generator: of h₀; None starts from zeros.

    Raises `ValueError` for a depth below 1 or rows that are not [B, S + 1] with S of at least 1.
    """
    _check(rows)
    backend = backend or RowsBackend()
    expected = rows[:, 1:] if targets is None else targets
    if expected.shape != rows[:, 1:].shape:
        raise ValueError(
            f"targets must be [B, S] = {[*rows[:, 1:].shape]}, got {[*expected.shape]}"
        )
    return {
        t: float(F.cross_entropy(logits, expected.flatten()))
        for t, logits in logits_by_depth(model, rows, depths, generator, backend=backend)
    }


def logits_by_depth(
    model: Parcae,
    rows: Tensor,
    depths: Iterable[int],
    generator: torch.Generator | None = None,
    *,
    backend: Backend | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Each of `depths`, shallowest first, with the logits float32 [B · S, V] after so many loops.

    Arguments and errors as `loss_by_depth`.
    """
    wanted = list(dict.fromkeys(depths))
    if not wanted or not all(map(_is_depth, wanted)):
        raise ValueError(f"depths must be integers of at least 1, and at least one, got {wanted!r}")
    wanted.sort()
    backend = backend or RowsBackend()
    with torch.inference_mode():
        start = _start(model, rows, generator, backend)
        h = start.h
        for t in range(1, wanted[-1] + 1):
            h = model.step(h, start.term, start.core)
            if t in wanted:
                yield t, model.logits(model.finish(h, start.coda), backend)


@torch.inference_mode()
def state_trace(
    model: Parcae,
    rows: Tensor,
    num_loops: int,
    generator: torch.Generator | None = None,
    *,
    backend: Backend | None = None,
) -> list[StateRecord]:
    """One record an iteration, on rows int64 [B, S + 1], whose last column is not read.

    Raises `ValueError` as `loss_by_depth`.
    """
    if not _is_depth(num_loops):
        raise ValueError(f"num_loops must be an integer of at least 1, got {num_loops!r}")
    backend = backend or RowsBackend()
    start = _start(model, rows, generator, backend)
    h = start.h
    records = []
    for t in range(1, num_loops + 1):
        x = model.adapter(h, start.term, backend)
        previous, h = h, model.step(h, start.term, start.core)
        norms, blocks = h.norm(dim=-1), (h - x).norm(dim=-1)
        norm, residual = float(norms.mean()), float((h - previous).norm(dim=-1).mean())
        records.append(
            StateRecord(
                iteration=t,
                norm=norm,
                max_norm=float(norms.max()),
                residual=residual,
                relative_residual=residual / norm if norm else 0.0,
                block_norm=float(blocks.mean()),
                max_block_norm=float(blocks.max()),
                token_correlation=_token_correlation(h.unflatten(0, (len(rows), -1))),
            )
        )
    return records


@dataclass(frozen=True)
class _Start:
    """h₀ and the input term [B · S, D], and the passes over the core and the coda."""

    h: Tensor
    term: Tensor
    core: Pass
    coda: Pass


def _start(
    model: Parcae, rows: Tensor, generator: torch.Generator | None, backend: Backend
) -> _Start:
    _check(rows)
    batch = row_batch(len(rows), rows.shape[1] - 1)
    batch = replace(batch, token_ids=rows[:, :-1].flatten())
    e, p = model.encode(batch, None, backend)
    h = model.initial_state(e, generator)
    return _Start(h, model.input_term(e), model.core_pass(p, batch, 0), model.coda_pass(p, batch))


def _check(rows: Tensor) -> None:
    if rows.dim() != 2 or rows.shape[0] < 1 or rows.shape[1] < 2 or rows.dtype != torch.int64:
        raise ValueError(
            "rows must be int64 [B, S + 1], B and S of at least 1, got shape "
            f"{tuple(rows.shape)} of {rows.dtype}"
        )


def _is_depth(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _token_correlation(h: Tensor) -> float:
    """Mean cosine between different positions of h [B, S, D]; 0 for a single position."""
    S = h.shape[1]
    if S == 1:
        return 0.0
    together = F.normalize(h, dim=-1).sum(1).square().sum(-1)  # S + twice the pairs' cosines
    return float(((together - S) / (S * (S - 1))).mean())
