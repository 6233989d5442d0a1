"""Scaling laws as plain values: committed lab results, data with known exponents, resampling."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import minifer
from minifer.parcae.costs import decode_cost, kv_bytes_per_token, parameters
from minifer.parcae.lab.laws.counter_evidence import PHI, equivalent_parameters
from minifer.parcae.lab.laws.depth_law import DepthCurve, DepthJob
from minifer.parcae.lab.laws.fits import PowerLaw, fit_log_parabola, fit_power_law
from minifer.parcae.lab.laws.flops import training_flops
from minifer.parcae.lab.laws.isoflop import IsoFlopJob, IsoFlopPoint
from minifer.parcae.lab.laws.training_law import training_loss
from minifer.parcae.presets import PRESETS
from minifer.perf.costs import StepCost
from minifer.perf.devices import Device

T = TypeVar("T")


@cache
def lab_results(name: str) -> Mapping[str, Any]:
    """`lectures/results/NAME.json`, as committed. Raises `FileNotFoundError` where it is not."""
    clone = Path(minifer.__file__).resolve().parent.parent / "lectures"
    for folder in (Path("results"), clone / "results"):
        if (path := folder / f"{name}.json").is_file():
            found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
    raise FileNotFoundError(
        f"results/{name}.json is neither in the current folder nor in {clone}: run this lecture in "
        "a clone, from the folder lectures"
    )


def lab_points() -> list[IsoFlopPoint]:
    """The lab's iso-FLOP experiment: 3 budgets, 4 depths, 3 seeds."""
    return [
        IsoFlopPoint(
            IsoFlopJob(point["budget"], point["mu"], point["seed"]),
            *(point[name] for name in ("loss", "tokens", "flops", "cpu_seconds")),
        )
        for point in lab_results("parcae_laws")["isoflop"]["points"]
    ]


def lab_curves() -> list[DepthCurve]:
    """The lab's losses by depth: 8 ways to draw depth in training, 3 seeds."""
    return [
        DepthCurve(
            DepthJob(curve["depth"], curve["mu"], curve["seed"], curve["steps"]),
            tuple(curve["losses"]),
            curve["cpu_seconds"],
        )
        for curve in lab_results("parcae_laws")["test_time"]["curves"]
    ]


# -- reading curves


def iso_parameter(size: str, mus: Sequence[float], tokens: float) -> list[float]:
    """The reported law's losses at equal parameters and equal tokens."""
    return [training_loss(mu, tokens, size) for mu in mus]


def iso_flop(size: str, mus: Sequence[float], budget: float) -> list[float]:
    """The same at equal training FLOPs: a deeper model gets fewer tokens."""
    costs = [training_flops(PRESETS[size], mu, backward=max(1.0, mu / 2)) for mu in mus]
    return [training_loss(mu, budget / c, size) for mu, c in zip(mus, costs, strict=True)]


# -- data with known exponents


@dataclass(frozen=True)
class Experiment:
    """An iso-FLOP experiment. losses: one list a budget, one value a depth."""

    budgets: tuple[float, ...]
    mus: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]

    def minima(self) -> list[float]:
        """μ* of each budget: the vertex of a parabola in log μ."""
        return [fit_log_parabola(self.mus, losses).best for losses in self.losses]

    def law(self) -> PowerLaw:
        """μ* ∝ C^p through the minima."""
        return fit_power_law(self.budgets, self.minima())


BUDGETS = (1e18, 2e18, 4e18, 8e18, 16e18, 64e18)  # those of https://arxiv.org/abs/2604.12946
MUS = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0)


def generated(exponent: float, noise: float, seed: int) -> Experiment:
    """Losses of which we know the truth: the best depth is 2 (C / C₀)^exponent, by construction.

    noise: standard deviation of each loss, in nats.
    """
    draw = random.Random(seed)
    rows = []
    for budget in BUDGETS:
        growth = math.log(budget / BUDGETS[0])
        best = math.log(2) + exponent * growth
        level = 3.4 - 0.1 * growth
        rows.append(
            tuple(level + 0.03 * (math.log(mu) - best) ** 2 + draw.gauss(0, noise) for mu in MUS)
        )
    return Experiment(BUDGETS, MUS, tuple(rows))


def line_fit(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p that least squares finds for c · x^p *without* logarithms: a grid over p."""

    def error(p: float) -> float:
        powers = [value**p for value in x]
        c = sum(a * b for a, b in zip(powers, y, strict=True)) / sum(a * a for a in powers)
        return sum((c * a - b) ** 2 for a, b in zip(powers, y, strict=True))

    return min((i / 1000 for i in range(-200, 1201)), key=error)


# -- how sure is a fit?


def resampled(values: Sequence[T], times: int, seed: int = 0) -> list[list[T]]:
    """Bootstrap: `times` lists as long as `values`, drawn from them with replacement."""
    draw = random.Random(seed)
    return [draw.choices(values, k=len(values)) for _ in range(times)]


def band(values: Sequence[float], level: float = 0.9) -> tuple[float, float]:
    """The middle `level` of some values: what is cut off is equal on both sides."""
    ordered, cut = sorted(values), (1 - level) / 2
    last = len(ordered) - 1
    return ordered[round(cut * last)], ordered[round((1 - cut) * last)]


def exponent_band(points: Sequence[tuple[float, float]], times: int = 400) -> tuple[float, float]:
    """90 % of the exponents of resampled points (x, y) of at least two different x."""
    draws = [draw for draw in resampled(points, times) if len({x for x, _ in draw}) > 1]
    return band([fit_power_law(*zip(*draw, strict=True)).exponent for draw in draws])


# -- what a loop is worth, and what it costs


@dataclass(frozen=True)
class Worth:
    """A loop model at r loops, without its tables and its head, in units of itself at one loop.

    quality: parameters of the plain model that is as good. held: bytes in memory. resident, read:
    weight bytes a token with the core kept on the chip, and read again each loop. flops.
    """

    loops: int
    quality: float
    held: float
    resident: float
    read: float
    flops: float


def worth(size: str, loops: Sequence[int], phi: float = PHI) -> list[Worth]:
    """By the reported exponent phi of https://arxiv.org/abs/2604.21106, and the cost model."""
    config = PRESETS[size]
    held = parameters(config)
    once = held.prelude + held.coda + held.adapter + held.readout
    rows = []
    for r in loops:
        kept = _core_and_stacks(decode_cost(config, r, core_resident=True))
        read = _core_and_stacks(decode_cost(config, r))
        plain = _core_and_stacks(decode_cost(config, 1))
        quality = equivalent_parameters(once, held.core, r, phi) / (once + held.core)
        relative = [kept[0] / plain[0], read[0] / plain[0], read[1] / plain[1]]
        rows.append(Worth(r, quality, 1.0, *relative))
    return rows


_PARTS = ("prelude", "injection", "core", "readout", "coda")


def _core_and_stacks(cost: StepCost) -> tuple[float, float]:
    """(weight bytes, FLOPs) without head and tables, which no loop changes."""
    parts = [cost[name] for name in _PARTS]
    return sum(part.weight_bytes for part in parts), sum(part.flops for part in parts)


@dataclass(frozen=True)
class Serving:
    """A decoded token at T loops. seconds: the roofline's floor. kv: bytes it leaves behind."""

    loops: int
    bytes: float
    seconds: float
    joules: float
    kv: float


def serving(
    size: str, device: Device, loops: Sequence[int], context: int, *, resident: bool = False
) -> list[Serving]:
    """One request alone, modelled. joules: at the chip's full power."""
    config, rows = PRESETS[size], []
    for count in loops:
        cost = decode_cost(config, count, context=context, core_resident=resident).total()
        seconds = device.seconds(cost.flops, cost.bytes)
        kv = kv_bytes_per_token(config, count)
        rows.append(Serving(count, cost.bytes, seconds, device.power_watts * seconds, kv))
    return rows


def measured_depths() -> tuple[dict[int, float], dict[int, float], tuple[float, float]]:
    """Of parcae-tiny, as the lab measured it: loss by depth, milliseconds a token by depth, and the
    line through them, (fixed, a loop). A depth that was not timed costs what the line says."""
    found = lab_results("parcae_tradeoff")
    losses = {int(row["name"].split()[1]): row["loss"] for row in found["depths"]}
    costs = {
        int(row["name"].split()[1]): 1e3 / row["single"]["tokens_per_second"]
        for row in found["tradeoff"]
        if row["name"].startswith("depth ")
    }
    loop, fixed = (float(value) for value in np.polyfit(list(costs), list(costs.values()), 1))
    by_line = {depth: fixed + loop * depth for depth in losses}
    return losses, by_line | costs, (fixed, loop)


def cheapest(costs: Mapping[int, float], losses: Mapping[int, float], limit: float) -> int | None:
    """The depth of the lowest loss among those that cost at most `limit`; the fewest loops of
    equals; None if none is cheap enough."""
    allowed = [depth for depth in sorted(costs) if costs[depth] <= limit]
    return min(allowed, key=lambda depth: losses[depth], default=None)
