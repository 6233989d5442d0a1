"""The stability experiments as data, and the sentences that the numbers allow.

`study` runs both parts. `as_json` is what is kept of it, `curves` every training step as CSV;
`minifer.parcae.lab.stability.tables` writes it for people.
"""

from __future__ import annotations

import csv
import io
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from datetime import date
from typing import Any

import torch

from minifer import __version__
from minifer.parcae.lab.pool import one_thread, run_all
from minifer.parcae.lab.stability.forced import BoundCheck, ForcedRow, forced_radius
from minifer.parcae.lab.stability.sweep import Outcome, Run, train_run
from minifer.parcae.train import StepRecord


@dataclass(frozen=True)
class Study:
    """What was run. forced or outcomes may be empty: that part was not asked for."""

    forced: Sequence[ForcedRow]
    outcomes: Sequence[Outcome]
    command: str

    @property
    def checks(self) -> list[BoundCheck]:
        return [row.check for row in self.forced] + [o.check for o in self.outcomes]

    @property
    def bound_holds(self) -> bool:
        return all(check.holds for check in self.checks)


def study(
    runs: Sequence[Run],
    *,
    forced: bool = True,
    command: str = "",
    jobs: int = 1,
    done: Callable[[Run], None] = lambda run: None,
) -> Study:
    """The forced part if asked for, and all runs, on `jobs` processes. done: called as each ends.

    Raises `ValueError` for jobs below 1, or nothing to do.
    """
    if not forced and not runs:
        raise ValueError("runs must name at least one run where the forced part is left out")
    with one_thread():
        rows = forced_radius() if forced else []
    return Study(rows, run_all(train_run, runs, jobs, done), command)


def as_json(done: Study) -> dict[str, Any]:
    """Everything but the curves, ready for `json.dumps`; six digits, infinity as "inf"."""
    return {
        "what": "stability of loop models on a CPU: a forced and a learned spectral radius",
        "command": done.command,
        "date": date.today().isoformat(),
        "versions": {
            "minifer": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "units": "norms are Euclidean, of a token's vector; losses in nats a character",
        "forced": [_plain(asdict(row) | {"holds": row.check.holds}) for row in done.forced],
        "sweep": [_plain(_flat(outcome)) for outcome in done.outcomes],
        "findings": findings(done),
    }


def _flat(outcome: Outcome) -> dict[str, Any]:
    run = outcome.run
    kept = {key: value for key, value in vars(outcome).items() if key not in ("run", "records")}
    return {
        "injection": run.arm.injection,
        "prelude_norm": run.arm.prelude_norm,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "steps": run.steps,
        **kept,
        "check": asdict(outcome.check),
        "holds": outcome.check.holds,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def curves(outcomes: Sequence[Outcome]) -> str:
    """CSV, a line a step of every run."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [field.name for field in fields(StepRecord)]
    writer.writerow(["injection", "prelude_norm", "peak_learning_rate", "seed", *names])
    for outcome in outcomes:
        run = outcome.run
        key = (run.arm.injection, run.arm.prelude_norm, run.learning_rate, run.seed)
        for record in outcome.records:
            numbers = _plain(astuple(record))
            writer.writerow([*key, *numbers])
    return file.getvalue()


def findings(done: Study) -> list[str]:
    """What these numbers say, a sentence each."""
    checks = done.checks
    broken = sum(not check.holds for check in checks)
    worst = max(max(check.fits, check.fits_by_weights) for check in checks)
    said = [
        f"The bound holds in {len(checks) - broken} of {len(checks)} rows; the state that comes "
        f"closest reaches {worst:.1%} of its bound."
    ]
    if done.forced:
        met = [row.block for row in done.forced]
        said.append(
            f"Forced: mean ‖R̄‖ is {min(met):.2f} to {max(met):.2f} whatever ρ is, while ‖h_64‖ "
            f"goes from {short(done.forced[0].norms[-1])} to {short(done.forced[-1].norms[-1])}."
        )
    if done.outcomes:
        said += _sweep_findings(done.outcomes)
    return said


def _sweep_findings(outcomes: Sequence[Outcome]) -> list[str]:
    lost = sum(not all(math.isfinite(r.loss) for r in outcome.records) for outcome in outcomes)
    said = [f"A loss that is not finite: in {lost} of {len(outcomes)} runs."]
    for arm in dict.fromkeys(outcome.run.arm for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.run.arm == arm]
        if arm.injection == "add":
            said.append(f"{arm.name}: ρ is 1, max ‖h_T‖ {short(_largest(mine))}.")
            continue
        crossed = [outcome for outcome in mine if outcome.max_rho > 1]
        rates = sorted({outcome.run.learning_rate for outcome in crossed})
        said.append(
            f"{arm.name}: ρ passed 1 in {len(crossed)} of {len(mine)} runs"
            + (f" (learning rate {', '.join(map(str, rates))})" if crossed else "")
            + f"; largest ρ {short(max(o.max_rho for o in mine))}, max ‖h_T‖ "
            f"{short(_largest(mine))}."
        )
    return said


def _largest(outcomes: Sequence[Outcome]) -> float:
    return max(outcome.max_state_norm for outcome in outcomes)


def short(value: float) -> str:
    """Three digits."""
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
