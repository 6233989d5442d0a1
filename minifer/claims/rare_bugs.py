"""One request in 100,000: how many tests see it, and what tests that saw nothing prove.

Two ways to the same number: the closed form of `minifer.perf.rare_events`, and test campaigns that
are drawn one by one.
"""

from __future__ import annotations

import math

import numpy as np

from minifer.claims.claim import Claim, Curve, CurvePanel, Findings, Settings, Table
from minifer.claims.sources import RULE_OF_THREE, TALK
from minifer.perf.rare_events import rate_bound, trials_to_see

RATE = 1e-5  # 0.001 %
TOKENS_A_DAY, TOKENS_A_REQUEST = 1e12, 1e3
CAMPAIGNS = 100_000  # drawn for each size
REPEATS = 1_000  # how often a fixed set of prompts is run again, in the setting that breaks it
SIZES = (1_000, 10_000, 100_000, trials_to_see(RATE), 1_000_000)


def chance_to_see(num_trials: float, rate: float = RATE) -> float:
    """Of at least one event in independent trials: 1 − (1 − rate)ⁿ."""
    return -math.expm1(num_trials * math.log1p(-rate))


def drawn_chance(rng: np.random.Generator, num_trials: int, rate: float = RATE) -> float:
    """The share of drawn campaigns that see it: the wait for the first event is geometric."""
    return float((rng.geometric(rate, CAMPAIGNS) <= num_trials).mean())


def chance_with_repeats(num_trials: int, repeats: int, rate: float = RATE) -> float:
    """The same when each prompt is run `repeats` times, and the prompt alone decides whether it
    fails (temperature 0, a shape that triggers it): repeats are not trials."""
    return chance_to_see(num_trials // repeats, rate)


def reproduce(settings: Settings) -> Findings:
    rng = np.random.default_rng(settings.seed)
    needed = trials_to_see(RATE)
    requests = TOKENS_A_DAY / TOKENS_A_REQUEST
    incidents = requests * RATE
    seconds = needed / requests * 86_400
    rows, drawn = [], []
    for n in SIZES:
        drawn.append(drawn_chance(rng, n))
        repeated = chance_with_repeats(n, REPEATS)
        rows.append((n, chance_to_see(n), drawn[-1], repeated, rate_bound(n), 3 / n))
    repeated = chance_with_repeats(needed, REPEATS)
    grid = tuple(float(10 ** (k / 4)) for k in range(8, 25))
    return Findings(
        basis=f"arithmetic, and {CAMPAIGNS:,} drawn test campaigns of each size, "
        f"seed {settings.seed}",
        verdict=f"holds: {needed:,} independent trials for 95 %; repeats of the same prompts do "
        "not count as trials",
        reproduction=f"{needed:,} trials see a fault of 0.001 % with 95 % (drawn: "
        f"{drawn[SIZES.index(needed)]:.1%}); a test of 1,000 replies with {chance_to_see(1000):.1%}"
        f". At {TOKENS_A_DAY:.0e} tokens a day and {TOKENS_A_REQUEST:,.0f} a request the same fault"
        f" happens {incidents:,.0f} times a day, and the service itself makes the {needed:,} trials"
        f" in {seconds:.0f} seconds, if somebody looks.",
        breaking=f"trials that are not independent. The same {needed:,} replies from "
        f"{needed // REPEATS} prompts, each run {REPEATS:,} times, see a fault that depends on the "
        f"prompt with {repeated:.2%} instead of 95 %. And trials of one kind say nothing of "
        "another: a fault of long prompts is never seen by short ones, whatever their number.",
        honest=(
            f"No failure in n independent trials leaves rates up to 3/n possible (95 %): "
            f"{rate_bound(needed):.2e} after {needed:,}.",
            "So what a test set cannot see must be watched for in production: non-finite values, "
            "reply lengths, repetitions, scripts (`minifer faults --matrix` shows who notices).",
            "0.001 % is an example of the talk, not a rate that anybody measured.",
        ),
        tables=(
            Table(
                "what n trials of a fault of 0.001 % give",
                {
                    "trials": ",d",
                    "see it": ".1%",
                    "drawn": ".1%",
                    f"each prompt {REPEATS:,}×": ".2%",
                    "rate bound": ".2e",
                    "3/n": ".2e",
                },
                tuple(rows),
            ),
        ),
        panels=(
            CurvePanel(
                "Chance that a test campaign sees a fault of 0.001 %",
                "trials (replies that are checked)",
                "chance to see it",
                (
                    Curve("independent, closed form", grid, tuple(map(chance_to_see, grid))),
                    Curve("drawn", tuple(map(float, SIZES)), tuple(drawn), points=True),
                    Curve(
                        f"each prompt {REPEATS:,} times",
                        grid,
                        tuple(chance_with_repeats(int(n), REPEATS) for n in grid),
                    ),
                ),
                log="x",
                x_marks={f"{needed:,}": float(needed)},
                y_marks={"95 %": 0.95},
            ),
        ),
        values={
            "trials_for_95_percent": needed,
            "chance_of_1000_trials": chance_to_see(1000),
            "drawn_chance": drawn[SIZES.index(needed)],
            "chance_with_repeats": repeated,
            "rate_bound": rate_bound(needed),
            "rule_of_three": 3 / needed,
            "incidents_a_day": incidents,
            "seconds_of_production": seconds,
        },
    )


CLAIM = Claim(
    name="rare-bugs",
    statement="at trillions of tokens a day, faults of 0.001 % of all requests become visible",
    sources=(TALK, RULE_OF_THREE),
    reproduce=reproduce,
    code=(
        ("minifer/perf/rare_events.py", "the arithmetic"),
        ("minifer/claims/rare_bugs.py", "the drawn campaigns, and the repeats"),
    ),
)
