"""`minifer bench scaling`: sweeps over batch, context and queue, with fitted exponents.

Arms take turns (`perf/bench.py`), each an engine of its own. Fits are over the best round of each
size: what disturbs a measurement makes it longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from minifer.perf.bench import BenchmarkResult, run_benchmark
from minifer.perf.scaling import PREPARATION, STAGES, Fit, StepProbe, fit_power
from minifer.weights.resolve import LoadedModel

SHOWN = tuple(stage for stage in STAGES if stage != "model")
BATCH, CONTEXT = 16, 128  # of sweeps over something else
PROFILE_BATCH = 64


@dataclass(frozen=True)
class Series:
    """One thing that grows. name: of its arms. title: a sentence. sizes: its values. metrics: whose
    exponents are wanted."""

    name: str
    title: str
    sizes: tuple[int, ...]
    probe: Callable[[int], StepProbe]
    metrics: tuple[str, ...]

    def arms(self, steps: int) -> Mapping[str, Callable[[], dict[str, float]]]:
        """An arm for each size: a fresh engine, of which only steps are timed."""

        def arm(size: int) -> Callable[[], dict[str, float]]:
            def measure() -> dict[str, float]:
                probe = self.probe(size)
                threads = torch.get_num_threads()
                if not probe.computes:
                    torch.set_num_threads(1)  # `busy_clock` adds up what each of them spins
                try:
                    probe.step()  # code and data are in the caches from here on
                    return probe.take(steps)
                finally:
                    torch.set_num_threads(threads)
                    probe.engine.close()

            return measure

        return {f"{self.name}={size}": arm(size) for size in self.sizes}


@dataclass(frozen=True)
class ScalingReport:
    """series: what was swept. fits: series → metric → fit."""

    result: BenchmarkResult
    series: tuple[Series, ...]
    fits: Mapping[str, Mapping[str, Fit]]

    def best(self, name: str, size: int, metric: str) -> float:
        """Seconds of the best round."""
        return self.result.arms[f"{name}={size}"][metric].min


def measure_scaling(
    loaded: LoadedModel,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    waiting: Sequence[int],
    steps: int = 8,
    runs: int = 3,
    compute: bool = True,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> ScalingReport:
    """All sweeps. compute: whole steps of the real model too. options: fields of `EngineConfig`.

    Raises `ValueError` as `fit_power` does for fewer than three sizes, and for contexts that the
    model does not have.
    """
    longest = loaded.config.max_position_embeddings - steps - 2
    if max(contexts) > longest:
        raise ValueError(
            f"context must be at most {longest} for this model and {steps} steps, got "
            f"{max(contexts)}"
        )
    series = tuple(_series(loaded, batches, contexts, waiting, steps, compute, options))
    arms = {name: arm for one in series for name, arm in one.arms(steps).items()}
    result = run_benchmark("scaling", arms, runs=runs, warmup=0, settings=settings)
    fits = {
        one.name: {
            metric: fit_power(
                one.sizes, [result.arms[f"{one.name}={size}"][metric].min for size in one.sizes]
            )
            for metric in one.metrics
        }
        for one in series
    }
    details = {name: {m: asdict(fit) for m, fit in found.items()} for name, found in fits.items()}
    return ScalingReport(replace(result, details={"fits": details}), series, fits)


def _series(
    loaded: LoadedModel,
    batches: Sequence[int],
    contexts: Sequence[int],
    waiting: Sequence[int],
    steps: int,
    compute: bool,
    options: Mapping[str, Any],
) -> list[Series]:
    def probe(batch: int, context: int, **more: Any) -> StepProbe:
        return StepProbe(loaded, batch, context, steps=steps + 1, **more)

    parts = (*SHOWN, "preparation")
    found = [
        Series(
            "batch",
            f"preparation, requests that decode (context {CONTEXT})",
            tuple(batches),
            lambda size: probe(size, CONTEXT),
            parts,
        ),
        Series(
            "context",
            f"preparation, context of each of {BATCH} requests that decode",
            tuple(contexts),
            lambda size: probe(BATCH, size),
            parts,
        ),
    ]
    for policy in ("fcfs", "priority", "lpm"):
        for blocked in (False, True):
            why = "memory" if blocked else "a seat"

            def queue(size: int, policy: str = policy, blocked: bool = blocked) -> StepProbe:
                return probe(BATCH, CONTEXT, waiting=size, policy=policy, blocked=blocked)

            name = f"waiting, {policy}, for {why}"
            title = f"preparation, requests that wait for {why} ({policy}, {BATCH} decode)"
            found.append(Series(name, title, tuple(waiting), queue, parts))
    if compute:
        title = "whole step of the model,"
        found += [
            Series(
                "step, batch",
                f"{title} requests that decode (context {CONTEXT})",
                tuple(batches),
                lambda size: probe(size, CONTEXT, compute=True, **options),
                ("model", "seconds"),
            ),
            Series(
                "step, context",
                f"{title} context of one request that decodes",
                tuple(contexts),
                lambda size: probe(1, size, compute=True, **options),
                ("model", "seconds"),
            ),
        ]
    return found


def table(report: ScalingReport) -> str:
    """For people: a block a sweep in milliseconds, its exponents below, then the profile."""
    lines = []
    for one in report.series:
        lines += [one.title, f"  {'':>9}" + "".join(f"{metric:>13}" for metric in one.metrics)]
        for size in one.sizes:
            cells = (f"{report.best(one.name, size, metric) * 1e3:13.3f}" for metric in one.metrics)
            lines.append(f"  {size:9,}" + "".join(cells) + "  ms")
        fits = [report.fits[one.name][metric] for metric in one.metrics]
        exponents = "".join(f"{f'{fit.exponent:.2f} ± {fit.error:.2f}':>13}" for fit in fits)
        tails = "".join(f"{fit.tail:13.2f}" for fit in fits)
        lines += [
            f"  {'exponent':>9}{exponents}",
            f"  {'larger':>9}{tails}  of the larger half",
            "",
        ]
    return "\n".join([*lines, *profile(report), "", *report.result.header()])


def profile(report: ScalingReport) -> list[str]:
    """What share of a decode step of the batch nearest 64 each stage takes."""
    sizes = report.series[0].sizes
    size = min(sizes, key=lambda batch: abs(batch - PROFILE_BATCH))
    parts = {stage: report.best("batch", size, stage) for stage in SHOWN}
    whole = None
    if "step, batch" in report.fits:
        whole = report.best("step, batch", size, "seconds")
    lines = [f"profile of a step at batch {size}, context {CONTEXT}"]
    named = [(stage, (stage,)) for stage in SHOWN] + [("preparation", PREPARATION)]
    for label, stages in named:
        seconds = sum(parts[stage] for stage in stages)
        share = f"{seconds / whole:8.2%} of the step" if whole else ""
        lines.append(f"  {label:12}{seconds * 1e3:8.3f} ms{share}")
    if whole:
        lines.append(f"  {'step':12}{whole * 1e3:8.3f} ms")
    return [*lines, ""]
