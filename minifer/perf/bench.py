"""The one way minifer measures: arms that take turns, medians, ratios, and where it ran.

Two arms measured one after the other compare two states of the machine as much as two programs:
clocks, caches and neighbours drift. So every round runs each arm once (A, B, A, B, …), and the
ratio of two arms is the median of the ratios within a round.

Schema of `BenchmarkResult.to_dict` (`schema_version` 1; it grows with any change of meaning)::

    schema_version  1
    name            which benchmark
    started         ISO 8601, UTC
    machine         cpu, cores, threads (torch's, null if it was not loaded), memory_bytes, os,
                    accelerator (null without one)
    versions        python, and every package of minifer's core that is installed
    git             {commit, modified} of the source tree, null outside one; modified is null where
                    only MINIFER_COMMIT names the commit
    settings        what the caller says about the run: model, batch, seed, …
    runs, warmup    rounds that count, and rounds before them
    order           the arms, in the order of a round; the first is the baseline
    arms            arm → metric → {unit, values, median, min, max, iqr}
    ratios          arm → metric → {values, median, min, max, iqr}: arm ÷ baseline, per round;
                    a round whose baseline is 0 has none
    details         what only this benchmark records, such as every request of a load test
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

# One run of one arm. Returns nothing (only its time is wanted), one number, or several by name.
Arm = Callable[[], float | Mapping[str, float] | None]

_PACKAGES = ("minifer", "torch", "triton", "numpy", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Summary:
    """Values in the order of the rounds, and what is said of them. iqr: third − first quartile."""

    values: tuple[float, ...]
    median: float
    min: float
    max: float
    iqr: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        iqr = 0.0
        if len(values) > 1:
            first, _, third = statistics.quantiles(values, n=4, method="inclusive")
            iqr = third - first
        return cls(tuple(values), statistics.median(values), min(values), max(values), iqr)


@dataclass(frozen=True)
class BenchmarkResult:
    """Everything a reader needs to judge a number, and to measure it again."""

    name: str
    started: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    git: Mapping[str, Any] | None
    settings: Mapping[str, Any]
    runs: int
    warmup: int
    units: Mapping[str, str]
    arms: Mapping[str, Mapping[str, Summary]]
    ratios: Mapping[str, Mapping[str, Summary]] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, see the schema at the top of this file."""
        out = asdict(self)
        units = out.pop("units")
        for metrics in out["arms"].values():
            for metric, summary in metrics.items():
                metrics[metric] = {"unit": units.get(metric, ""), **summary}
        return {"schema_version": SCHEMA_VERSION, **out, "order": list(self.arms)}

    def write(self, path: str | Path) -> None:
        """One JSON file."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def table(self) -> str:
        """For people: a line an arm and metric, and the machine below."""
        rows: list[tuple[str, ...]] = [
            ("arm", "metric", "median", "IQR", "min", "max", "unit", "vs. baseline")
        ]
        for arm, metrics in self.arms.items():
            for metric, s in metrics.items():
                ratio = self.ratios.get(arm, {}).get(metric)
                numbers = (f"{x:.4g}" for x in (s.median, s.iqr, s.min, s.max))
                versus = f"{ratio.median:.3g}× ± {ratio.iqr / 2:.2g}" if ratio else ""
                rows.append((arm, metric, *numbers, self.units.get(metric, ""), versus))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if 2 <= i < 6 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", *self.header()])

    def header(self) -> list[str]:
        """Machine, versions, commit and settings: what somebody needs to measure it again."""
        machine, git = self.machine, self.git
        commit = "no git"
        if git is not None:
            commit = git["commit"][:12] + (" (modified)" if git["modified"] else "")
        memory = machine["memory_bytes"]
        where = [
            machine.get("accelerator") or machine["cpu"],
            f"{machine['cores']} cores",
            f"{memory / 2**30:.0f} GiB" if memory else "",
            machine["os"],
        ]
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        settings = ", ".join(f"{key} {in_words(value)}" for key, value in self.settings.items())
        return [
            f"machine   {', '.join(part for part in where if part)}",
            f"versions  {versions}; commit {commit}",
            f"settings  {settings or 'none'}",
            f"rounds    {self.runs}, after {self.warmup} that do not count; arms in turns",
        ]


def in_words(value: Any) -> str:
    """A setting on one line: `a=1 b=2` of a mapping, `1,2` of a list."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={in_words(inner)}" for key, inner in value.items()) or "default"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)


def run_benchmark(
    name: str,
    arms: Mapping[str, Arm],
    *,
    runs: int = 5,
    warmup: int = 1,
    units: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchmarkResult:
    """Run every arm `warmup + runs` times, taking turns; the first arm is the baseline.

    The metric "seconds", measured around each call by `clock`, is always there; an arm that
    returns a number adds "value", one that returns a mapping adds its entries ("seconds" among
    them replaces the measured one: an arm may leave preparation out). units: of metrics.
    settings: recorded as they are, the seeds among them.

    Raises `ValueError`: no arms, runs < 1, warmup < 0, a value that is not finite, an arm whose
    metrics differ from round to round.
    """
    if not arms:
        raise ValueError("arms must hold at least one arm, got none")
    if runs < 1 or warmup < 0:
        raise ValueError(f"runs must be at least 1 and warmup at least 0, got {runs} and {warmup}")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    rounds: list[dict[str, dict[str, float]]] = [
        {arm: _measure(arm, call, clock) for arm, call in arms.items()}
        for _ in range(warmup + runs)
    ][warmup:]
    measured = {arm: _columns(arm, [r[arm] for r in rounds]) for arm in arms}
    baseline, *others = arms
    return BenchmarkResult(
        name=name,
        started=started,
        machine=machine(),
        versions=versions(),
        git=git_state(),
        settings=dict(settings or {}),
        runs=runs,
        warmup=warmup,
        units={"seconds": "s", **(units or {})},
        arms={
            arm: {metric: Summary.of(values) for metric, values in metrics.items()}
            for arm, metrics in measured.items()
        },
        ratios={arm: _ratios(measured[arm], measured[baseline]) for arm in others},
    )


def _measure(arm: str, call: Arm, clock: Callable[[], float]) -> dict[str, float]:
    start = clock()
    returned = call()
    metrics = {"seconds": clock() - start}
    if isinstance(returned, Mapping):
        metrics.update(returned)
    elif returned is not None:
        metrics["value"] = returned
    for metric, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"{metric} of arm {arm!r} must be finite, got {value}")
    return metrics


def _columns(arm: str, rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    for metrics in rounds:
        if metrics.keys() != rounds[0].keys():
            raise ValueError(
                f"arm {arm!r} must return the same metrics each time, got "
                f"{', '.join(sorted(rounds[0]))} and then {', '.join(sorted(metrics))}"
            )
    return {metric: [metrics[metric] for metrics in rounds] for metric in rounds[0]}


def _ratios(
    arm: Mapping[str, Sequence[float]], baseline: Mapping[str, Sequence[float]]
) -> dict[str, Summary]:
    ratios = {
        metric: [a / b for a, b in zip(arm[metric], baseline[metric], strict=True) if b]
        for metric in arm
        if metric in baseline
    }
    return {metric: Summary.of(values) for metric, values in ratios.items() if values}


def machine() -> dict[str, Any]:
    """What the numbers were measured on. Asks torch only if somebody has imported it."""
    torch = sys.modules.get("torch")
    accelerator = None
    if torch is not None and torch.cuda.is_available():
        accelerator = torch.cuda.get_device_name()
    return {
        "cpu": _cpu_name(),
        "cores": _cores(),
        "threads": torch.get_num_threads() if torch is not None else None,
        "memory_bytes": _memory_bytes(),
        "os": platform.platform(terse=True),
        "accelerator": accelerator,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores this process may use: a container often gets fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None  # Windows has no sysconf


def versions() -> dict[str, str]:
    """Python and the installed packages of minifer's core, without importing any."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state(folder: str | Path | None = None) -> dict[str, Any] | None:
    """Commit of a source tree (this package's by default) and whether it was modified.

    A copy of this package without its repository has the commit that MINIFER_COMMIT names.
    """
    where = Path(folder) if folder is not None else Path(__file__).parent

    def git(*args: str) -> str:
        command = ["git", "-C", str(where), *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):  # no git, or no repository
        named = os.environ.get("MINIFER_COMMIT") if folder is None else None
        return {"commit": named, "modified": None} if named else None
