"""Prefill on one kind of chip, decode on another: where it wins a watt, and where it does not.

A chip's ridge point says for which phase it was built: hundreds of FLOPs a byte of a GPU suit
prefill, a few of a chip that keeps everything in SRAM suit decode at small batches. Pools of both
are simulated at the floors of their data sheets, and compared by requests a second and kilowatt,
under limits on the time per token from loose to tight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minifer.claims.claim import BarPanel, Claim, Curve, CurvePanel, Findings, Settings, Table
from minifer.claims.one_gpu import Requests
from minifer.claims.shapes import LLAMA_8B
from minifer.claims.sources import SPLITWISE, TALK
from minifer.claims.studies import seeds
from minifer.config import EngineConfig
from minifer.perf.costs import decode_cost, kv_bytes_per_token, num_parameters, prefill_cost
from minifer.perf.devices import DEVICES, Device
from minifer.routing.policy import Role
from minifer.simulation.cluster import Cluster, Link, NodeSpec
from minifer.simulation.roofline_steps import RooflineSteps
from minifer.simulation.search import Limit, Study, find_capacities

A100, H100, H200 = DEVICES["A100-80GB-SXM"], DEVICES["H100-SXM"], DEVICES["H200-SXM"]
LPU = DEVICES["Groq-LPU-v1"]
COMPUTE, MEMORY = 0.5, 0.7  # of each data sheet's rates, of every chip
NUM_LPUS = 128  # hold 16 GB of weights and 100,000 tokens of KV
TOGETHER = 8  # H100s that prefill one prompt together
LINK = 50e9  # bytes/s
TTFT = 0.4
TPOTS = (0.05, 0.02, 0.01, 0.005, 0.001)  # seconds a token, mean of a request
OVERHEAD = 0.5e-3  # s a step, for the setting that breaks it: chips that talk to each other
KV_BYTES = kv_bytes_per_token(LLAMA_8B)
_BLOCK = 64
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Pool:
    """watts: of all chips at full power. count: requests of a run, more where more are served."""

    cluster: Cluster
    watts: float
    count: int = 600


def _node(
    name: str, device: Device, role: Role, *, chips: int = 1, budget: int = 512, fixed: float = 0.0
) -> NodeSpec:
    free = chips * device.memory_bytes - 2 * num_parameters(LLAMA_8B)
    config = EngineConfig(
        block_size=_BLOCK,
        num_kv_blocks=int(0.95 * free / KV_BYTES) // _BLOCK,
        max_num_seqs=512,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=role is not Role.PREFILL,
        enable_prefix_caching=False,
    )
    steps = RooflineSteps(LLAMA_8B, device, COMPUTE, MEMORY, chips, fixed)
    return NodeSpec(name, steps, config, role)


def _pool(*nodes: NodeSpec, watts: float, count: int = 600) -> Pool:
    cluster = Cluster(nodes, router="least_work", link=Link(LINK), kv_bytes=KV_BYTES)
    return Pool(cluster, watts, count)


def _with_lpus(fixed: float = 0.0) -> Pool:
    prefill = [
        _node(f"prefill{i}", H100, Role.PREFILL, chips=TOGETHER, budget=2048) for i in range(10)
    ]
    lpus = _node("decode", LPU, Role.DECODE, chips=NUM_LPUS, fixed=fixed)
    watts = len(prefill) * TOGETHER * H100.power_watts + NUM_LPUS * LPU.power_watts
    return _pool(*prefill, lpus, watts=watts, count=2_000)


WITH_LPUS, WITH_OVERHEAD = "80 H100 prefill, 128 LPUs decode", "the same, 0.5 ms more a step"
GPUS: Mapping[str, Pool] = {
    "H100 does both": _pool(_node("gpu", H100, Role.MIXED), watts=H100.power_watts),
    "8 H100 as one do both": _pool(
        _node("gpus", H100, Role.MIXED, chips=8), watts=8 * H100.power_watts
    ),
    "H100 prefill, 2 A100 decode": _pool(
        _node("prefill", H100, Role.PREFILL),
        *(_node(f"decode{i}", A100, Role.DECODE) for i in range(2)),
        watts=H100.power_watts + 2 * A100.power_watts,
    ),
    "H100 prefill, H200 decode": _pool(
        _node("prefill", H100, Role.PREFILL),
        _node("decode", H200, Role.DECODE),
        watts=H100.power_watts + H200.power_watts,
    ),
}
POOLS: Mapping[str, Pool] = {
    **GPUS,
    WITH_LPUS: _with_lpus(),
    WITH_OVERHEAD: _with_lpus(OVERHEAD),
}


def carried(
    tpot: float, settings: Settings, pools: Mapping[str, Pool] | None = None
) -> dict[str, float]:
    """Pool → requests a second and kilowatt, with 90 % within `TTFT` and `tpot`, and prefill nodes
    that keep up: a run of seconds ends before a queue shows."""
    pools = POOLS if pools is None else pools
    found = find_capacities(
        {
            name: Study(pool.cluster, Requests(pool.count), slo={"ttft": TTFT, "tpot": tpot})
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

    What a pool carries cannot fall as the limit gets looser: where the tightest limit allows as
    much as the loosest, the ones between need no search.
    """
    fast = {name: POOLS[name] for name in (WITH_LPUS, WITH_OVERHEAD)}
    rates = {TPOTS[0]: carried(TPOTS[0], settings)}
    tightest = carried(TPOTS[-1], settings)
    for tpot in TPOTS[1:-1]:
        same = {
            name: tightest[name]
            for name in fast
            if tightest[name] >= (1 - _TOLERANCE) * rates[TPOTS[0]][name]
        }
        others = {name: pool for name, pool in POOLS.items() if name not in same}
        found = carried(tpot, settings, others) | same
        rates[tpot] = {name: found[name] for name in POOLS}
    rates[TPOTS[-1]] = tightest
    return rates


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
    wins_from = crossover(rates)
    loose, tight = rates[TPOTS[0]], rates[TPOTS[-1]]
    best_loose = max(loose, key=loose.__getitem__)
    best_gpus = {tpot: max(one[name] for name in GPUS) for tpot, one in rates.items()}
    kinds = [name for name in GPUS if "prefill" in name]
    same = [name for name in GPUS if name not in kinds]
    mixed_gain = max(loose[name] for name in kinds) / max(loose[name] for name in same)
    where = "at none of these limits" if wins_from is None else f"from {wins_from * 1e3:g} ms down"
    return Findings(
        basis=f"simulated, step times of data sheets ({MEMORY:.0%} of each bandwidth, {COMPUTE:.0%}"
        " of each FLOP/s, nothing for communication): Llama 3.1 8B in bfloat16, prompts of 750 and "
        f"answers of 230 tokens, TTFT {TTFT * 1e3:.0f} ms, seed {seeds(settings, 1)[0]}",
        verdict=f"decode on SRAM chips wins a watt {where} a token; at {TPOTS[0] * 1e3:.0f} ms "
        f"{best_loose} carries most",
        reproduction=f"at {TPOTS[0] * 1e3:.0f} ms a token the best pool of GPUs carries "
        f"{best_gpus[TPOTS[0]]:.1f} requests/s a kW and GPUs with {NUM_LPUS} LPUs "
        f"{loose[WITH_LPUS]:.1f}; at {TPOTS[-1] * 1e3:g} ms it is {best_gpus[TPOTS[-1]]:.1f} "
        f"against {tight[WITH_LPUS]:.1f}. The LPUs carry more a watt {where}.",
        breaking=f"communication. The LPUs' floor is a few microseconds a step, because {NUM_LPUS} "
        f"chips read at once; with {OVERHEAD * 1e3:g} ms a step for talking to each other the same "
        f"pool carries {loose[WITH_OVERHEAD]:.1f} instead of {loose[WITH_LPUS]:.1f} at "
        f"{TPOTS[0] * 1e3:.0f} ms. And a loose limit: with two kinds of GPUs instead of one a watt "
        f"carries {mixed_gain:.2f}×, batches do what fast memory would.",
        honest=(
            "A ridge point says which phase suits a chip at batch 1. A batch moves GPUs towards "
            "their ridge: that is why they decode well when nobody is in a hurry.",
            f"SRAM buys latency and costs capacity: {NUM_LPUS} chips hold what a fifth of one "
            "B200 holds, and long contexts need more of them.",
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
                    Curve(
                        name,
                        tuple(tpot * 1e3 for tpot in TPOTS),
                        tuple(rates[tpot][name] for tpot in TPOTS),
                    )
                    for name in POOLS
                ),
                log="x",
                x_marks={} if wins_from is None else {"LPUs win below": wins_from * 1e3},
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
            "lpus_loose_with_overhead": loose[WITH_OVERHEAD],
            "two_kinds_of_gpus": mixed_gain,
        },
    )


CLAIM = Claim(
    name="heterogeneous",
    statement="each phase belongs on its own kind of chip: prefill on GPUs, decode on fast memory",
    sources=(TALK, SPLITWISE),
    reproduce=reproduce,
    code=(
        ("minifer/perf/devices.py", "what chips can do, with sources"),
        ("minifer/simulation/roofline_steps.py", "how long their steps take at best"),
    ),
)
