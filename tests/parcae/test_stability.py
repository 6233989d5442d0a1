"""The stability laboratory: the bound against closed forms, the forced table against theory and
against another implementation, and what training does to ρ."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minifer.parcae.injection import AddInjection, ConcatInjection, DiagonalInjection
from minifer.parcae.lab.models import lab_model
from minifer.parcae.lab.stability import forced as stability
from minifer.parcae.lab.stability.bounds import block_bound, gains
from minifer.parcae.lab.stability.forced import ForcedRow, check_bound, forced_radius, trace
from minifer.parcae.lab.stability.report import Study, as_json, curves, findings, study
from minifer.parcae.lab.stability.sweep import PUBLISHED, Outcome, Run, full_plan, plan, train_run
from minifer.parcae.lab.stability.tables import document, tables
from minifer.parcae.model import Parcae
from minifer.parcae.monitor import state_trace

KINDS = ("diagonal", "concat", "add")


@pytest.fixture(scope="module")
def forced() -> dict[float, ForcedRow]:
    return {row.rho: row for row in forced_radius()}


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [train_run(Run(arm, 0.1, seed=0, steps=3)) for arm in PUBLISHED]


def busy_model(injection: str = "diagonal", *, seed: int = 0, **layout: Any) -> Parcae:
    """No weight at a special value: norms, decays and gains are all different."""
    layout = {"layers": (1, 2, 1), **layout}
    model = lab_model(95, width=32, injection=injection, zero_out=False, seed=seed, **layout)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            elif "adapter" in name:
                parameter.add_(0.1 * noise)
    return model


def some_rows(seed: int = 0) -> Tensor:
    return torch.randint(95, (2, 12), generator=torch.Generator().manual_seed(seed))


# -- gains: what an Ā does to a start and to a constant input


@pytest.mark.parametrize("rho", [0.5, 1.0, 1.2])
def test_the_gains_of_a_multiple_of_one_are_powers_and_their_sum(rho: float) -> None:
    injection = ConcatInjection(4, torch.float32, "cpu")
    with torch.no_grad():
        injection.W.copy_(torch.cat([rho * torch.eye(4), torch.eye(4)], 1))
    found = gains(injection, 6)
    exact = float(torch.tensor(rho))  # float32
    assert found.power.tolist() == pytest.approx([exact**t for t in range(7)], rel=1e-12)
    sums = [sum(exact**k for k in range(t)) for t in range(7)]
    assert found.total.tolist() == pytest.approx(sums, rel=1e-12)


def test_the_gains_of_a_diagonal_injection_are_those_of_its_slowest_channel() -> None:
    injection = DiagonalInjection(3, torch.float32, "cpu")
    with torch.no_grad():
        injection.A_log.copy_(torch.tensor([0.0, -1.0, 1.0]))
        injection.dt_bias.fill_(0.0)
    slowest = math.exp(-math.log(2) * math.exp(-1))
    assert gains(injection, 3).power.tolist() == pytest.approx(
        [slowest**t for t in range(4)], rel=1e-6
    )


def test_addition_has_gains_1_and_t() -> None:
    found = gains(AddInjection(3, torch.float32, "cpu"), 4)
    assert found.power.tolist() == [1] * 5 and found.total.tolist() == [0, 1, 2, 3, 4]


def test_a_free_matrix_may_grow_at_first_and_is_bounded_if_its_radius_is_below_1() -> None:
    injection = ConcatInjection(2, torch.float32, "cpu")
    A = np.array([[0.5, 4.0], [0.0, 0.5]])
    with torch.no_grad():
        injection.W[:, :2] = torch.tensor(A)
    found = gains(injection, 200)
    norms = [np.linalg.norm(np.linalg.matrix_power(A, t), 2) for t in range(201)]
    assert found.power.tolist() == pytest.approx(norms, rel=1e-9)
    assert found.power[1] > 4  # although ρ = 1/2
    assert found.total[200] == pytest.approx(float(found.total[100]), rel=1e-12)


# -- M: what the blocks can add


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3, 1e6])
def test_no_state_makes_the_blocks_add_more_than_their_weights_allow(
    scale: float, seed: int
) -> None:
    model = busy_model(seed=seed)
    seen = trace(model, some_rows(seed), 4, torch.Generator().manual_seed(seed), scale)
    assert 0 < float(seen.block.max()) < block_bound(model)


def test_the_limit_of_attention_is_reached_by_one_head_of_orthogonal_matrices() -> None:
    model = lab_model(95, width=32, heads=1, layers=(0, 1, 0), zero_out=False)
    block: Any = model.core[0]
    with torch.no_grad():
        block.mlp.down_proj.weight.zero_()
        block.norm_1.weight.fill_(1.7)
    seen = trace(model, torch.tensor([[5], [77]]), 1)  # a lone token attends to itself
    assert seen.block[0].tolist() == pytest.approx([block_bound(model)] * 2, rel=1e-4)


def test_the_limit_of_the_mlp_is_reached_by_a_state_along_its_only_row() -> None:
    model = lab_model(95, width=32, layers=(0, 1, 0), zero_out=False)
    block: Any = model.core[0]
    with torch.no_grad():
        block.attn.o_proj.weight.zero_()
        block.norm_2.weight.fill_(0.8)
        block.mlp.up_proj.weight.zero_()
        block.mlp.up_proj.weight[0] = model.wte.weight[5] * 40
        block.mlp.down_proj.weight[:, 1:] = 0
    seen = trace(model, torch.tensor([[5]]), 1)
    assert float(seen.block[0, 0]) == pytest.approx(block_bound(model), rel=1e-3)


def test_value_embeddings_and_shared_heads_are_within_the_limit() -> None:
    config = lab_model(95, width=64, heads=4).config
    assert config.loop is not None
    loop = replace(config.loop, value_embeddings=True)
    model = Parcae(replace(config, num_kv_heads=2, loop=loop))
    model.init_weights(0, zero_out=False)
    without = block_bound(model)
    with torch.no_grad():
        for table in model.value_embeds.parameters():
            table.mul_(100)
    seen = trace(model, some_rows(), 4, torch.Generator().manual_seed(0))
    assert without < float(seen.block.max()) < block_bound(model)


# -- the trace, and the check


@pytest.mark.parametrize("injection", KINDS)
def test_the_trace_sees_what_the_models_own_steps_do(injection: str) -> None:
    model = busy_model(injection)
    rows = some_rows()
    records = state_trace(model, rows, 5, torch.Generator().manual_seed(3))
    seen = trace(model, rows[:, :-1], 5, torch.Generator().manual_seed(3))
    for t, record in enumerate(records, start=1):
        assert float(seen.state[t].mean()) == pytest.approx(record.norm, rel=1e-5)
        assert float(seen.block[t - 1].max()) == pytest.approx(record.max_block_norm, rel=1e-4)
        assert seen.relative_residual(t) == pytest.approx(record.relative_residual, rel=1e-4)


def test_a_huge_state_does_not_swallow_what_the_blocks_add() -> None:
    model = busy_model("add")
    large, huge = (
        trace(model, some_rows(), 1, torch.Generator().manual_seed(0), scale).block
        for scale in (1e8, 1e12)
    )
    assert huge.allclose(large, rtol=1e-5)


def test_the_trace_stops_where_float32_would_overflow() -> None:
    model = stability.forced_model(100.0, width=32)
    seen = trace(model, some_rows(), 64)
    assert seen.num_loops < 12 and bool(seen.state.isfinite().all())
    assert len(seen.state) == seen.num_loops + 1


@pytest.mark.parametrize("injection", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_every_state_of_every_token_lies_below_the_bound(injection: str, seed: int) -> None:
    model = busy_model(injection, seed=seed)
    seen = trace(model, some_rows(seed), 24, torch.Generator().manual_seed(seed), scale=50)
    check = check_bound(model, seen)
    assert check.holds and check.fits <= 1
    assert 0 < check.fits_by_weights < check.fits


def test_a_state_that_kept_more_than_its_model_says_is_caught() -> None:
    seen = trace(stability.forced_model(1.2, width=32), some_rows(), 24)
    assert not check_bound(stability.forced_model(0.9, width=32), seen).holds


def test_a_block_that_adds_more_than_its_weights_allow_is_caught() -> None:
    model = busy_model()
    seen = trace(model, some_rows(), 4)
    assert not check_bound(model, replace(seen, block=seen.block * 1000)).holds


# -- forced


def test_below_1_the_state_levels_off_under_the_limit(forced: dict[float, ForcedRow]) -> None:
    for rho in (0.447, 0.9):
        row = forced[rho]
        assert row.growth == pytest.approx(1, abs=1e-3) and row.relative_residual < 0.01
        limit = (row.check.drive + row.check.block) / (1 - rho)
        assert row.check.limit == pytest.approx(limit, rel=1e-6)
        # h_0, which is the limit's other term, is long gone
        assert row.check.state < limit


def test_at_1_the_state_grows_by_as_much_in_every_iteration(forced: dict[float, ForcedRow]) -> None:
    row = forced[1.0]
    steps = np.diff(row.norms)
    assert steps.max() <= row.check.drive + row.check.block
    assert steps[20:] == pytest.approx(steps[-1], rel=0.01)
    assert row.check.limit == math.inf


@pytest.mark.parametrize("rho", [1.05, 1.2])
def test_above_1_the_growth_is_the_radius_but_for_the_bounded_rest(
    forced: dict[float, ForcedRow], rho: float
) -> None:
    row = forced[rho]
    for before, after in zip(row.norms[8:-1], row.norms[9:], strict=True):
        assert abs(after / before - rho) <= (row.check.drive + row.check.block) / before
    assert row.growth == pytest.approx(rho, abs=0.004)


def test_the_blocks_add_as_much_whatever_the_radius_is(forced: dict[float, ForcedRow]) -> None:
    means = [row.block for row in forced.values()]
    assert max(means) / min(means) < 1.03
    lengths = [row.norms[-1] for row in forced.values()]
    assert max(lengths) / min(lengths) > 1e5


def test_the_bound_holds_in_every_forced_row(forced: dict[float, ForcedRow]) -> None:
    for row in forced.values():
        assert row.check.holds and row.check.num_loops == 64
        assert all(norm <= bound for norm, bound in zip(row.norms, row.bounds, strict=True))


def test_the_same_blocks_give_the_table_of_another_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured with a separate toy program: Gaussian weights, relu² without the ½."""
    table = {
        0.447: (10.2, 18.6, 18.7, 18.7, 18.7),
        1.0: (10.3, 80.5, 162.0, 326.0, 654.0),
        1.2: (10.3, 165.0, 873.0, 1.7e4, 5.8e6),
    }
    ours = stability.forced_model

    def like_it(rho: float, *, width: int, seed: int) -> Parcae:
        model = ours(rho, width=width, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 and "adapter" not in name:
                    noise = torch.randn(parameter.shape, generator=generator)
                    factor = math.sqrt(2) if "up_proj" in name else 1
                    parameter.copy_(noise * model.state_std * factor)
        return model

    monkeypatch.setattr(stability, "forced_model", like_it)
    for row in forced_radius(tuple(table)):
        norms = [row.norms[t] for t in stability.SHOWN_LOOPS]
        assert norms == pytest.approx(table[row.rho], rel=0.06)
        assert row.block == pytest.approx(8.2, rel=0.06)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"num_loops": 1}, "num_loops must be at least 2, got 1"),
     ({"radii": (0.5, -1.0)}, "radii must be above 0 and finite, got -1.0"),
     ({"radii": (math.inf,)}, "radii must be above 0 and finite, got inf")],
)  # fmt: skip
def test_bad_settings_of_the_forced_part_are_refused(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        forced_radius(**options)


# -- trained


def test_a_run_reports_every_step_and_its_end(outcomes: list[Outcome]) -> None:
    diagonal, concat, add = outcomes
    assert all(len(outcome.records) == 3 and outcome.check.holds for outcome in outcomes)
    assert 0 < diagonal.rho < 1 and add.rho == add.max_rho == 1
    assert concat.max_rho >= concat.rho > 0
    for outcome in outcomes:
        assert outcome.loss == pytest.approx(np.mean([r.loss for r in outcome.records]))
        assert outcome.max_state_norm == max(r.state_norm for r in outcome.records)


def test_the_same_run_gives_the_same_numbers(outcomes: list[Outcome]) -> None:
    assert train_run(outcomes[0].run) == outcomes[0]


def test_at_a_high_learning_rate_concat_crosses_1_and_diagonal_does_not() -> None:
    diagonal, concat = (train_run(Run(arm, 0.1, seed=0, steps=12)) for arm in PUBLISHED[:2])
    assert diagonal.max_rho < 1 < concat.max_rho
    assert concat.check.holds and diagonal.check.holds
    assert concat.check.state > 100 * diagonal.check.state


def test_the_plan_holds_published_arms_at_four_rates_and_isolated_ones_at_two() -> None:
    runs = full_plan()
    assert len(runs) == len(set(runs)) == (3 * 4 + 2 * 2) * 3
    assert {run.steps for run in runs} == {120}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"seeds": []}, r"seeds must name at least one, each once, got \[\]"),
     ({"seeds": [1, 1]}, r"seeds must name at least one, each once, got \[1, 1\]"),
     ({"seeds": [-1]}, "seeds must be 0 to 2147483647, got -1"),
     ({"learning_rates": [0.0]}, "learning_rates must be above 0 and finite, got 0.0"),
     ({"steps": 0}, "steps must be at least 1, got 0")],
)  # fmt: skip
def test_bad_plans_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(**{"arms": PUBLISHED, "learning_rates": [0.1], **options})


# -- the report


def test_json_holds_both_parts_and_nothing_that_json_cannot(
    forced: dict[float, ForcedRow], outcomes: list[Outcome]
) -> None:
    done = Study(list(forced.values()), outcomes, "minifer parcae stability")
    data = json.loads(json.dumps(as_json(done), allow_nan=False))
    assert [row["rho"] for row in data["forced"]] == list(stability.RADII)
    assert data["forced"][2]["check"]["limit"] == "inf"
    assert [run["injection"] for run in data["sweep"]] == list(KINDS)
    assert all(row["holds"] for row in data["forced"] + data["sweep"])


def test_the_findings_count_what_crossed_and_what_broke(outcomes: list[Outcome]) -> None:
    diagonal, concat, _ = outcomes
    lost = replace(concat.records[0], loss=math.nan)
    broken = replace(concat, max_rho=2.5, check=replace(concat.check, fits=1.1), records=(lost,))
    done = Study([], [diagonal, broken], "")
    assert not done.bound_holds
    said = findings(done)
    assert said[0].startswith("The bound holds in 1 of 2 rows; ") and "110.0%" in said[0]
    assert said[1] == "A loss that is not finite: in 1 of 2 runs."
    assert said[2].startswith("diagonal: ρ passed 1 in 0 of 1 runs; ")
    assert said[3].startswith("concat: ρ passed 1 in 1 of 1 runs (learning rate 0.1); ")


def test_tables_give_median_and_range_of_the_seeds(outcomes: list[Outcome]) -> None:
    one = outcomes[1]
    seeds = [
        replace(one, run=replace(one.run, seed=seed), rho=rho)
        for seed, rho in enumerate((0.5, 7.0, 0.75))
    ]
    done = Study([], seeds, "minifer parcae stability")
    assert "3 steps: median and range of 3 seeds, 0, 1, 2" in tables(done)
    assert "| concat | 0.1 | 0.75 (0.5 – 7) |" in document(done)
    assert "`minifer parcae stability`" in document(done)


def test_the_curves_have_a_line_a_step(outcomes: list[Outcome]) -> None:
    rows = list(csv.DictReader(io.StringIO(curves(outcomes))))
    assert len(rows) == 9 and [row["step"] for row in rows[:3]] == ["1", "2", "3"]
    assert float(rows[4]["rho"]) == pytest.approx(outcomes[1].records[1].rho, rel=1e-5)


def test_a_study_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="runs must name at least one run"):
        study([], forced=False)
