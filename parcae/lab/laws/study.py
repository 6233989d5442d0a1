"""Everything `minifer parcae laws` says, as one dictionary that JSON holds.

`test_time`, `depth_task` and `isoflop` are measured here; `training` is what was published, what
follows from it, and what speaks against it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

from minifer import __version__
from minifer.parcae.lab import tasks
from minifer.parcae.lab.laws import counter_evidence, depth_law, depth_task, isoflop
from minifer.parcae.lab.laws import training_law as law
from minifer.parcae.lab.laws.fits import FORMS
from minifer.parcae.lab.laws.flops import public_script_flops, training_flops
from minifer.parcae.lab.pool import run_all
from minifer.parcae.presets import PRESETS
from minifer.perf.bench import machine, versions

PARTS = ("test-time", "training", "isoflop", "depth-task")
SEEDS = (0, 1, 2)
COUNTED_MUS = (1, 2, 4, 8, 12)

Job = depth_task.TaskJob | depth_law.DepthJob | isoflop.IsoFlopJob
Result = depth_task.TaskResult | depth_law.DepthCurve | isoflop.IsoFlopPoint


def plan(parts: Sequence[str], seeds: Sequence[int], quick: bool) -> list[Job]:
    """The trainings of the parts. quick: a few steps of everything, to see that it runs.

    Raises `ValueError` for a part that is none, no seed, or one that is negative, twice there or
    above 2³¹ − 1.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
    if not seeds or min(seeds) < 0 or max(seeds) >= 2**31 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different integers, 0 to {2**31 - 1}, got {list(seeds)}")
    made: list[Job] = []
    if "depth-task" in parts:  # first: these take longest
        made += [depth_task.TaskJob(seed, 2 if quick else None) for seed in seeds]
    if "test-time" in parts:
        settings = (("poisson", 8), ("constant", 8)) if quick else depth_law.SETTINGS
        made += depth_law.jobs(settings, seeds, steps=3 if quick else 250)
    if "isoflop" in parts:
        if quick:
            made += isoflop.jobs((2e8, 4e8), (1, 2, 4), seeds)
        else:
            made += isoflop.jobs(seeds=seeds)
    return made


def study(
    parts: Sequence[str] = PARTS,
    *,
    seeds: Sequence[int] = SEEDS,
    quick: bool = False,
    workers: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train what the parts need, on `workers` processes, and say what it shows.

    progress: called after each training. Raises `ValueError` as `plan`, and for workers below 1.
    """
    jobs = plan(parts, seeds, quick)
    started, clock = datetime.now(UTC), time.perf_counter()
    results = run_all(_run, jobs, workers, lambda job: progress())
    data: dict[str, Any] = {
        "started": started.isoformat(timespec="seconds"),
        "versions": {"minifer": __version__, **versions()},
        "machine": machine() | {"threads": 1, "processes": workers},
        "seeds": list(seeds),
        "quick": quick,
        "trainings": len(jobs),
        "cpu_seconds": round(sum(result.cpu_seconds for result in results), 1),
    }
    if "test-time" in parts:
        data["test_time"] = test_time([r for r in results if isinstance(r, depth_law.DepthCurve)])
    if "training" in parts:
        data["training"] = training()
    if "isoflop" in parts:
        data["isoflop"] = isoflops([r for r in results if isinstance(r, isoflop.IsoFlopPoint)])
    if "depth-task" in parts:
        data["depth_task"] = task([r for r in results if isinstance(r, depth_task.TaskResult)])
    data["seconds"] = round(time.perf_counter() - clock, 1)
    return data


def _run(job: Job) -> Result:
    if isinstance(job, depth_task.TaskJob):
        return depth_task.run(job)
    if isinstance(job, isoflop.IsoFlopJob):
        return isoflop.run(job)
    return depth_law.run(job)


def test_time(curves: Sequence[depth_law.DepthCurve]) -> dict[str, Any]:
    """Measured: every curve with its fits, and the curves of a setting together."""
    return {
        "source": "measured here",
        "depths": list(depth_law.DEPTHS),
        "formulas": {form: FORMS[form].formula for form in depth_law.COMPARED},
        "curves": [
            {
                **asdict(curve.job),
                "losses": [round(loss, 5) for loss in curve.losses],
                "cpu_seconds": round(curve.cpu_seconds, 2),
                "fits": {
                    form: {
                        "floor": found.fit.floor,
                        "scale": found.fit.scale,
                        "z": found.fit.z,
                        "determined": found.fit.determined,
                        "rmse": found.fit.rmse,
                        "huber_1e-7": found.huber,
                        "beyond": found.beyond,
                        "seen": None if found.seen is None else asdict(found.seen),
                    }
                    for form, found in depth_law.fit_forms(curve).items()
                },
            }
            for curve in curves
        ],
        "groups": [asdict(group) for group in depth_law.group(curves)],
    }


def training() -> dict[str, Any]:
    """Reported by the paper and others, and computed from that."""
    both = {"": training_flops, "_public_script": public_script_flops}
    return {
        "source": law.SOURCE,
        "laws": {size: asdict(found) for size, found in law.LAWS.items()},
        "held_out": {
            size: {"predicted": predicted, "reported": reported, "error": error}
            for size, (predicted, reported, error) in law.held_out_errors().items()
        },
        "mu_exponent": law.MU_EXPONENT,
        "tokens_exponent": law.TOKENS_EXPONENT,
        "implied_tokens_exponent": {
            size: {
                "corrected": law.implied_tokens_exponent(size),
                "public_script": law.implied_tokens_exponent(size, script=True),
            }
            for size in law.LAWS
        },
        "best_recurrence": {
            size: {
                f"{row.budget:g}": {
                    "law": law.best_recurrence(row.budget, size)[0],
                    "table": row.mu,
                }
                for row in law.ISOFLOP_ROWS
                if row.size == size
            }
            for size in law.LAWS
        },
        "flops_per_token": {
            size: {
                f"{mu}{name}": count(PRESETS[size], mu)
                for name, count in both.items()
                for mu in COUNTED_MUS
            }
            for size in PRESETS
            if size != "parcae-tiny"
        },
        "flops_ratio_8_to_1": {
            size: {
                "corrected": _ratio(partial(training_flops, PRESETS[size])),
                "hoisted": _ratio(partial(training_flops, PRESETS[size], hoisted=True)),
                "public_script": _ratio(partial(public_script_flops, PRESETS[size])),
            }
            for size in PRESETS
            if size != "parcae-tiny"
        },
        "comparisons": [asdict(row) for row in law.COMPARISONS],
        "isoflop_rows": [asdict(row) for row in law.ISOFLOP_ROWS],
        "forms_huber_1e-7": {form: dict(row) for form, row in law.PUBLISHED_FORMS.items()},
        "counter_evidence": _counter_evidence(),
    }


def _ratio(count: Callable[[float], float]) -> float:
    return count(8) / count(1)


def _counter_evidence() -> Mapping[str, Any]:
    recurrent = counter_evidence.split_from(410e6, 580e6, 4)
    return {
        "phi": counter_evidence.PHI,
        "phi_interval": list(counter_evidence.PHI_INTERVAL),
        "phi_truncated": counter_evidence.PHI_TRUNCATED,
        "phi_hyper_connections": counter_evidence.PHI_HYPER_CONNECTIONS,
        "source": counter_evidence.RECURRENCE_SOURCE,
        "looped_410m_at_4": {
            "behaves_like": 580e6,
            "costs_like_reported": 1e9,
            "costs_like_computed": 410e6 + 3 * recurrent,
        },
        "depth_curves": [
            asdict(evidence) | {"by_depth": {str(k): v for k, v in evidence.by_depth.items()}}
            for evidence in counter_evidence.DEPTH_CURVES
        ],
        "rows_that_lose": [asdict(row) for row in counter_evidence.rows_that_lose()],
    }


def isoflops(points: Sequence[isoflop.IsoFlopPoint]) -> dict[str, Any]:
    """Measured: every point, and each budget's parabola."""
    budgets = isoflop.by_budget(points)
    found = isoflop.scaling(budgets)
    return {
        "source": "measured here; noisy",
        "points": [
            {
                **asdict(point.job),
                "loss": round(point.loss, 5),
                "tokens": point.tokens,
                "flops": point.flops,
                "cpu_seconds": round(point.cpu_seconds, 2),
            }
            for point in points
        ],
        "budgets": [asdict(budget) | {"best": budget.best} for budget in budgets],
        "mu_exponent": None if found is None else found.exponent,
    }


def task(results: Sequence[depth_task.TaskResult]) -> dict[str, Any]:
    """Measured: accuracy at every depth and number of hops, each seed and together."""
    return {
        "source": "measured here",
        "depths": list(depth_task.DEPTHS),
        "recipe": asdict(tasks.RECIPE)
        | {"width": tasks.WIDTH, "layers": list(tasks.LAYERS), "start_symbol": True},
        "right": depth_task.RIGHT,
        "nearly_all": depth_task.NEARLY_ALL,
        "runs": [
            {
                "seed": result.job.seed,
                "steps": result.job.steps or tasks.RECIPE.steps,
                "accuracy": result.accuracy,
                "cpu_seconds": round(result.cpu_seconds, 2),
            }
            for result in results
        ],
        **asdict(depth_task.summarise(results)),
    }
