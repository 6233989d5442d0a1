"""The modelled tables of a loop model whose core stays in L2: sizes, chips, depths, assumptions.

`study` computes everything as JSON-ready data, `markdown` writes it for people. As in `tables.py`
the overhead of an instruction decides most, so there is a table of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from typing import Any

from minifer import __version__
from minifer.config import ModelConfig
from minifer.perf.devices import find_device
from minifer.perf.timeline.decode import Assumptions
from minifer.perf.timeline.loop_resident import (
    ARMS,
    L2_BANDWIDTH,
    LAUNCHES_RESIDENT,
    MEGAKERNEL,
    MODELS,
    RESIDENT,
    Cache,
    LoopStep,
    loop_times,
    resident_layers,
    weight_bytes,
)

CHIPS = ("A100-80GB-SXM", "H100-SXM", "H200-SXM", "B200")
DEPTHS = (1, 4, 8, 16)
LOOPS = 8  # iterations, where a table has one depth: what the models were trained with
OVERHEADS = (0.0, 0.3, 0.6, 1.2, 2.5)  # µs
OVERHEAD_CHIPS = ("H100-SXM", "B200")
SHARES = (1.0, 0.75, 0.5, 0.25)
LABEL = "modelled; nothing of this has run on a GPU"
_MIB = 2.0**20


def study(
    configs: dict[str, ModelConfig],
    progress: Callable[[str], None] = lambda name: None,
    models: Sequence[str] = MODELS,
    chips: Sequence[str] = CHIPS,
) -> dict[str, Any]:
    """All tables, of `configs` by name. progress: is told each part's name before it is computed.
    About three minutes."""
    small, chip = configs[models[0]], find_device("H100-SXM")
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "traffic": lambda: _traffic(configs, models, chips),
        "steps": lambda: _steps(configs, models, chips),
        "overheads": lambda: _overheads(small, [c for c in chips if c in OVERHEAD_CHIPS]),
        "l2_bandwidths": lambda: _l2_bandwidths(small, chips),
        "shares": lambda: _shares(configs, models[:2], chips),
        "batches": lambda: _batches(small, chip.name),
    }
    data: dict[str, Any] = {
        "what": f"MODELLED, not measured: {LABEL}",
        "command": "minifer kernels timeline --loop-table --json loop_resident.json",
        "date": date.today().isoformat(),
        "versions": {"minifer": __version__, "python": sys.version.split()[0]},
        "assumptions": asdict(Assumptions()) | {"l2": asdict(Cache())},
        "l2_bandwidth": dict(L2_BANDWIDTH),
    }
    for name, compute in parts.items():
        progress(name)
        data[name] = list(compute())
    return data


def cell(
    arm: str,
    step: LoopStep,
    device: str,
    *,
    overhead_us: float | None = None,
    cache: Cache | None = None,
) -> dict[str, float]:
    """One modelled number. ms: of a step. tokens_per_second: of all its requests together."""
    assumed = Assumptions()
    if overhead_us is not None:
        assumed = replace(assumed, overhead=overhead_us * 1e-6)
    # of another depth, so that all depths share one simulation
    times = loop_times(
        arm, replace(step, num_loops=1), find_device(device), assumed, cache or Cache()
    )
    seconds = times.seconds(step.num_loops)
    return {"ms": round(seconds * 1e3, 4), "tokens_per_second": round(step.batch / seconds)}


def _traffic(
    configs: dict[str, ModelConfig], models: Sequence[str], chips: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Weights read from memory for a token, counted in the modelled steps, and what L2 keeps."""
    for model in models:
        step = LoopStep(configs[model], LOOPS)
        once, again = (weight_bytes(replace(step, num_loops=loops)) for loops in (1, LOOPS))
        yield {
            "model": model,
            "unique_mib": round(once / _MIB, 1),
            "re_read_mib": round(again / _MIB, 1),
            "core_mib": round(step.core_bytes / _MIB, 1),
            "core_layers": step.loop.core,
            "kept": {chip: resident_layers(step, find_device(chip)) for chip in chips},
        }


def _steps(
    configs: dict[str, ModelConfig], models: Sequence[str], chips: Sequence[str]
) -> Iterator[dict[str, Any]]:
    for model in models:
        for chip in chips:
            for loops in DEPTHS:
                for arm in ARMS:
                    key = {"model": model, "device": chip, "loops": loops, "arm": arm}
                    yield key | cell(arm, LoopStep(configs[model], loops), chip)


def _overheads(config: ModelConfig, chips: Sequence[str]) -> Iterator[dict[str, Any]]:
    for chip in chips:
        for overhead in OVERHEADS:
            for arm in ARMS:
                key = {"device": chip, "overhead_us": overhead, "arm": arm}
                yield key | cell(arm, LoopStep(config, LOOPS), chip, overhead_us=overhead)


def _l2_bandwidths(config: ModelConfig, chips: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Times the assumed bandwidth of L2."""
    for chip in chips:
        for factor in (0.5, 1.0, 2.0):
            cache = Cache(bandwidth=factor * L2_BANDWIDTH[chip])
            key = {"device": chip, "factor": factor, "arm": RESIDENT}
            yield key | cell(RESIDENT, LoopStep(config, LOOPS), chip, cache=cache)


def _shares(
    configs: dict[str, ModelConfig], models: Sequence[str], chips: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The cliff: how many layers stay when less of L2 can be pinned."""
    for model in models:
        for chip in chips:
            for share in SHARES:
                step, cache = LoopStep(configs[model], LOOPS), Cache(share=share)
                kept = resident_layers(step, find_device(chip), cache)
                key = {"model": model, "device": chip, "share": share, "kept": kept}
                yield key | {"arm": RESIDENT} | cell(RESIDENT, step, chip, cache=cache)


def _batches(config: ModelConfig, chip: str) -> Iterator[dict[str, Any]]:
    for context in (512, 2048):
        for batch in (1, 4, 16):
            for arm in ARMS:
                step = LoopStep(config, LOOPS, batch=batch, context=context)
                key = {"context": context, "batch": batch, "arm": arm}
                yield key | cell(arm, step, chip)


# -- for people


def markdown(data: dict[str, Any]) -> str:
    """The tables of `study`, of which nothing is a measurement."""
    a = data["assumptions"]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [
        "# A looped core that stays on the chip: modelled decode steps of Parcae",
        "",
        f"**{LABEL[0].upper()}{LABEL[1:]}.** Made by `{data['command']}` on {data['date']} "
        f"({versions}).",
        "The model is `minifer/perf/timeline/loop_resident.py`; the ways that are compared are "
        "described there. Unless a table says otherwise: bfloat16, batch 1, context 512, every "
        "iteration with keys and values of its own, tile 16, "
        f"{a['overhead'] * 1e6:g} µs overhead an instruction or block, {a['gap'] * 1e6:g} µs "
        f"between the kernels of a CUDA graph, {a['pdl_gap'] * 1e6:g} µs with PDL, "
        f"{a['in_flight'] / 1024:g} KiB in flight an SM at {a['latency'] * 1e6:g} µs from memory "
        f"and {a['l2']['latency'] * 1e6:g} µs from L2, {a['l2']['share']:.0%} of L2 can be pinned. "
        f"All of these but the shapes are assumptions. {_l2_line(data)}",
        *_title("What is read from memory for a token, and what L2 keeps"),
        *_traffic_lines(data["traffic"]),
        *_title("Size × chip × depth T"),
        "Each cell: ms a token · tokens a second. Every iteration after the second takes the same "
        "time, so all depths come from simulations of one and of four.",
        "",
        *_pivot(data["steps"], ["model", "device", "loops"], ["model", "chip", "T"]),
        "",
        *_reading(data),
    ]
    for part, (title, text, down, heads) in _PARTS.items():
        lines += [*_title(title), text, "", *_pivot(data[part], down, heads)]
    lines += [*_title("What the model leaves out"), _LEFT_OUT]
    return "\n".join(lines) + "\n"


_PARTS = {
    "overheads": (
        f"Over the overhead of an instruction, Parcae-140M, T = {LOOPS}",
        "With no overhead at all bytes are what is left. The more an instruction costs, the less "
        "it matters where its bytes come from.",
        ["device", "overhead_us"],
        ["chip", "overhead µs"],
    ),
    "l2_bandwidths": (
        f"Over the bandwidth of L2, times what is assumed, Parcae-140M, T = {LOOPS}",
        "Half of it takes back nearly all that residency gains on an H200, whose L2 is assumed "
        "hardly faster than its memory, and little on a B200.",
        ["device", "factor"],
        ["chip", "factor"],
    ),
    "shares": (
        f"The cliff: over the part of L2 that can be pinned, T = {LOOPS}",
        "Kept: layers of the core that stay. An L2 of two partitions may hold a line twice; then "
        "half of it is what counts.",
        ["model", "device", "share", "kept"],
        ["model", "chip", "share", "kept"],
    ),
    "batches": (
        f"Batch × context, Parcae-140M on an H100, T = {LOOPS}",
        "Weights are read once for the whole batch, keys and values for each request and "
        "iteration: soon they are most of the bytes.",
        ["context", "batch"],
        ["context", "batch"],
    ),
}
_LEFT_OUT = """\
- Arithmetic, instruction issue, and the work of a batch above 1: only bytes count.
- Everything that `modelled_bandwidth.md` lists, which uses the same model.
- Misses of what should stay in L2: no replacement policy is modelled, only how much fits.
- The core may stay from one token to the next: then memory is not read for it at all.
- Plain launches may find a core that fits in L2 without asking for it: "launches" always re-reads.
- Rows that stay in an SM's own registers or shared memory, which is faster than L2.
- Value embeddings (a row a table), their gates, and norms: below 0.1 % of the bytes.
- Whether the loops of a batch agree: all requests run T iterations."""


def _l2_line(data: dict[str, Any]) -> str:
    rates = ", ".join(f"{chip} {rate / 1e12:g}" for chip, rate in data["l2_bandwidth"].items())
    return f"L2 in TB/s: {rates}."


def _traffic_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    chips = list(rows[0]["kept"])
    heads = ["model", "core MiB", "unique MiB", f"re-read MiB, T = {LOOPS}"]
    heads += [f"layers kept, {chip}" for chip in chips]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["model"]]
        cells += [f"{row[key]:,.0f}" for key in ("core_mib", "unique_mib", "re_read_mib")]
        cells += [f"{row['kept'][chip]} of {row['core_layers']}" for chip in chips]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _reading(data: dict[str, Any]) -> list[str]:
    """What the main table says, in numbers from it."""
    ms = {(r["model"], r["device"], r["loops"], r["arm"]): r["ms"] for r in data["steps"]}
    model, chip = data["steps"][0]["model"], "H100-SXM"
    traffic = data["traffic"][0]

    def at(arm: str) -> float:
        return float(ms[model, chip, LOOPS, arm])

    no_overhead = {
        r["arm"]: r["ms"]
        for r in data["overheads"]
        if r["device"] == chip and r["overhead_us"] == 0
    }
    return [
        f"{model} on an {chip} at T = {LOOPS}: to keep the core reads "
        f"{traffic['re_read_mib'] / traffic['unique_mib']:.1f} times fewer bytes of weights from "
        f"memory and makes the megakernel {at(MEGAKERNEL) / at(RESIDENT):.2f} times as fast "
        f"({no_overhead[MEGAKERNEL] / no_overhead[RESIDENT]:.2f} times if instructions cost "
        f"nothing). One launch instead of many, both with the core in L2, makes "
        f"{at(LAUNCHES_RESIDENT) / at(RESIDENT):.2f}. A model this small waits for instructions "
        "more than for bytes."
    ]


def _title(text: str) -> list[str]:
    return ["", f"## {text}", ""]


def _pivot(rows: Sequence[dict[str, Any]], down: list[str], heads: list[str]) -> list[str]:
    """One line for each combination of `down`, one column an arm."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    table: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        line = table.setdefault(tuple(row[name] for name in down), [])
        line.append(f"{row['ms']:.3f} · {row['tokens_per_second']:,}")
    lines = ["| " + " | ".join([*heads, *arms]) + " |", "|---" * (len(heads) + len(arms)) + "|"]
    lines += ["| " + " | ".join([*map(str, key), *cells]) + " |" for key, cells in table.items()]
    return lines
