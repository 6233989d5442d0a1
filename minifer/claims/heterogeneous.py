"""Prefill on one kind of chip, decode on another: where it wins a watt, and where it does not.

A chip's ridge point says for which phase it was built: hundreds of FLOPs a byte of a GPU suit
prefill, a few of a chip that keeps everything in SRAM suit decode at small batches. Pools of both
are simulated at the floors of their data sheets, and compared by requests a second and kilowatt,
under limits on the time per token from loose to tight.
"""

from __future__ import annotations

from collections.abc import Mapping

from minifer.claims.chip_pools import (
    A100,
    COMPUTE,
    GPUS,
    H100,
    H200,
    LPU,
    MEMORY,
    NUM_LPUS,
    OVERHEAD,
    POOLS,
    SLOWER,
    WITH_LPUS,
    WITH_OVERHEAD,
    Pool,
)
from minifer.claims.claim import BarPanel, Claim, Curve, CurvePanel, Findings, Settings, Table
from minifer.claims.one_gpu import Requests
from minifer.claims.shapes import LLAMA_8B
from minifer.claims.sources import SPLITWISE, TALK
from minifer.claims.studies import seeds
from minifer.perf.costs import decode_cost, prefill_cost
from minifer.perf.devices import Device
from minifer.simulation.measures.search import Limit, Study, find_capacities

# What 90 % of the requests must keep beside the time a token, in seconds. Short ones: a run of fast
# chips is over in a second, and a queue must show in it.
TTFT, GAP = 0.1, 0.1
_TOLERANCE = 0.05
TPOTS = (0.05, 0.02, 0.01, 0.005, 0.001)  # seconds a token, mean of a request


def carried(tpot: float, settings: Settings, pools: Mapping[str, Pool]) -> dict[str, float]:
    """Pool → requests a second and kilowatt, with 90 % within `TTFT`, `GAP` and `tpot`, and prefill
    nodes that keep up."""
    found = find_capacities(
        {
            name: Study(
                pool.cluster, Requests(pool.count), slo={"ttft": TTFT, "max_itl": GAP, "tpot": tpot}
            )
            for name, pool in pools.items()
        },
        (Limit("attainment", least=0.9), Limit("load", most=0.95)),
        processes=settings.processes,
        low=1.0,
        high=6_000.0,
        tolerance=_TOLERANCE,
        seeds=seeds(settings, 1),
    )
    return {name: one.rate / pools[name].watts * 1e3 for name, one in found.items()}


def all_rates(settings: Settings) -> dict[float, dict[str, float]]:
    """Limit → pool → requests a second and kilowatt.

    What a pool carries cannot fall as the limit gets looser: where LPUs carry as much under the
    tightest limit as under the loosest, the ones between need no search.
    """
    loosest, tightest = carried(TPOTS[0], settings, POOLS), carried(TPOTS[-1], settings, POOLS)
    steady = tightest[WITH_LPUS] >= (1 - _TOLERANCE) * loosest[WITH_LPUS]
    rates = {TPOTS[0]: loosest}
    for tpot in TPOTS[1:-1]:
        found = carried(tpot, settings, GPUS if steady else POOLS)
        rates[tpot] = {**found, WITH_LPUS: found.get(WITH_LPUS, tightest[WITH_LPUS])}
    return rates | {TPOTS[-1]: tightest}


def per_joule(device: Device, batch: int, context: int = 1024) -> tuple[float, float]:
    """(prompt tokens, output tokens) a joule at full power: arithmetic, any number of chips."""
    prompt = prefill_cost(LLAMA_8B, context).total()
    answer = decode_cost(LLAMA_8B, batch, context).total()
    moved = answer.weight_bytes + answer.kv_bytes
    computing = prompt.flops / (COMPUTE * device.peak_flops)
    decoding = max(
        answer.flops / (COMPUTE * device.peak_flops), moved / (MEMORY * device.memory_bandwidth)
    )
    return context / computing / device.power_watts, batch / decoding / device.power_watts


def crossover(rates: Mapping[float, Mapping[str, float]]) -> float | None:
    """The loosest limit from which on, to the tightest, the pool with LPUs carries most a watt."""
    last = None
    for tpot in sorted(rates):
        best = max(rates[tpot][name] for name in GPUS)
        if rates[tpot][WITH_LPUS] <= best:
            break
        last = tpot
    return last


def reproduce(settings: Settings) -> Findings:
    rates = all_rates(settings)
    slower = carried(TPOTS[0], settings, SLOWER)[WITH_OVERHEAD]
    wins_from = crossover(rates)
    loose, tight = rates[TPOTS[0]], rates[TPOTS[-1]]
    best_loose = max(loose, key=loose.__getitem__)
    best_gpus = {tpot: max(one[name] for name in GPUS) for tpot, one in rates.items()}
    kinds = [name for name in GPUS if "prefill" in name]
    same = [name for name in GPUS if name not in kinds]
    mixed_gain = max(loose[name] for name in kinds) / max(loose[name] for name in same)
    where = (
        "at none of these limits"
        if wins_from is None
        else f"at {wins_from * 1e3:g} ms a token and less"
    )
    return Findings(
        basis=f"simulated, step times of data sheets ({MEMORY:.0%} of each bandwidth, {COMPUTE:.0%}"
        " of each FLOP/s, nothing for communication): Llama 3.1 8B in bfloat16, prompts of 750 and "
        f"answers of 230 tokens, TTFT {TTFT * 1e3:.0f} ms, no gap above "
        f"{GAP * 1e3:.0f} ms, seed {seeds(settings, 1)[0]}",
        verdict=f"decode on SRAM chips carries more a watt {where}; at {TPOTS[0] * 1e3:.0f} ms "
        f"{best_loose} carries most",
        reproduction=f"at {TPOTS[0] * 1e3:.0f} ms a token the best pool of GPUs carries "
        f"{best_gpus[TPOTS[0]]:.1f} requests/s a kW and GPUs with {NUM_LPUS} LPUs "
        f"{loose[WITH_LPUS]:.1f}; at {TPOTS[-1] * 1e3:g} ms it is {best_gpus[TPOTS[-1]]:.1f} "
        f"against {tight[WITH_LPUS]:.1f}. The LPUs carry more a watt {where}.",
        breaking=f"communication. The LPUs' floor is a few microseconds a step, because {NUM_LPUS} "
        f"chips read at once; with {OVERHEAD * 1e3:g} ms a step for talking to each other the same "
        f"pool carries {slower:.1f} instead of {loose[WITH_LPUS]:.1f} at "
        f"{TPOTS[0] * 1e3:.0f} ms. And a loose limit: there two kinds of GPUs carry "
        f"{mixed_gain:.2f}× what one kind carries a watt; batches do what fast memory would.",
        honest=(
            "A ridge point says which phase suits a chip at batch 1. A batch moves GPUs towards "
            "their ridge: that is why they decode well when nobody is in a hurry.",
            f"SRAM buys latency and costs capacity: {NUM_LPUS} chips hold "
            f"{NUM_LPUS * LPU.memory_bytes / 1e9:.0f} GB, one H200 holds "
            f"{H200.memory_bytes / 1e9:.0f}, and long contexts need more of them.",
            "Prices, software and cooling are not here; power is the data sheet's. Both are floors "
            "and flatter the machine with more chips.",
        ),
        tables=(
            Table(
                "requests/s a kilowatt, by the limit on the time a token",
                {"": "", **{f"{tpot * 1e3:g} ms": ".2f" for tpot in TPOTS}},
                tuple((name, *(rates[tpot][name] for tpot in TPOTS)) for name in POOLS),
            ),
            Table(
                "tokens a joule at full power, context 1,024 (arithmetic)",
                {
                    "": "",
                    "ridge, FLOP/byte": ".0f",
                    "prompt": ".1f",
                    "answer, batch 1": ".2f",
                    "batch 8": ".2f",
                    "batch 256": ".1f",
                },
                tuple(
                    (
                        device.name,
                        device.ridge_point,
                        per_joule(device, 1)[0],
                        *(per_joule(device, batch)[1] for batch in (1, 8, 256)),
                    )
                    for device in (A100, H100, H200, LPU)
                ),
            ),
        ),
        panels=(
            CurvePanel(
                "What a kilowatt carries, by how fast tokens must come",
                "mean time a token at most, ms",
                "requests/s a kW",
                tuple(
                    Curve.of(name, {tpot * 1e3: rates[tpot][name] for tpot in TPOTS})
                    for name in POOLS
                ),
                log="x",
            ),
            BarPanel(
                "Tokens a joule of decode, context 1,024 (arithmetic)",
                "tokens/J",
                tuple(device.name for device in (A100, H100, H200, LPU)),
                {
                    f"batch {batch}": tuple(
                        per_joule(device, batch)[1] for device in (A100, H100, H200, LPU)
                    )
                    for batch in (1, 8, 256)
                },
                log="x",
            ),
        ),
        values={
            "crossover_ms": 0.0 if wins_from is None else wins_from * 1e3,
            "gpus_loose": best_gpus[TPOTS[0]],
            "lpus_loose": loose[WITH_LPUS],
            "gpus_tight": best_gpus[TPOTS[-1]],
            "lpus_tight": tight[WITH_LPUS],
            "lpus_loose_with_overhead": slower,
            "two_kinds_of_gpus": mixed_gain,
        },
    )


CLAIM = Claim(
    name="heterogeneous",
    statement="each phase belongs on its own kind of chip: prefill on GPUs, decode on fast memory",
    sources=(TALK, SPLITWISE),
    reproduce=reproduce,
    code=(
        ("minifer/claims/chip_pools.py", "the pools"),
        ("minifer/perf/devices.py", "what chips can do, with sources"),
        ("minifer/simulation/steps/roofline.py", "how long their steps take at best"),
    ),
)
