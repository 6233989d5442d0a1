"""Chunked prefill: 2.6 to 3.7 times the load under a limit on the time between tokens, or nothing.

One GPU serves the same requests twice: whole prompts first, while everybody else waits, or prompts
in chunks that ride along with the decodes. What each can carry is searched for under one limit
after the other, with the engine's own scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping

from minifer.claims.claim import BarPanel, Claim, Curve, CurvePanel, Findings, Settings, Table
from minifer.claims.one_gpu import (
    A100,
    APART,
    PREFILL_FIRST,
    TOGETHER,
    Requests,
    colocated,
    engine,
    lengths_in_words,
    recorded_pairs,
)
from minifer.claims.sources import SARATHI
from minifer.claims.studies import seeds
from minifer.simulation.cluster import Cluster
from minifer.simulation.measures.metrics import measure
from minifer.simulation.measures.search import Capacity, Limit, Study, find_capacities

COUNT = 1_200  # requests of a run: in a short one no queue has the time to build up
GAPS = (0.06, 0.1, 0.15, 0.5)  # P99 of the time between tokens, seconds
GOLDEN, LOOSE = 0.1, 0.5
FIRST = "prompts first"
BUDGETS = (256, 512)
DEPLOYMENTS: Mapping[str, Cluster] = {
    FIRST: colocated(PREFILL_FIRST),
    **{f"chunks of {budget}": colocated(engine(budget)) for budget in BUDGETS},
}
PER_REQUEST = {"ttft": 1.0, "max_itl": 0.1}  # seconds, of 90 % of the requests
MODERATE = 2.0  # requests/s, for what chunks cost


def limits(gap: float) -> tuple[Limit, ...]:
    """P99 over all gaps between tokens, and a median TTFT that keeps queues from hiding."""
    return (Limit("itl_p99", most=gap), Limit("ttft_p50", most=2.0))


def capacities(
    requests: Requests, gaps: tuple[float, ...], settings: Settings
) -> dict[float, dict[str, Capacity]]:
    """Limit → deployment → requests a second."""
    studies = {name: Study(cluster, requests) for name, cluster in DEPLOYMENTS.items()}
    return {gap: _search(studies, limits(gap), settings) for gap in gaps}


def strict_capacities(requests: Requests, settings: Settings) -> dict[str, Capacity]:
    """The same when 90 % of the requests must keep `PER_REQUEST`, each with its longest gap."""
    studies = {
        name: Study(cluster, requests, slo=PER_REQUEST) for name, cluster in DEPLOYMENTS.items()
    }
    return _search(studies, (Limit("attainment", least=0.9),), settings)


def _search(
    studies: Mapping[str, Study], limits: tuple[Limit, ...], settings: Settings
) -> dict[str, Capacity]:
    return find_capacities(
        studies,
        limits,
        processes=settings.processes,
        low=0.02,
        high=4.5,
        tolerance=0.02,
        seeds=seeds(settings, 1),
    )


def best(found: Mapping[str, Capacity]) -> str:
    """The budget that carries most."""
    return max((name for name in found if name != FIRST), key=lambda name: found[name].rate)


def ratio(found: Mapping[str, Capacity]) -> float:
    return found[best(found)].rate / found[FIRST].rate


def reproduce(settings: Settings) -> Findings:
    requests = Requests(COUNT, TOGETHER, recorded_pairs(settings.trace))
    found = capacities(requests, GAPS, settings)
    apart = capacities(Requests(COUNT, APART), (GOLDEN,), settings)[GOLDEN]
    strict = strict_capacities(requests, settings)
    ratios = {gap: ratio(one) for gap, one in found.items()}
    ttft = {}
    for name, cluster in DEPLOYMENTS.items():
        run = Study(cluster, requests).run(MODERATE, seeds(settings, 1)[0])
        found_ttft = measure(run).ttft
        ttft[name] = found_ttft.p50 if found_ttft else 0.0
    names = tuple(DEPLOYMENTS)
    first_ttft = ttft[FIRST]
    small = f"chunks of {BUDGETS[0]}"
    small_ttft = ttft[small]
    return Findings(
        basis=f"simulated, step times of {A100.source}: one A100, "
        f"{lengths_in_words(settings.trace)}, {COUNT} requests a run, seed {seeds(settings, 1)[0]}",
        verdict=f"{ratios[GOLDEN]:.1f}× at a P99 of {GOLDEN * 1e3:.0f} ms between tokens, "
        f"{ratios[LOOSE]:.2f}× at {LOOSE * 1e3:.0f} ms: the gain is as large as the limit is tight",
        reproduction=f"with a P99 of {GOLDEN * 1e3:.0f} ms between tokens one GPU carries "
        f"{found[GOLDEN][FIRST].rate:.2f} requests/s when prompts go first and "
        f"{found[GOLDEN][best(found[GOLDEN])].rate:.2f} with {best(found[GOLDEN])}: "
        f"{ratios[GOLDEN]:.1f}× (the paper: 2.6× and 3.7×, for other models).",
        breaking=f"the limit: at {LOOSE * 1e3:.0f} ms the same two carry the same "
        f"({ratios[LOOSE]:.2f}×). The workload: prompts and answers whose lengths are drawn apart "
        f"give {ratio(apart):.1f}× instead of {ratios[GOLDEN]:.1f}×; real ones go together. And "
        f"the measure: if 90 % of the requests must have no gap above {GOLDEN * 1e3:.0f} ms at "
        f"all, prompts first carries {strict[FIRST].rate:.2f} and chunks "
        f"{strict[best(strict)].rate:.2f} requests/s.",
        honest=(
            "Chunked prefill carries several times the load where the time between tokens is "
            "limited tightly. Say the limit with the figure.",
            f"It costs time to the first token: {small_ttft * 1e3:.0f} ms against "
            f"{first_ttft * 1e3:.0f} ms at the median, at {MODERATE:g} requests/s.",
            "A P99 over tokens hides one long gap a request: with 200 tokens an answer, a gap "
            "each is half a percent of them.",
            "Generated lengths must be as correlated as real ones, or memory and gaps are wrong.",
            "Both schedulers let a request in before its answer's KV is set aside, as vLLM does; "
            "one that sets it aside carries less.",
        ),
        tables=(
            Table(
                "requests/s at a P99 between tokens (median TTFT ≤ 2 s)",
                {"limit, ms": ".0f", **dict.fromkeys(names, ".2f"), "best ÷ first": ".2f"},
                tuple(
                    (gap * 1e3, *(one[name].rate for name in names), ratios[gap])
                    for gap, one in found.items()
                ),
            ),
            Table(
                f"the same at {GOLDEN * 1e3:.0f} ms, by what is drawn and what is measured",
                {"": "", **dict.fromkeys(names, ".2f"), "best ÷ first": ".2f"},
                tuple(
                    (label, *(one[name].rate for name in names), ratio(one))
                    for label, one in (
                        ("lengths that go together", found[GOLDEN]),
                        ("lengths drawn apart", apart),
                        ("90 % of requests: no longer gap", strict),
                    )
                ),
            ),
        ),
        panels=(
            CurvePanel(
                "What one GPU carries, by the limit on the time between tokens",
                "P99 between tokens at most, ms",
                "requests/s",
                tuple(
                    Curve.of(name, {gap * 1e3: one[name].rate for gap, one in found.items()})
                    for name in names
                ),
                log="x",
            ),
            BarPanel(
                "Best chunks ÷ prompts first",
                "times the load of prompts first",
                (
                    *(f"P99 {gap * 1e3:.0f} ms" for gap in found),
                    f"P99 {GOLDEN * 1e3:.0f} ms, lengths apart",
                ),
                {"ratio": (*ratios.values(), ratio(apart))},
                x_marks={"paper 2.6×": 2.6, "paper 3.7×": 3.7},
            ),
        ),
        values={
            "ratio_60_ms": ratios[0.06],
            "ratio_100_ms": ratios[GOLDEN],
            "ratio_150_ms": ratios[0.15],
            "ratio_500_ms": ratios[LOOSE],
            "ratio_100_ms_apart": ratio(apart),
            "strict_first": strict[FIRST].rate,
            "strict_chunked": strict[best(strict)].rate,
            "ttft_p50_first": first_ttft,
            "ttft_p50_chunked": small_ttft,
        },
    )


CLAIM = Claim(
    name="chunked-prefill",
    statement="chunked prefill serves 2.6 to 3.7 times the load within the same latency limits",
    sources=(SARATHI,),
    reproduce=reproduce,
    code=(
        ("minifer/scheduling/scheduler.py", "the budget of a step, with chunks and without"),
        ("minifer/simulation/steps/published.py", "how long the steps of an A100 take"),
        ("minifer/claims/one_gpu.py", "the deployments"),
    ),
    trace="any format; its lengths are drawn from",
)
