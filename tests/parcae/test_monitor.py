"""What is watched of a loop model, against the second model in float64 and plain definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loop_models import VOCAB, dense_logits, float64, loop_model
from parcae_float64 import Float64Decode, rms_norm
from torch import Tensor

from minifer.parcae.lab.models import lab_model
from minifer.parcae.monitor import logits_by_depth, loss_by_depth, state_trace

ROWS = torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))


def test_the_loss_at_a_depth_is_that_of_the_model_run_so_deep() -> None:
    model = loop_model((1, 2, 1))
    losses = loss_by_depth(model, ROWS, [4, 1, 9])
    assert list(losses) == [1, 4, 9]
    sequences = [row[:-1].tolist() for row in ROWS]
    for depth, loss in losses.items():
        logits = dense_logits(model, *sequences, num_loops=depth)
        expected = float(F.cross_entropy(logits, ROWS[:, 1:].flatten()))
        assert loss == pytest.approx(expected, rel=1e-5)
    assert len(set(losses.values())) == 3


def test_only_targets_that_count_are_counted() -> None:
    model = loop_model((0, 1, 0))
    targets = torch.full((3, 6), -100)
    targets[1, 4] = 5
    (_, logits), *_ = logits_by_depth(model, ROWS, [2])
    expected = -float(logits.view(3, 6, -1)[1, 4].log_softmax(-1)[5])
    assert loss_by_depth(model, ROWS, [2], targets=targets)[2] == pytest.approx(expected, rel=1e-6)


def test_the_trace_measures_the_states_of_the_second_model() -> None:
    model = loop_model((1, 1, 1))
    trace = state_trace(model, ROWS, 6)
    states = []  # [row][position][iteration]
    for row in ROWS:
        decode = Float64Decode(float64(model), 6)
        decode.run(row[:-1].tolist())
        states.append(decode.states)
    h = np.array(states)  # [B, S, T + 1, D]
    norms = np.linalg.norm(h, axis=-1)
    residuals = np.linalg.norm(np.diff(h, axis=2), axis=-1)
    assert [record.iteration for record in trace] == [1, 2, 3, 4, 5, 6]
    for record in trace:
        t = record.iteration
        norm, residual = norms[:, :, t].mean(), residuals[:, :, t - 1].mean()
        assert record.norm == pytest.approx(norm, rel=1e-4)
        assert record.max_norm == pytest.approx(norms[:, :, t].max(), rel=1e-4)
        assert record.residual == pytest.approx(residual, rel=1e-3)
        assert record.relative_residual == pytest.approx(residual / norm, rel=1e-3)
        cosines = [
            float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
            for row in h[:, :, t]
            for i, a in enumerate(row)
            for j, b in enumerate(row)
            if i != j
        ]
        assert record.token_correlation == pytest.approx(np.mean(cosines), abs=1e-4)


def test_the_blocks_contribution_is_what_they_add_to_the_injected_state() -> None:
    """‖h_{t+1} − (Ā h_t + B̄ e)‖, of the states before and after."""
    model = loop_model((1, 2, 1))
    trace = state_trace(model, ROWS, 3)
    blocks = np.array(
        [
            [
                np.linalg.norm(states[t + 1] - reference.inject(states[t], e))
                for states, e in zip(decode.states, inputs, strict=True)
            ]
            for row in ROWS
            for reference, decode, inputs in [_decoded(model, row)]
            for t in range(3)
        ]
    ).reshape(3, 3, 6)  # [B, T, S]
    for record in trace:
        own = blocks[:, record.iteration - 1]
        assert record.block_norm == pytest.approx(own.mean(), rel=1e-4)
        assert record.max_block_norm == pytest.approx(own.max(), rel=1e-4)


def _decoded(model, row: Tensor):
    """The second model, a run of it, and e of every position."""
    reference = float64(model)
    decode = Float64Decode(reference, 3)
    tokens = row[:-1].tolist()
    decode.run(tokens)
    embedded = {p: reference.w["transformer.wte.weight"][t] for p, t in enumerate(tokens)}
    e = Float64Decode(reference, 3).stack("prelude", embedded, tokens)
    gain = reference.w["transformer.ln_prelude.weight"]
    return reference, decode, [rms_norm(e[p], gain) for p in range(len(tokens))]


def test_a_model_of_identity_blocks_adds_nothing_and_comes_to_rest() -> None:
    model = lab_model(VOCAB, layers=(1, 2, 1))  # blocks start as the identity
    trace = state_trace(model, ROWS, 24)
    assert all(record.max_block_norm == 0 for record in trace)
    decay = model.adapter.spectral_radius()
    for before, after in itertools.pairwise(trace[:9]):
        assert after.residual / before.residual == pytest.approx(decay, rel=1e-3)
    assert trace[-1].relative_residual < 1e-6


def test_a_random_start_is_drawn_from_the_generator() -> None:
    model = loop_model((1, 1, 1))
    first, same, other = (
        loss_by_depth(model, ROWS, [1], torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first == same != other


def test_what_cannot_be_watched_is_refused() -> None:
    model = loop_model((0, 1, 0))
    for depths in ([2, 0], [1.5], ["x", 1], [True]):
        with pytest.raises(ValueError, match=r"depths must be integers of at least 1, .* got \["):
            loss_by_depth(model, ROWS, depths)
    with pytest.raises(ValueError, match=r"depths must be .* got \[\]"):
        loss_by_depth(model, ROWS, [])
    with pytest.raises(ValueError, match="num_loops must be an integer of at least 1, got 0"):
        state_trace(model, ROWS, 0)
    for rows in (ROWS[:, :1], ROWS[0], ROWS.float()):
        with pytest.raises(ValueError, match=r"rows must be int64 \[B, S \+ 1\].* got shape \("):
            state_trace(model, rows, 2)
        with pytest.raises(ValueError, match=r"rows must be int64 \[B, S \+ 1\].* got shape \("):
            loss_by_depth(model, rows, [2])
    with pytest.raises(ValueError, match=r"targets must be \[B, S\] = .* got \["):
        loss_by_depth(model, ROWS, [2], targets=ROWS)
