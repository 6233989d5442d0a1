"""Training FLOPs: against the published numbers, and against what torch counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from minifer.execution.backends.dense import RowsBackend, row_batch
from minifer.parcae.depth import sample_depths, unroll
from minifer.parcae.lab.laws import depth_law, isoflop
from minifer.parcae.lab.laws.flops import public_script_flops, training_flops, unrolled_parameters
from minifer.parcae.lab.laws.isoflop import (
    IsoFlopJob,
    IsoFlopPoint,
    by_budget,
    expected_loops,
    flops_per_token,
    num_steps,
    scaling,
)
from minifer.parcae.lab.models import lab_model
from minifer.parcae.presets import PRESETS

SMALL, MEDIUM = PRESETS["parcae-140m"], PRESETS["parcae-370m"]


def test_flops_of_a_training_token_with_tables_left_out_and_the_head_counted() -> None:
    assert training_flops(SMALL, 1) == pytest.approx(5.26e8, rel=1e-3)
    assert training_flops(SMALL, 8) == pytest.approx(1.07e9, rel=5e-3)
    assert training_flops(SMALL, 8) / training_flops(SMALL, 1) == pytest.approx(2.04, abs=0.005)
    assert training_flops(MEDIUM, 8) / training_flops(MEDIUM, 1) == pytest.approx(2.25, abs=0.005)


def test_the_public_count_makes_depth_look_cheap() -> None:
    script = [public_script_flops(SMALL, mu) for mu in (1, 8)]
    assert script[0] == pytest.approx(8.28e8, rel=1e-3)
    assert script[1] == pytest.approx(1.36e9, rel=1e-3)
    assert script[1] / script[0] == pytest.approx(1.64, abs=0.005)
    medium = [public_script_flops(MEDIUM, mu) for mu in (1, 8)]
    assert medium[1] / medium[0] == pytest.approx(1.72, abs=0.005)


@pytest.mark.parametrize(
    ("layers", "injection", "loops", "backward"),
    [
        ((1, 2, 1), "diagonal", 5, 3),
        ((0, 1, 0), "concat", 4, 2),
        ((2, 1, 0), "add", 3, 3),
        ((0, 2, 1), "diagonal", 1, 1),
    ],
)
def test_the_matrix_products_are_those_that_torch_counts(
    layers: tuple[int, int, int], injection: str, loops: int, backward: int
) -> None:
    B, S = 3, 16
    model = lab_model(40, layers=layers, injection=injection, length=S, zero_out=False)
    ids = torch.randint(40, (B, S + 1), generator=torch.Generator().manual_seed(0))
    batch = replace(row_batch(B, S), token_ids=ids[:, :-1].flatten())
    backend = RowsBackend()
    with FlopCounterMode(display=False) as counter:
        out = unroll(model, batch, backend, torch.full((B,), loops), backward)
        logits = model.logits(out.hidden, backend)
        F.cross_entropy(logits, ids[:, 1:].flatten()).backward()
    counted = sum(
        flops for name, flops in counter.get_flop_counts()["Global"].items() if "mm" in str(name)
    )

    def ours(context: int) -> float:
        return training_flops(model.config, loops, backward=backward, context=context, hoisted=True)

    without_attention = 2 * ours(1) - ours(2)  # attention is linear in the context
    # A free Ā asks for no gradient of the state that the first loop with gradients starts from.
    spared = 2 * 32 * 32 if injection == "concat" else 0
    assert counted == B * S * (without_attention - spared)
    # attention: 4 · D a key, three times that with gradient
    P, R, C = layers
    applications = (loops - backward) * R + 3 * (P + C + backward * R)
    assert ours(2) - ours(1) == 4 * 32 * applications


def test_an_iteration_that_computes_its_input_term_again_costs_more() -> None:
    D = SMALL.hidden_size
    again = training_flops(SMALL, 8) - training_flops(SMALL, 8, hoisted=True)
    assert again == D * D * (2 * 4 + 6 * (4 - 1))  # 8 loops, 4 with gradient, against one with


def test_unrolled_parameters_count_the_core_once_a_loop() -> None:
    assert unrolled_parameters(SMALL, 1) == 144323136
    assert unrolled_parameters(SMALL, 3) - unrolled_parameters(SMALL, 2) == 14159040


@pytest.mark.parametrize("mu", [1, 2, 4, 12])
def test_expected_loops_are_those_that_are_drawn(mu: int) -> None:
    limit = math.ceil(mu / 2)
    kind = "poisson" if mu > 1 else "constant"
    drawn = sample_depths(kind, mu, 200_000, torch.Generator().manual_seed(0)).double()
    mean, tracked = expected_loops(mu, limit)
    error = 5 * mu**0.5 / 200_000**0.5  # five standard errors
    assert mean == pytest.approx(float(drawn.mean()), abs=error)
    assert tracked == pytest.approx(float(drawn.clamp(max=limit).mean()), abs=error)


@pytest.mark.parametrize("mu", isoflop.MUS)
def test_a_budget_is_spent_to_within_a_step(mu: int) -> None:
    for budget in isoflop.BUDGETS:
        step = flops_per_token(mu) * isoflop.ROWS * isoflop.LENGTH
        left = budget - num_steps(IsoFlopJob(budget, mu, 0)) * step
        assert 0 <= left < step


def point(budget: float, mu: int, seed: int, loss: float) -> IsoFlopPoint:
    return IsoFlopPoint(IsoFlopJob(budget, mu, seed), loss, 1000 * mu, budget, 0.0)


def test_a_known_optimum_is_found_again() -> None:
    points = [
        point(C, mu, seed, 2 + 0.1 * math.log(mu / (C / 1e9) ** 0.5) ** 2 + offset)
        for C in (4e9, 9e9, 16e9)
        for mu in (1, 2, 4, 8)
        for seed, offset in ((0, -0.01), (1, 0.01))
    ]
    budgets = by_budget(points[::-1])
    assert [b.budget for b in budgets] == [4e9, 9e9, 16e9]
    assert [b.parabola.best for b in budgets] == pytest.approx([2, 3, 4])  # type: ignore[union-attr]
    assert [b.best for b in budgets] == [2, 4, 4] and budgets[0].mus == (1, 2, 4, 8)
    assert budgets[0].spread == pytest.approx([0.02 / 2**0.5] * 4)
    law = scaling(budgets)
    assert law is not None and law.exponent == pytest.approx(0.5)


def test_no_law_is_drawn_through_budgets_without_a_minimum() -> None:
    rising = [point(C, mu, 0, 2 + 0.1 * mu) for C in (1e9, 2e9) for mu in (1, 2, 4, 8)]
    budgets = by_budget(rising)
    assert all(b.parabola is not None and not b.parabola.inside for b in budgets)
    assert scaling(budgets) is None


def test_a_run_spends_its_budget_and_reports_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth_law, "VALIDATION_ROWS", 8)
    step = flops_per_token(2) * isoflop.ROWS * isoflop.LENGTH
    found = isoflop.run(IsoFlopJob(3.5 * step, 2, seed=1))
    assert found.tokens == 3 * 256 and found.flops == pytest.approx(3 * step)
    assert 3 < found.loss < math.log(95) + 1
    assert isoflop.run(IsoFlopJob(3.5 * step, 2, seed=1)).loss == found.loss


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: training_flops(SMALL, 0), "mu must be at least 1, got 0"),
        (lambda: training_flops(SMALL, 4, backward=5), "backward must be between 0 and mu = 4"),
        (lambda: training_flops(SMALL, 4, context=0), "context must be at least 1, got 0"),
        (lambda: training_flops(replace(SMALL, loop=None), 4), "loop must"),
        (lambda: isoflop.jobs(budgets=(1.0,)), "budget must pay for a step"),
    ],
)
def test_bad_values_are_refused_by_name(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()  # type: ignore[operator]
