"""Tests of exercises 14: laws against the lab's fits, and an engine against the model alone.

The capstone's parts are compared with others written for these tests: storage in a dictionary, a
cache in lists, a plan by the rules. Its replies are compared with whole sequences without a cache.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from minifer.course.grading import compare, points, probe, unchanged
from minifer.course.loop_model import LoopModel, Parts, random_parcae
from minifer.execution.attention import chunk_attention
from minifer.execution.backend import TorchBackend
from minifer.execution.reference import sequence_batch
from minifer.loops import LoopConfig
from minifer.parcae.lab.laws.fits import fit_log_parabola
from minifer.parcae.lab.laws.fits import fit_power_law as lab_power_law
from minifer.weights.resolve import load_model

ALLOWED_IMPORTS = ("minifer.course.loop_model",)
PARCAE_TINY = load_model(
    "parcae-tiny", dtype="float32"
).model  # while files may be read


def demand(holds: bool, tried: str, expected: str) -> None:
    """For what is true or not: the message says what was wanted, not "expected True"."""
    if not holds:
        raise AssertionError(f"tried     {tried}\nexpected  {expected}")


def refuses(call: Callable[[], Any], tried: str) -> None:
    try:
        got = call()
    except ValueError:
        return
    raise AssertionError(f"tried     {tried}\ngot       {got!r}\nexpected  ValueError")


# -- 14.1


def noisy_powers(rng: random.Random, count: int) -> tuple[list[float], list[float]]:
    exponent, coefficient = rng.uniform(-0.6, 0.9), rng.uniform(0.2, 5)
    x = sorted(10 ** rng.uniform(0, 4) for _ in range(count))
    return x, [
        coefficient * value**exponent * math.exp(rng.gauss(0, 0.3)) for value in x
    ]


@points("14.1", 2)
def test_ex14_1_a_power_law_is_a_line_in_logarithms(target: Any, rng: Any) -> None:
    tried = "fit_power_law([1.0, 4.0, 16.0], [2.0, 4.0, 8.0])"
    got = target.fit_power_law([1.0, 4.0, 16.0], [2.0, 4.0, 8.0])
    compare(got, (2.0, 0.5), tried, atol=1e-9)
    for count in (2, 3, 6, 20):
        x, y = noisy_powers(rng, count)
        law = lab_power_law(x, y)
        tried = f"fit_power_law(x={x}, y={y})"
        with unchanged(tried, x=x, y=y):
            got = target.fit_power_law(x, y)
        compare(got, (law.coefficient, law.exponent), tried, rtol=1e-7, atol=1e-9)


RATES = [0.1, 0.25, 0.4, 0.55, math.log(2), 0.9, 1.3]


def saturating(rng: random.Random, noise: float) -> tuple[list[float], list[float]]:
    depths = [float(T) for T in (1, 2, 3, 4, 6, 8, 12, 16)]
    floor, scale, rate = rng.uniform(1, 3), rng.uniform(0.5, 2), rng.choice(RATES[1:])
    losses = [floor + scale * math.exp(-rate * T) + rng.gauss(0, noise) for T in depths]
    order = rng.sample(range(len(depths)), len(depths))
    return [depths[i] for i in order], [losses[i] for i in order]


def true_saturation(
    depths: Sequence[float], losses: Sequence[float], rates: Sequence[float]
) -> tuple[float, float, float]:
    """By the normal equations, in closed form."""
    found = []
    for rate in rates:
        x = [math.exp(-rate * T) for T in depths]
        mean_x, mean_y = statistics.fmean(x), statistics.fmean(losses)
        cross = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, losses, strict=True))
        scale = cross / sum((a - mean_x) ** 2 for a in x)
        floor = mean_y - scale * mean_x
        pairs = zip(x, losses, strict=True)
        found.append(
            (sum((floor + scale * a - b) ** 2 for a, b in pairs), floor, scale, rate)
        )
    _, floor, scale, rate = min(found)
    return floor, scale, rate


@points("14.1", 1)
def test_ex14_1_a_saturation_has_the_best_rate_of_the_list(
    target: Any, rng: Any
) -> None:
    tried = "fit_saturation([1, 2, 3, 4], [2.5, 2.25, 2.125, 2.0625], [0.5, ln 2, 1])"
    rates = [0.5, math.log(2), 1.0]
    got = target.fit_saturation([1.0, 2.0, 3.0, 4.0], [2.5, 2.25, 2.125, 2.0625], rates)
    compare(got, (2.0, 1.0, math.log(2)), tried, atol=1e-9)
    for noise in (1e-4, 0.02, 0.05):
        depths, losses = saturating(rng, noise)
        tried = f"fit_saturation(depths={depths}, losses={losses}, rates={RATES})"
        with unchanged(tried, depths=depths, losses=losses):
            got = target.fit_saturation(depths, losses, RATES)
        compare(
            got, true_saturation(depths, losses, RATES), tried, atol=1e-7, rtol=1e-6
        )
    depths, losses = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0], [2.65, 2.2, 2.28, 2.21, 2.07, 1.95]
    rates = [0.25, 0.5, 1.0]  # the best by the sum of errors, of squares, by the worst
    tried = f"fit_saturation(depths={depths}, losses={losses}, rates={rates}) → rate"
    compare(target.fit_saturation(depths, losses, rates)[2], 0.5, tried)


def on_curve(fit: Sequence[float], depth: float) -> float:
    return fit[0] + fit[1] * math.exp(-fit[2] * depth)


@points("14.1", 2)
def test_ex14_1_the_hidden_points_are_hidden_from_the_fit(
    target: Any, rng: Any
) -> None:
    for noise, seen in ((0.02, 3.0), (0.02, 4.0), (0.05, 8.0), (0.05, 12.0)):
        depths, losses = saturating(rng, noise)
        pairs = list(zip(depths, losses, strict=True))
        known = [pair for pair in pairs if pair[0] <= seen]
        fit = true_saturation(*zip(*known, strict=True), RATES)
        worst = max(abs(on_curve(fit, T) - L) for T, L in set(pairs) - set(known))
        tried = f"hidden_error(depths={depths}, losses={losses}, seen={seen}, rates={RATES})"
        with unchanged(tried, depths=depths, losses=losses):
            got = target.hidden_error(depths, losses, seen, RATES)
        compare(got, worst, tried, atol=1e-7, rtol=1e-5)
    depths, losses = [1.0, 2.0, 3.0], [2.6, 2.3, 2.31]
    fit = true_saturation(depths, losses, RATES)
    for depth, off in ((4.0, 0.001), (6.0, -0.002)):  # nearer than what was fitted
        depths.append(depth)
        losses.append(on_curve(fit, depth) + off)
    tried = f"hidden_error(depths={depths}, losses={losses}, seen=3.0, rates={RATES})"
    got = target.hidden_error(depths, losses, 3.0, RATES)
    compare(got, 0.002, tried, atol=1e-7, rtol=1e-5)


# -- 14.2


def true_best(mus: Sequence[float], losses: Sequence[float]) -> float | None:
    fit = fit_log_parabola(mus, losses)
    return fit.best if fit.inside else None


def clear_case(mus: Sequence[float], losses: Sequence[float]) -> bool:
    """Neither flat nor with a lowest point at the very edge, where rounding decides."""
    fit = fit_log_parabola(mus, losses)
    if abs(fit.curvature) < 1e-3:
        return False
    return all(abs(math.log(fit.best / edge)) > 1e-3 for edge in (min(mus), max(mus)))


def valley(rng: random.Random, mus: Sequence[float], noise: float) -> list[float]:
    best = math.log(rng.uniform(0.7, 12))
    return [2 + 0.1 * (math.log(mu) - best) ** 2 + rng.gauss(0, noise) for mu in mus]


@points("14.2", 2)
def test_ex14_2_a_best_depth_is_a_lowest_point_inside(target: Any, rng: Any) -> None:
    mus = [1.0, 2.0, 4.0]
    cases: list[tuple[list[float], list[float]]] = [
        (mus, [2.0, 1.0, 2.0]), (mus, [1.0, 2.0, 3.5]), (mus, [3.5, 2.0, 1.0]),
        (mus, [1.0, 2.0, 1.0]), (mus, [1.0, 1.1, 1.0]), ([8.0, 1.0, 2.0, 4.0], [1.5, 2.0, 1.2, 1.1]),
    ]  # fmt: skip
    for _ in range(20):
        order = rng.sample([1.0, 2.0, 4.0, 6.0, 8.0, 10.0], rng.randint(3, 6))
        cases.append((order, valley(rng, order, 0.02)))
    for mus, losses in cases:
        if clear_case(mus, losses):
            tried = f"best_depth(mus={mus}, losses={losses})"
            with unchanged(tried, mus=mus, losses=losses):
                got = target.best_depth(mus, losses)
            compare(got, true_best(mus, losses), tried, rtol=1e-6)


def band_case(
    rng: random.Random, best: float, noise: float
) -> tuple[list[float], list[list[float]], list[list[int]]]:
    mus, seeds = [1.0, 2.0, 4.0, 8.0], 5
    while True:
        runs = [
            [2 + 0.1 * math.log(mu / best) ** 2 + rng.gauss(0, noise) for mu in mus]
            for _ in range(seeds)
        ]
        draws = [[rng.randrange(seeds) for _ in range(seeds)] for _ in range(60)]
        means = [np.mean([runs[s] for s in draw], axis=0).tolist() for draw in draws]
        if all(clear_case(mus, m) for m in means):
            return mus, runs, draws


def true_band(
    mus: list[float], runs: list[list[float]], draws: list[list[int]], level: float
) -> tuple[float | None, float | None, float]:
    means = [
        [statistics.fmean(runs[s][i] for s in d) for i in range(len(mus))]
        for d in draws
    ]
    found = [best for m in means if (best := true_best(mus, m)) is not None]
    missing = len(draws) - len(found)
    if 2 * missing > len(draws):
        return None, None, missing / len(draws)
    low, high = (
        float(np.quantile(found, q)) for q in ((1 - level) / 2, (1 + level) / 2)
    )
    return low, high, missing / len(draws)


@points("14.2", 1)
def test_ex14_2_the_band_holds_the_middle_of_the_draws(target: Any, rng: Any) -> None:
    for level in (0.5, 0.8, 0.9):
        mus, runs, draws = band_case(rng, 3.0, 0.01)
        tried = f"depth_band({mus}, runs={runs}, draws of 5 seeds, level={level})"
        with unchanged(tried, mus=mus, runs=runs, draws=draws):
            got = target.depth_band(mus, runs, draws, level)
        compare(got, true_band(mus, runs, draws, level), tried, atol=1e-6)


@points("14.2", 1)
def test_ex14_2_a_seed_drawn_twice_counts_twice(target: Any, rng: Any) -> None:
    mus = [1.0, 2.0, 4.0, 8.0]
    runs = [valley_at(mus, best) for best in (1.5, 3.0, 6.0)]
    draws = [[0, 0, 2], [1, 1, 1], [2, 2, 0]]
    for own in ([draws[0]], [draws[1]], [draws[2]], draws):
        tried = (
            f"depth_band({mus}, runs of best depths 1.5, 3, 6, draws={own}, level=0.8)"
        )
        got = target.depth_band(mus, runs, own, 0.8)
        compare(got, true_band(mus, runs, own, 0.8), tried, atol=1e-6)


def valley_at(mus: Sequence[float], best: float) -> list[float]:
    return [2 + 0.1 * math.log(mu / best) ** 2 for mu in mus]


@points("14.2", 1)
def test_ex14_2_draws_without_a_best_depth_are_counted(target: Any, rng: Any) -> None:
    """About some, about half, and nearly all of the draws have their minimum outside."""
    for best, noise in ((1.6, 0.04), (1.05, 0.04), (0.95, 0.03), (0.3, 0.01)):
        mus, runs, draws = band_case(rng, best, noise)
        tried = f"depth_band({mus}, runs={runs}, draws of 5 seeds, level=0.9)"
        got = target.depth_band(mus, runs, draws, 0.9)
        compare(got, true_band(mus, runs, draws, 0.9), tried, atol=1e-6)
    mus = [1.0, 2.0, 4.0, 8.0]
    runs = [valley_at(mus, 3.0), valley_at(mus, 0.3)]
    for own, share in (([[0, 0], [1, 1]], 0.5), ([[0, 0], [1, 1], [1, 1]], 2 / 3)):
        tried = f"depth_band({mus}, one run with and one without a minimum, {own}, 0.9)"
        got = target.depth_band(mus, runs, own, 0.9)
        expected = (3.0, 3.0, share) if share == 0.5 else (None, None, share)
        compare(got, expected, tried, atol=1e-6)


# -- 14.3


def experiment(
    rng: random.Random, mus: Sequence[int], seeds: int
) -> list[tuple[Any, ...]]:
    log = []
    for place, budget in enumerate(rng.sample([1e9, 2e9, 4e9, 8e9], 3)):
        order = rng.sample(list(mus), len(mus))
        for mu in mus:
            level = 2 + 0.07 * order.index(mu) + rng.uniform(0, 0.02) - 0.01 * place
            for seed in range(seeds):
                loss = level + rng.gauss(0, 0.02)
                log.append((budget, mu, seed, loss, round(budget / 1e5 / (2 + mu))))
    rng.shuffle(log)
    return log


def true_numbers(log: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    budgets, mus = sorted({p[0] for p in log}), sorted({p[1] for p in log})

    def losses(budget: float, mu: int) -> list[float]:
        return [p[3] for p in log if p[:2] == (budget, mu)]

    def ranking(budget: float) -> list[int]:
        return sorted(mus, key=lambda mu: statistics.fmean(losses(budget, mu)))

    last = budgets[-1]
    first, second = ranking(last)[:2]
    means = [statistics.fmean(losses(last, mu)) for mu in (first, second)]
    spread = max(statistics.stdev(losses(last, mu)) for mu in (first, second))
    tokens = {p[1]: p[4] for p in log if p[0] == last}
    return {
        "lowest": [ranking(budget)[0] for budget in budgets],
        "gap": means[1] - means[0],
        "spreads": (means[1] - means[0]) / spread,
        "tokens": tokens[mus[0]] / tokens[mus[-1]],
    }


def lucky_log() -> list[tuple[Any, ...]]:
    """μ = 4 has the best single seed at each budget, and the second-lowest mean or the third."""
    losses = {
        1e9: {1: (2.30, 2.31), 2: (2.24, 2.25), 4: (2.10, 2.50)},
        2e9: {1: (2.10, 2.12), 2: (2.15, 2.16), 4: (2.00, 2.26)},
        4e9: {1: (2.02, 2.03), 2: (2.08, 2.10), 4: (1.90, 2.34)},
    }
    return [
        (budget, mu, seed, loss, round(budget / 1e5 / (2 + mu)))
        for budget, own in losses.items()
        for mu, seeds in own.items()
        for seed, loss in enumerate(seeds)
    ]


LOGS = [((1, 2, 4, 8), 3), ((2, 6, 12), 2), ((1, 3, 5, 7, 9), 5)]


def check_numbers(target: Any, rng: Any, keys: Sequence[str]) -> None:
    for mus, seeds in LOGS:
        log = experiment(rng, mus, seeds)
        tried = f"numbers(points), {len(log)} points of μ in {mus} and {seeds} seeds"
        with unchanged(tried, points=log):
            got = target.numbers(log)
        demand(isinstance(got, dict), tried, "a dictionary")
        truth = true_numbers(log)
        for key in keys:
            demand(key in got, tried, f"a key {key!r}")
            compare(got[key], truth[key], f"{tried}[{key!r}]", rtol=1e-9, atol=1e-12)


@points("14.3", 1)
def test_ex14_3_who_is_lowest_and_by_how_much(target: Any, rng: Any) -> None:
    check_numbers(target, rng, ("lowest", "gap"))
    log = lucky_log()
    tried = "numbers(points), where μ = 4 has the luckiest seed and not the lowest mean"
    got, truth = target.numbers(log), true_numbers(log)
    for key in ("lowest", "gap"):
        compare(got[key], truth[key], f"{tried}: [{key!r}]", rtol=1e-9, atol=1e-12)


@points("14.3", 1)
def test_ex14_3_the_gap_beside_the_spread_and_the_tokens(target: Any, rng: Any) -> None:
    check_numbers(target, rng, ("spreads", "tokens"))


@points("14.3", 2)
def test_ex14_3_the_essay_names_the_numbers_of_these_points(
    target: Any, rng: Any
) -> None:
    for mus, seeds in LOGS:
        log = experiment(rng, mus, seeds)
        tried = f"essay(points), {len(log)} points of μ in {mus} and {seeds} seeds"
        with unchanged(tried, points=log):
            text = target.essay(log)
        demand(type(text) is str, tried, "a string")
        words = len(text.split())
        demand(80 <= words <= 300, f"{tried}: it has {words} words", "80 to 300 words")
        different = len({word.strip(".,:;!?()").lower() for word in text.split()})
        holds = different >= 40
        demand(holds, f"{tried}: {different} different words", "at least 40 different")
        found = re.findall(r"(?<![\d.])\d+(?:\.\d+)?(?!\d)", text)
        holds = len(found) <= 20
        demand(holds, f"{tried}: it names {len(found)} numbers", "at most 20 numbers")
        truth = true_numbers(log)
        wanted = [
            f"{truth['gap']:.3f}",
            f"{truth['spreads']:.1f}",
            f"{truth['tokens']:.1f}",
        ]
        wanted += sorted({str(mu) for mu in truth["lowest"]})
        missing = [number for number in wanted if number not in found]
        demand(
            not missing,
            f"{tried}: it names {found}",
            f"{', '.join(missing)} among them",
        )


# -- 14.4

SHAPES = [(0, 1, 0), (1, 2, 1), (2, 1, 3), (0, 3, 0), (2, 2, 2)]


@points("14.4", 1)
def test_ex14_4_every_layer_and_iteration_has_a_slot_of_its_own(
    target: Any, rng: Any
) -> None:
    for layers in SHAPES:
        for loops in (1, 3, 8):
            loop = LoopConfig(*layers, mean_recurrence=loops)
            places = [("prelude", i, 0, i) for i in range(layers[0])]
            places += [
                ("core", i, t, loop.core_slot(t) + i)
                for t in range(loops)
                for i in range(layers[1])
            ]
            places += [("coda", i, 0, loop.coda_slot + i) for i in range(layers[2])]
            for stage, layer, iteration, slot in places:
                tried = f"kv_slot({layers}, {loops}, {stage!r}, {layer}, {iteration})"
                compare(
                    target.kv_slot(layers, loops, stage, layer, iteration), slot, tried
                )


@points("14.4", 1)
def test_ex14_4_what_the_model_does_not_have_is_refused(target: Any) -> None:
    compare(
        target.kv_slot((1, 2, 1), 3, "core", 1, 2),
        6,
        "kv_slot((1, 2, 1), 3, 'core', 1, 2)",
    )
    wrong = [
        ("prelude", 1, 0), ("prelude", 0, 1), ("core", 2, 0), ("core", 0, 3), ("core", 0, -1),
        ("core", -1, 0), ("coda", 1, 0), ("coda", 0, 1), ("coda", -1, 0), ("head", 0, 0),
    ]  # fmt: skip
    for place in wrong:
        tried = f"kv_slot((1, 2, 1), 3, {', '.join(map(repr, place))})"
        refuses(lambda place=place: target.kv_slot((1, 2, 1), 3, *place), tried)


def fresh(generator: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (torch.randn(count, 2, 3, generator=generator) for _ in range(2))
    return keys, values


@points("14.4", 2)
def test_ex14_4_what_is_read_is_what_was_written(
    target: Any, rng: Any, generator: Any
) -> None:
    """Random writes of two requests into three slots, against a dictionary."""
    for size in (1, 4, 5):
        storage = target.PagedKV(3, 12, size, 2, 3)
        blocks = rng.sample(range(12), 12)
        tables = [blocks[:6], blocks[6:]]
        kept: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        lengths = [[0, 0], [0, 0], [0, 0]]
        for _ in range(25):
            slot, who = rng.randrange(3), rng.randrange(2)
            start = lengths[slot][who]
            again = start > 0 and rng.random() < 0.3
            count = rng.randint(1, min(4, 6 * size - start)) if start < 6 * size else 0
            positions = (
                [rng.randrange(start)] if again else [*range(start, start + count)]
            )
            keys, values = fresh(generator, len(positions))
            tried = f"blocks of {size}: write(slot={slot}, table={tables[who]}, {positions}, …)"
            if positions:
                with unchanged(tried, table=tables[who], keys=keys, values=values):
                    storage.write(slot, tables[who], positions, keys, values)
            for i, p in enumerate(positions):
                kept[slot, who, p] = keys[i].clone(), values[i].clone()
            lengths[slot][who] = max([start, *(p + 1 for p in positions)])
            for s in range(3):
                for w in range(2):
                    if length := lengths[s][w]:
                        got = storage.read(s, tables[w], length)
                        after = (
                            f"{tried}, then read(slot={s}, table={tables[w]}, {length})"
                        )
                        for name, place in (("keys", 0), ("values", 1)):
                            truth = torch.stack(
                                [kept[s, w, p][place] for p in range(length)]
                            )
                            compare(got[place], truth, f"{after} → {name}")

    storage, size = target.PagedKV(1, 6, 3, 2, 3), 3
    keys, values = fresh(generator, 2 * size)
    storage.write(0, [4, 2], list(range(2 * size)), keys, values)
    got = storage.read(0, [4, 5], size)
    tried = (
        "blocks of 3: write(0, [4, 2], …), then read(0, [4, 5], 3), block 4 is in both"
    )
    compare(got[0], keys[:size], f"{tried} → keys")
    compare(got[1], values[:size], f"{tried} → values")


@points("14.4", 1)
def test_ex14_4_reads_stay_and_bad_positions_write_nothing(
    target: Any, generator: Any
) -> None:
    storage, table = target.PagedKV(2, 5, 4, 2, 3), [3, 1]
    keys, values = fresh(generator, 8)
    storage.write(1, table, list(range(8)), keys, values)
    for length in (3, 8):
        first = storage.read(1, table, length)
        before = [part.clone() for part in first]
        storage.write(1, table, [0, 1, 2], *fresh(generator, 3))
        for name, part, was in zip(("keys", "values"), first, before, strict=True):
            tried = f"{name} of read(1, {table}, {length}) after another write"
            compare(part, was, tried)
        storage.write(1, table, [0, 1, 2], keys[:3], values[:3])
    bad = fresh(generator, 2)
    refuses(
        lambda: storage.write(1, table, [7, 8], *bad),
        "write at positions [7, 8] of 2 blocks",
    )
    refuses(
        lambda: storage.write(1, table, [0, -1], *bad),
        "write at positions [0, -1] of 2 blocks",
    )
    refuses(lambda: storage.read(1, table, 9), "read of 9 positions in 2 blocks")
    got = storage.read(1, table, 8)
    compare(got[0], keys, "keys after a write that was refused")
    compare(got[1], values, "values after a write that was refused")
    copy = keys.clone()
    keys.zero_()
    compare(
        storage.read(1, table, 8)[0],
        copy,
        "keys stored, after the written tensor changed",
    )


# -- 14.5, and the parts that 14.7 is tested with


class RefCache:
    """Holders, names and times in lists, a block each."""

    def __init__(
        self, num_blocks: int, block_size: int, kv: RefKV | None = None
    ) -> None:
        self.num_blocks, self.size, self.clock, self.hits = num_blocks, block_size, 0, 0
        self.kv, self.taken = kv, 0
        self.holders, self.freed = [0] * num_blocks, [0] * num_blocks
        self.names: list[Any] = [None] * num_blocks
        self.calls: list[str] = []

    @property
    def free(self) -> int:
        return self.holders.count(0)

    def find(self, tokens: Sequence[int], loops: int) -> list[int]:
        self.calls.append("find")
        found: list[int] = []
        while (end := (len(found) + 1) * self.size) < len(tokens):
            key = loops, tuple(tokens[:end])
            if key not in self.names:
                break
            found.append(self.names.index(key))
        for block in found:
            self.holders[block] += 1
        self.hits += len(found)
        return found

    def take(self, count: int) -> list[int] | None:
        if count > self.free:
            return None

        def age(block: int) -> tuple[int, int]:
            return (0, block) if self.names[block] is None else (1, self.freed[block])

        order = sorted(
            (b for b in range(self.num_blocks) if not self.holders[b]), key=age
        )
        for block in order[:count]:
            self.holders[block], self.names[block] = 1, None
        if self.kv is not None:
            self.kv.forget(order[:count])
        self.taken += count
        return order[:count]

    def name(self, tokens: Sequence[int], loops: int, table: Sequence[int]) -> None:
        self.calls.append("name")
        for place in range(len(tokens) // self.size):
            key = loops, tuple(tokens[: (place + 1) * self.size])
            if key not in self.names:
                self.names[table[place]] = key
                if self.kv is not None and not self.kv.full(table[place]):
                    raise AssertionError(
                        f"block {table[place]} is named before all of its {self.size} tokens "
                        "were written"
                    )

    def drop(self, table: Sequence[int]) -> None:
        for block in reversed(table):
            self.clock += 1
            self.holders[block] -= 1
            self.freed[block] = self.clock
            if self.holders[block] < 0:
                raise AssertionError(
                    f"block {block} was dropped more often than it was held"
                )


def number_free(cache: Any) -> int:
    free = cache.free
    return int(free() if callable(free) else free)


@points("14.5", 2)
def test_ex14_5_a_prefix_is_found_by_all_its_tokens_and_its_depth(target: Any) -> None:
    cache = target.PrefixCache(8, 2)
    compare(cache.take(3), [0, 1, 2], "take(3) of 8 new blocks")
    cache.name([5, 6, 7, 8, 9], 8, [0, 1, 2])
    cases = [
        ([5, 6, 7, 8, 9], 8, [0, 1]), ([5, 6, 7, 8], 8, [0]), ([5, 6, 9, 9, 9], 8, [0]),
        ([5, 6], 8, []), ([5, 6, 7, 8, 9, 1], 8, [0, 1]), ([5, 6, 7, 8, 9], 4, []),
        ([7, 8, 9], 8, []), ([], 8, []), ([5], 8, []), ([9, 6, 7, 8, 9], 8, []),
    ]  # fmt: skip
    for tokens, loops, expected in cases:
        tried = f"after name([5, 6, 7, 8, 9], 8, [0, 1, 2]): find({tokens}, {loops})"
        with unchanged(tried, tokens=tokens):
            got = cache.find(tokens, loops)
        compare(got, expected, tried)
    compare(cache.take(2), [3, 4], "take(2)")
    cache.name([5, 6, 1, 2], 1, [3, 4])
    compare(
        cache.find([5, 6, 7], 1),
        [3],
        "find([5, 6, 7], 1), named with 1 loop as block 3",
    )
    compare(
        cache.find([5, 6, 7], 8),
        [0],
        "find([5, 6, 7], 8), named with 8 loops as block 0",
    )
    cache = target.PrefixCache(8, 2)
    cache.take(5)
    cache.name([1, 2, 3, 4, 5, 6], 8, [0, 1, 2])
    cache.name([1, 2, 9, 9], 8, [3, 4])  # 3 gets no name, 0 has it
    compare(
        cache.find([1, 2, 9, 9, 5, 6, 7], 8),
        [0, 4],
        "after name([1, 2, 3, 4, 5, 6], 8, [0, 1, 2]) and name([1, 2, 9, 9], 8, [3, 4]): "
        "find([1, 2, 9, 9, 5, 6, 7], 8), whose middle is another",
    )
    cache = target.PrefixCache(4, 2)
    cache.take(1)
    cache.name([1, 12], 8, [0])
    tried = "after name([1, 12], 8, [0]): find([11, 2, 5], 8)"
    compare(cache.find([11, 2, 5], 8), [], tried)


@points("14.5", 1)
def test_ex14_5_holders_decide_what_is_free(target: Any) -> None:
    cache = target.PrefixCache(4, 2)
    table = cache.take(2)
    cache.name([5, 6, 7], 8, table)
    compare(number_free(cache), 2, "free after take(2) of 4")
    compare(cache.find([5, 6, 9], 8), [0], "find([5, 6, 9], 8)")
    cache.drop(table)
    compare(number_free(cache), 3, "free when block 0 has one holder left")
    compare(cache.take(4), None, "take(4) of 3 free ones")
    compare(number_free(cache), 3, "free after a take that was refused")
    compare(cache.take(3), [1, 2, 3], "take(3) while block 0 is held")
    cache.drop([0])
    compare(cache.find([5, 6, 9], 8), [0], "find of a block that is free and named")
    compare(number_free(cache), 0, "free after a free block was found")


@points("14.5", 1)
def test_ex14_5_who_goes_first(target: Any) -> None:
    cache = target.PrefixCache(5, 2)
    a = cache.take(2)
    cache.name([1, 2, 3, 4], 8, a)
    b = cache.take(2)
    cache.name([5, 6, 7], 8, b)
    cache.drop(b)
    cache.drop(a)
    tried = "blocks 0, 1 named and dropped after 2 (named) and 3 (without a name)"
    compare(cache.take(3), [3, 4, 2], f"{tried}: take(3)")
    compare(
        cache.find([5, 6, 7], 8), [], f"{tried}: find of what was in block 2, now taken"
    )
    compare(
        cache.take(1),
        [1],
        f"{tried}: then take(1), the end of a prefix before its beginning",
    )
    compare(cache.find([1, 2, 3, 4, 9], 8), [0], f"{tried}: find of what is left")
    cache = target.PrefixCache(3, 1)
    cache.take(2)
    cache.name([7], 8, [0])
    cache.name([7], 8, [1])
    compare(cache.find([7, 1], 8), [0], "two blocks with one name: the older keeps it")


def with_a_gap(cache: Any) -> Any:
    """The second block of a prefix is named, the first was and is gone. → take, find"""
    cache.take(1)
    cache.take(2)
    cache.name([7], 8, [0])
    cache.name([7, 8], 8, [1, 2])  # 1 gets no name, 0 has it
    cache.drop([0])
    return [cache.take(2), cache.find([7, 8, 9], 8)]


@points("14.5", 1)
def test_ex14_5_nothing_is_found_behind_a_gap(target: Any, rng: Any) -> None:
    tried = (
        "blocks of 1: name([7], 8, [0]), name([7, 8], 8, [1, 2]), drop([0]), take(2), "
    )
    got = with_a_gap(target.PrefixCache(4, 1))
    compare(got, [[3, 0], []], tried + "find([7, 8, 9], 8)")
    random_calls(target, rng)


def random_calls(target: Any, rng: Any) -> None:
    size = rng.choice([1, 2, 3])
    mine, truth = target.PrefixCache(10, size), RefCache(10, size)
    held: list[tuple[list[int], list[int], int]] = []
    log: list[str] = []

    def both(call: str, *arguments: Any) -> Any:
        log.append(f"{call}({', '.join(map(str, arguments))})")
        got = getattr(mine, call)(*arguments)
        expected = getattr(truth, call)(*arguments)
        tried = f"blocks of {size}, 10 of them: {'; '.join(log[-12:])}"
        compare(got, expected, tried)
        compare(number_free(mine), truth.free, f"{tried}: free")
        return expected

    for _ in range(120):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 4 * size))]
        loops = rng.choice([1, 7, 8])
        if held and rng.random() < 0.5:
            table, mine_tokens, depth = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.8:
                both("name", mine_tokens, depth, table)
            both("drop", table)
            continue
        found = both("find", tokens, loops)
        rest = both("take", -(-len(tokens) // size) - len(found))
        if rest is None:
            both("drop", found)
        else:
            held.append((found + rest, tokens, loops))


# -- 14.6


def true_plan(
    running: Sequence[int],
    waiting: Sequence[tuple[int, int]],
    budget: int,
    seats: int,
    free_blocks: int,
) -> tuple[list[int], list[int]]:
    """By the rules, one token of the budget after the other."""
    tokens = [0] * len(running)
    left, queue = budget, list(enumerate(running))
    queue.sort(key=lambda pair: pair[1] != 1)  # decodes first, else as they stand
    for i, todo in queue:
        while left and tokens[i] < todo:
            tokens[i], left = tokens[i] + 1, left - 1
    admitted: list[int] = []
    for todo, blocks in waiting:
        free_blocks -= blocks
        if len(running) + len(admitted) >= seats or not left or free_blocks < 0:
            break
        admitted.append(min(todo, left))
        left -= admitted[-1]
    return tokens, admitted


def check_plan(target: Any, *case: Any) -> None:
    tried = f"plan_step(running={case[0]}, waiting={case[1]}, budget={case[2]}, seats={case[3]}, "
    tried += f"free_blocks={case[4]})"
    with unchanged(tried, running=case[0], waiting=case[1]):
        got = target.plan_step(*case)
    compare(got, true_plan(*case), tried)


@points("14.6", 2)
@pytest.mark.parametrize(
    ("running", "budget"),
    [
        ([5, 1], 8),
        ([1, 1, 1], 2),
        ([9, 1, 7, 1], 12),
        ([3], 3),
        ([4, 4], 6),
        ([2, 1, 1], 1),
        ([], 4),
    ],
)
def test_ex14_6_decodes_first_and_no_more_than_the_budget(
    target: Any, running: list[int], budget: int
) -> None:
    check_plan(target, running, [(9, 2), (3, 1)], budget, 4, 10)


@points("14.6", 1)
def test_ex14_6_nobody_overtakes(target: Any) -> None:
    check_plan(target, [], [(4, 3), (4, 1)], 8, 4, 2)
    check_plan(target, [1], [(4, 2), (4, 2), (1, 1)], 20, 4, 3)
    check_plan(target, [1, 1], [(4, 1), (4, 1)], 20, 3, 9)
    check_plan(target, [1, 1], [(4, 1)], 20, 2, 9)
    check_plan(target, [4], [(4, 1)], 4, 2, 9)
    check_plan(target, [1], [(4, 2), (4, 1)], 20, 9, 3)
    check_plan(target, [1], [(4, 3)], 20, 9, 3)


@points("14.6", 1)
def test_ex14_6_random_steps(target: Any, rng: Any) -> None:
    for _ in range(200):
        running = [
            rng.choice([1, 1, rng.randint(1, 12)]) for _ in range(rng.randint(0, 6))
        ]
        waiting = [
            (rng.randint(1, 12), rng.randint(1, 4)) for _ in range(rng.randint(0, 6))
        ]
        seats = rng.randint(max(1, len(running)), 9)
        check_plan(
            target, running, waiting, rng.randint(1, 30), seats, rng.randint(0, 12)
        )


# -- 14.7


class RefKV:
    """Keys and values in a dictionary; what was never written cannot be read."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self, blocks: Sequence[int]) -> None:
        self.rows = {
            place: row for place, row in self.rows.items() if place[1] not in blocks
        }

    def full(self, block: int) -> bool:
        return {row for _, own, row in self.rows if own == block} == set(
            range(self.block_size)
        )

    def _place(
        self, slot: int, table: Sequence[int], position: int
    ) -> tuple[int, int, int]:
        if position >= len(table) * self.block_size:
            raise AssertionError(
                f"position {position} is beyond the table {list(table)}"
            )
        return slot, table[position // self.block_size], position % self.block_size

    def write(
        self,
        slot: int,
        table: Any,
        positions: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        for i, position in enumerate(positions):
            self.rows[self._place(slot, table, position)] = (
                keys[i].clone(),
                values[i].clone(),
            )

    def read(
        self, slot: int, table: Any, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = [self._place(slot, table, position) for position in range(length)]
        for position, place in enumerate(places):
            if place not in self.rows:
                raise AssertionError(
                    f"position {position} is read in slot {slot} before it was written"
                )
        found = [self.rows[place] for place in places]
        return torch.stack([k for k, _ in found]), torch.stack([v for _, v in found])


class Watched:
    """A loop model that counts, and knows when it is too late."""

    def __init__(self, model: LoopModel) -> None:
        self.layers, self.loops = model.layers, model.loops
        self.kv_heads, self.head_dim = model.kv_heads, model.head_dim
        self.calls = self.rows = 0

        # The model stands in no attribute, where it could be called without being counted.
        def hidden(
            token_ids: Any, positions: Any, loops: Any, attend: Any
        ) -> torch.Tensor:
            demand(
                len(token_ids) > 0,
                "model.hidden without a row: parts.plan gave nobody a token",
                "a step with rows; were the blocks of those who are done given back?",
            )
            self.calls, self.rows = self.calls + 1, self.rows + len(token_ids)
            return model.hidden(token_ids, positions, loops, attend)

        def logits(rows: torch.Tensor) -> torch.Tensor:
            return model.logits(rows)

        self.hidden, self.logits = hidden, logits


class Whole(TorchBackend):
    """Attention over one whole sequence: no cache."""

    def attend(
        self, query: Any, key: Any, value: Any, kv: Any, slot: Any, batch: Any, scale: Any,
        window: Any,
    ) -> torch.Tensor:  # fmt: skip
        return chunk_attention(query, key, value, scale)


@cache
def parcae_of(layers: tuple[int, int, int], seed: int) -> Any:
    """parcae-tiny for seed 0, else a random model with its shape."""
    if seed == 0:
        return PARCAE_TINY
    return random_parcae(layers, 4, seed)


@torch.inference_mode()
def alone(parcae: Any, prompt: Sequence[int], max_tokens: int, loops: int) -> list[int]:
    tokens, backend = list(prompt), Whole()
    for _ in range(max_tokens):
        hidden = parcae(sequence_batch(tokens), None, backend, loops)
        tokens.append(int(parcae.logits(hidden[-1:], backend).argmax()))
    return tokens[len(prompt) :]


def parts_for(blocks: int, size: int) -> Parts:
    numbers: dict[tuple[str, int, int], int] = {}
    steps = [0]

    def slot(stage: str, layer: int, iteration: int) -> int:
        return numbers.setdefault((stage, layer, iteration), len(numbers))

    def plan(*case: Any) -> tuple[list[int], list[int]]:
        steps[0] += 1
        if steps[0] > 300:
            raise AssertionError(
                "300 steps were planned, and the requests are not done"
            )
        return true_plan(*case)

    kv = RefKV(size)
    return Parts(slot, kv, RefCache(blocks, size, kv), plan)


Requests = list[tuple[list[int], int, int]]


class Asked:
    """A plan that is compared with what it should be asked."""

    def __init__(
        self, requests: Requests, parts: Parts, budget: int, seats: int, tried: str
    ) -> None:
        size = getattr(parts.kv, "block_size", 1)
        self.waiting = [(len(p), -(-(len(p) + m - 1) // size)) for p, m, _ in requests]
        self.parts, self.limits, self.tried = parts, (budget, seats), tried

    def __call__(self, *case: Any) -> Any:
        tried = f"{self.tried}: parts.plan's"
        compare([tuple(pair) for pair in case[1]], self.waiting, f"{tried} waiting")
        compare(case[2:4], self.limits, f"{tried} budget and seats")
        free = number_free(self.parts.cache)
        compare(case[4], free, f"{tried} free_blocks, beside parts.cache.free")
        planned = self.parts.plan(*case)
        self.waiting = self.waiting[len(planned[1]) :]
        return planned


def check_replies(
    target: Any,
    parcae: Any,
    requests: Requests,
    parts: Parts,
    budget: int,
    seats: int,
    share: bool,
) -> Watched:
    model = Watched(LoopModel(parcae))
    asked = ", ".join(f"({len(p)} tokens, {m}, {n} loops)" for p, m, n in requests)
    size = getattr(parts.kv, "block_size", "?")
    tried = f"serve([{asked}], blocks of {size}, budget={budget}, seats={seats}, share={share})"
    parts = replace(parts, plan=Asked(requests, parts, budget, seats, tried))
    with unchanged(tried, requests=requests):
        got = target.serve(model, requests, parts, budget, seats, share=share)
    compare(len(got), len(requests), f"{tried}: replies")
    for i, (request, reply) in enumerate(zip(requests, got, strict=True)):
        compare(list(reply), alone(parcae, *request), f"{tried}: reply {i}")
    return model


def some_requests(rng: random.Random, count: int, depths: Sequence[int]) -> Requests:
    return [
        (
            [rng.randrange(29) for _ in range(rng.randint(1, 11))],
            rng.randint(1, 5),
            rng.choice(depths),
        )
        for _ in range(count)
    ]


MODELS = [((0, 1, 0), 1), ((1, 2, 1), 2), ((0, 1, 0), 0)]


@points("14.7", 2)
@pytest.mark.parametrize(("layers", "seed"), MODELS)
def test_ex14_7_each_reply_is_that_of_the_model_alone(
    target: Any, rng: Any, layers: tuple[int, int, int], seed: int
) -> None:
    parcae = parcae_of(layers, seed)
    one: Requests = [([3, 1, 4, 1, 5, 9, 2], 4, 3)]
    for budget in (64, 3):
        check_replies(target, parcae, one, parts_for(8, 4), budget, 2, False)
    for budget, seats, size in ((1, 2, 3), (6, 3, 4), (64, 8, 1)):
        requests = some_requests(rng, 4, (1, 2, 4))
        check_replies(
            target, parcae, requests, parts_for(80, size), budget, seats, False
        )


def shared_requests(rng: random.Random) -> Requests:
    """Prompts that begin alike, at two depths, and some of them twice."""
    start = [rng.randrange(29) for _ in range(9)]
    return [
        (start[:8], 1, 4),
        ([*start, 1, 2], 4, 4),
        ([*start, 3], 3, 4),
        ([*start, 1, 2], 3, 1),
        (start[:8], 5, 4),
        ([*start, 1, 2], 2, 4),
        ([*start, 1, 2], 3, 1),
    ]


@points("14.7", 1)
def test_ex14_7_sharing_changes_no_token_and_saves_the_found_ones(
    target: Any, rng: Any
) -> None:
    for layers, seed in MODELS[:2]:
        for budget, seats in ((64, 1), (4, 2), (16, 3), (64, 6)):
            parts, requests = parts_for(80, 4), shared_requests(rng)
            model = check_replies(
                target, parcae_of(layers, seed), requests, parts, budget, seats, True
            )
            every = sum(len(prompt) + wanted - 1 for prompt, wanted, _ in requests)
            tried = f"tokens computed with budget={budget}, seats={seats}, share=True"
            compare(model.rows, every - 4 * parts.cache.hits, tried)
            if seats == 1:  # each begins after the one before: the hits are known
                tried = "blocks found by seven requests, one after the other"
                compare(parts.cache.hits, 0 + 2 + 2 + 0 + 1 + 2 + 2, tried)
            need = sum(-(-(len(p) + wanted - 1) // 4) for p, wanted, _ in requests)
            tried = f"blocks taken with budget={budget}, seats={seats}, share=True"
            compare(parts.cache.taken, need - parts.cache.hits, tried)

    blocks_are_named_in_time(target)


def blocks_are_named_in_time(target: Any) -> None:
    """What is full is found in the next step: while its owner decodes, and in replies, too."""
    parcae, start = parcae_of((1, 2, 1), 2), [3, 1, 4, 1, 5, 9, 2, 6]
    reply = alone(parcae, start, 5, 4)
    owner = (start, 5, 4)  # computes 8 + 4 tokens: three blocks of 4
    long = (start, 9, 4)
    short = ([7] * 5, 5, 2)
    after = ([*start, *reply], 2, 4)
    cases: list[tuple[str, Requests, int, int, int]] = [
        ("its prompt, while the first decodes", [owner, ([*start, 3], 2, 4)], 8, 2, 2),
        ("prompt and reply of the first, which is done", [owner, after], 64, 1, 3),
        ("prompt and reply of the first, which decodes on", [long, short, after], 64, 2, 3),
    ]  # fmt: skip
    for what, requests, budget, seats, hits in cases:
        parts = parts_for(40, 4)
        check_replies(target, parcae, requests, parts, budget, seats, True)
        tried = f"budget={budget}, seats={seats}: the last request brings {what}: blocks of 4 found"
        compare(parts.cache.hits, hits, tried)


@points("14.7", 1)
def test_ex14_7_each_token_once_and_one_pass_a_step(target: Any, rng: Any) -> None:
    parcae = parcae_of((1, 2, 1), 2)
    requests: Requests = [([1] * 6, 4, 2), ([2] * 3, 4, 4), ([3] * 9, 2, 1)]
    for budget, passes in ((64, 4), (6, 5)):
        parts = parts_for(40, 4)
        model = check_replies(target, parcae, requests, parts, budget, 8, False)
        tried = f"budget={budget}, three requests of 6 + 4, 3 + 4 and 9 + 2 tokens"
        compare(model.rows, 9 + 6 + 10, f"{tried}: tokens computed")
        compare(model.calls, passes, f"{tried}: calls of model.hidden")
        compare(parts.cache.calls, [], f"{tried}, share=False: calls of find and name")


@points("14.7", 1)
def test_ex14_7_blocks_are_held_long_enough_and_given_back(
    target: Any, rng: Any
) -> None:
    parcae = parcae_of((0, 1, 0), 1)
    requests: Requests = [
        ([rng.randrange(29) for _ in range(rng.randint(1, 6))], rng.randint(1, 4), n)
        for n in (1, 4, 2)
    ]
    requests.append(([7] * 9, 4, 2))
    for share in (False, True):
        parts = parts_for(4, 3)  # the last request needs all four
        model = check_replies(target, parcae, requests, parts, 5, 4, share)
        every = sum(len(p) + wanted - 1 for p, wanted, _ in requests)
        need = sum(-(-(len(p) + wanted - 1) // 3) for p, wanted, _ in requests)
        told, hits = f"share={share}, 4 blocks of 3", parts.cache.hits
        compare(model.rows + 3 * hits, every, f"{told}: tokens computed or found")
        compare(parts.cache.taken + hits, need, f"{told}: blocks taken or found")
        compare(parts.cache.free, 4, f"share={share}, 4 blocks: free in the end")
    model = Watched(LoopModel(parcae))
    large: Requests = [([1, 2], 2, 1), ([7] * 10, 4, 2)]
    tried = "serve of a request of 13 tokens with 4 blocks of 3"
    refuses(lambda: target.serve(model, large, parts_for(4, 3), 5, 4), tried)
    compare(model.calls, 0, f"{tried}: calls of model.hidden")


@points("14.7", 1)
def test_ex14_7_with_your_own_parts(target: Any, rng: Any) -> None:
    parcae = parcae_of((1, 2, 1), 2)
    layers, loops, size = (1, 2, 1), 4, 4
    storage = target.PagedKV(2 + 2 * loops, 30, size, 2, 8)
    cache = target.PrefixCache(30, size)
    storage.block_size, cache.num_blocks = size, 30
    steps = [0]

    def slot(stage: str, layer: int, iteration: int) -> int:
        number: int = target.kv_slot(layers, loops, stage, layer, iteration)
        return number

    def plan(*case: Any) -> Any:
        steps[0] += 1
        if steps[0] > 300:
            raise AssertionError(
                "300 steps were planned, and the requests are not done"
            )
        return target.plan_step(*case)

    parts = Parts(slot, storage, cache, plan)
    for budget, seats in ((64, 1), (5, 3)):
        requests = shared_requests(rng)
        model = check_replies(target, parcae, requests, parts, budget, seats, True)
        every = sum(len(prompt) + wanted - 1 for prompt, wanted, _ in requests)
        told = f"budget={budget}, seats={seats}, with your own parts: tokens computed"
        most = f"at most {every}, none of them twice"
        demand(model.rows <= every, f"{told}, {model.rows}", most)
        if seats == 1:  # each begins after the one before: the hits are known
            compare(model.rows, every - 4 * 9, told)
    compare(number_free(cache), 30, "free blocks in the end")


# -- probes


@probe("14.1")
def probe_laws(target: Any) -> Any:
    x, y = noisy_powers(random.Random(5), 6)
    return list(target.fit_power_law(x, y))


@probe("14.1")
def probe_saturation(target: Any) -> Any:
    depths, losses = saturating(random.Random(6), 0.03)
    fixed = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0], [2.65, 2.2, 2.28, 2.21, 2.07, 1.95]
    return [
        *target.fit_saturation(depths, losses, RATES),
        *target.fit_saturation(*fixed, [0.25, 0.5, 1.0]),
    ]


@probe("14.1")
def probe_hidden(target: Any) -> Any:
    depths, losses = saturating(random.Random(7), 0.03)
    return target.hidden_error(depths, losses, 4.0, RATES)


@probe("14.2")
def probe_best(target: Any) -> Any:
    mus = [1.0, 2.0, 4.0]
    cases = [2.0, 1.0, 2.2], [1.0, 2.0, 3.5], [3.5, 2.0, 1.0], [1.0, 2.0, 1.1]
    found = [target.best_depth(mus, losses) for losses in cases]
    return [*found, target.best_depth([8.0, 1.0, 2.0, 4.0], [1.5, 2.0, 1.2, 1.1])]


@probe("14.2")
def probe_band(target: Any) -> Any:
    mus, runs, draws = band_case(random.Random(8), 3.0, 0.01)
    return list(target.depth_band(mus, runs, draws, 0.8))


@probe("14.2")
def probe_no_band(target: Any) -> Any:
    mus, runs, draws = band_case(random.Random(9), 0.95, 0.03)
    return list(target.depth_band(mus, runs, draws, 0.9))


@probe("14.3")
def probe_numbers(target: Any) -> Any:
    logs = [experiment(random.Random(seed), (1, 2, 4, 8), 3) for seed in (1, 2)]
    return [target.numbers(log) for log in [*logs, lucky_log()]]


@probe("14.3")
def probe_essay(target: Any) -> Any:
    text = target.essay(experiment(random.Random(3), (2, 6, 12), 2))
    different = len(set(text.split())) >= 40
    return [different, *re.findall(r"\d+(?:\.\d+)?", text)]


@probe("14.4")
def probe_slots(target: Any) -> Any:
    places = [("prelude", 1, 0), ("core", 1, 2), ("core", 1, 0), ("coda", 1, 0)]
    return [target.kv_slot((2, 2, 2), 3, *place) for place in places]


@probe("14.4")
def probe_refused_slot(target: Any) -> Any:
    return target.kv_slot((2, 2, 2), 3, "core", 0, 3)


@probe("14.4")
def probe_storage(target: Any) -> Any:
    storage, generator = target.PagedKV(2, 4, 2, 1, 2), torch.Generator().manual_seed(1)
    keys, values = (torch.randn(5, 1, 2, generator=generator) for _ in range(2))
    storage.write(0, [3, 0, 1], list(range(5)), keys, values)
    storage.write(1, [3, 0, 1], [0], values[:1], keys[:1])
    read = storage.read(0, [3, 0, 1], 5)
    storage.write(0, [3, 0, 1], [0], values[:1], keys[:1])
    return list(read)


@probe("14.4")
def probe_torn_write(target: Any) -> Any:
    storage = target.PagedKV(1, 2, 2, 1, 2)
    with suppress(ValueError):
        storage.write(0, [1], [1, 2], torch.ones(2, 1, 2), torch.ones(2, 1, 2))
    with suppress(ValueError):
        storage.write(0, [1], [-1], 2 * torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    return storage.read(0, [1], 2)[0]


@probe("14.5")
def probe_names(target: Any) -> Any:
    cache = target.PrefixCache(8, 2)
    cache.take(3)
    cache.name([5, 6, 7, 8, 9], 8, [0, 1, 2])
    asked = ([5, 6, 7, 8, 9], 8), ([5, 6, 7, 8], 8), ([5, 6, 7], 4), ([7, 8, 9], 8)
    found = [cache.find(*case) for case in asked] + [number_free(cache)]
    cache = target.PrefixCache(8, 2)
    cache.take(5)
    cache.name([1, 2, 3, 4, 5, 6], 8, [0, 1, 2])
    cache.name([1, 2, 9, 9], 8, [3, 4])
    return [*found, cache.find([1, 2, 9, 9, 5, 6, 7], 8)]


@probe("14.5")
def probe_order(target: Any) -> Any:
    cache = target.PrefixCache(5, 2)
    a = cache.take(2)
    cache.name([1, 2, 3, 4], 8, a)
    b = cache.take(2)
    cache.name([5, 6, 7], 8, b)
    cache.drop(b)
    cache.drop(a)
    return [
        cache.take(3),
        cache.find([5, 6, 7], 8),
        cache.take(9),
        number_free(cache),
        cache.take(1),
    ]


@probe("14.5")
def probe_holders(target: Any) -> Any:
    cache = target.PrefixCache(3, 1)
    cache.take(2)
    cache.name([7], 8, [0])
    cache.name([7], 8, [1])
    found = cache.find([7, 1], 8)
    cache.drop([0, 1])
    return [
        found,
        number_free(cache),
        cache.take(2),
        with_a_gap(target.PrefixCache(4, 1)),
    ]


@probe("14.6")
def probe_plans(target: Any) -> Any:
    cases: list[tuple[Any, ...]] = [
        ([5, 1], [(9, 2), (3, 1)], 8, 4, 10), ([], [(4, 3), (4, 1)], 8, 4, 2),
        ([9, 1, 7, 1], [(2, 1)], 12, 9, 9), ([1], [(4, 2), (4, 2), (1, 1)], 20, 4, 3),
        ([1, 1], [(4, 1), (4, 1)], 20, 3, 9), ([1, 1, 1], [], 2, 3, 3),
    ]  # fmt: skip
    return [list(target.plan_step(*case)) for case in cases]


def probed(
    target: Any, requests: Requests, budget: int, seats: int, share: bool
) -> Any:
    parts, free = parts_for(40, 4), []

    def plan(*case: Any) -> Any:
        free.append(case[4])
        return plain(*case)

    plain, parts = parts.plan, replace(parts, plan=plan)
    model = Watched(LoopModel(parcae_of((1, 2, 1), 2)))
    replies = target.serve(model, requests, parts, budget, seats, share=share)
    cache = parts.cache
    return [replies, model.calls, model.rows, cache.free, len(cache.calls), free]


@probe("14.7")
def probe_serve(target: Any) -> Any:
    return probed(target, some_requests(random.Random(4), 3, (1, 2, 4)), 5, 2, False)


@probe("14.7")
def probe_share(target: Any) -> Any:
    return probed(target, shared_requests(random.Random(5)), 64, 1, True)


@probe("14.7")
def probe_next_turn(target: Any) -> Any:
    start = [3, 1, 4, 1, 5, 9, 2, 6]
    reply = alone(parcae_of((1, 2, 1), 2), start, 5, 4)
    return probed(target, [(start, 5, 4), ([*start, *reply], 2, 4)], 64, 1, True)


@probe("14.7")
def probe_share_together(target: Any) -> Any:
    return probed(target, shared_requests(random.Random(6)), 4, 2, True)


@probe("14.7")
def probe_at_once(target: Any) -> Any:
    return probed(
        target, [([1, 2, 3], 3, 4), ([4, 5], 3, 1), ([6], 2, 2)], 64, 8, False
    )


@probe("14.7")
def probe_too_large(target: Any) -> Any:
    model = Watched(LoopModel(parcae_of((1, 2, 1), 2)))
    with suppress(ValueError):
        target.serve(
            model, [([1, 2], 2, 1), ([1] * 200, 4, 1)], parts_for(40, 4), 64, 2
        )
    return model.calls
