"""The modelled tables of a Llama-1B decode step: over the overhead, the tile, and much else.

`study` computes everything as JSON-ready data, `markdown` writes it for people. One number would
say more than a model knows: the overhead of an instruction is the one thing that decides, and only
a GPU can tell it. What others have measured stands beside the model, with its source.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import date
from typing import Any

from minifer import __version__
from minifer.kernels.mega.isa import DecodeShape
from minifer.kernels.mega.schedule import POLICIES
from minifer.kernels.mega.shapes import MODELS, decode_shape, kv_splits
from minifer.perf.devices import find_device
from minifer.perf.timeline.decode import (
    AHEAD,
    COUNTERS,
    FUSED,
    FUSED_PDL,
    GRID,
    PREFETCH,
    UNFUSED,
    Assumptions,
    panel,
    useful_bytes,
)

MODEL = "llama-1b"
CHIPS = ("H100-SXM", "H200-SXM")
OVERHEADS = (0.5, 0.8, 1.2, 1.8, 2.5)  # µs
TILES = (8, 16, 32)
MEGAKERNELS = (COUNTERS, PREFETCH, AHEAD)

_BLOG = "HazyResearch, 'Look Ma, No Bubbles!', 27 May 2025"
_STUDY = "github.com/msaroufim/megakernels-vs-cuda-graphs, September 2026"
_STREAM = "github.com/RightNow-AI/AutoMegaKernel, June 2026: a stream of 3,089 GB/s on an H100"
# Llama-3.2-1B in bfloat16, batch 1, a prompt of 32 tokens and some 128 more: on average 96.
REPORTED_CONTEXT = 96
REPORTED: tuple[dict[str, Any], ...] = (
    {"what": "Hazy's megakernel", "device": "H100-SXM", "share": 0.78, "source": _BLOG},
    {"what": "Hazy's megakernel", "device": "H100-SXM", "us": 972.8, "source": _STUDY},
    {"what": "Hazy's megakernel", "device": "H200-SXM", "us": 759.8, "source": _STUDY},
    {"what": "CUDA graph, PDL", "device": "H100-SXM", "us": 979.5, "source": _STUDY},
    {"what": "CUDA graph, PDL", "device": "H200-SXM", "us": 794.7, "source": _STUDY},
)
ACHIEVABLE = (1.0, 0.92)  # the second: 3,089 of 3,350 GB/s, see _STREAM


def cell(
    device: str,
    arm: str,
    *,
    tile: int = 16,
    batch: int = 1,
    context: int = 512,
    policy: str = "list",
    pieces: int = 1,
    **assumed: float,
) -> dict[str, Any]:
    """One modelled number. assumed: fields of `Assumptions`.

    us: of a step. share: of the data sheet's bandwidth, counting weights and KV cache.
    """
    chip = find_device(device)
    if chip.num_sms is None:
        raise ValueError(f"device must be a GPU with SMs, got {chip.name}")
    shape = _shape(batch, context, chip.num_sms, tile)
    drawn = panel(arm, shape, chip, context, Assumptions(**assumed), policy=policy, pieces=pieces)
    seconds = drawn.timeline.seconds
    share = useful_bytes(shape, context) / (chip.memory_bandwidth * seconds)
    return {"us": round(seconds * 1e6, 1), "share": round(share, 4)}


def _shape(batch: int, context: int, num_sms: int, tile: int) -> DecodeShape:
    config = MODELS[MODEL]
    splits = kv_splits(context, batch, config.num_kv_heads, num_sms)
    return decode_shape(config, batch, splits, tile)


def implied_overhead(device: str, arm: str, us: float, achievable: float) -> float | None:
    """The overhead in µs at which the model takes as long as what was reported; None: none does.

    The time is nearly a straight line in the overhead, so the secant is there in a few steps.
    """

    def modelled(overhead: float) -> float:
        at = cell(
            device, arm, context=REPORTED_CONTEXT, overhead=overhead * 1e-6, achievable=achievable
        )
        return float(at["us"])

    low, high = 0.0, 3.0
    at_low, at_high = modelled(low), modelled(high)
    if at_low > us:
        return None
    for _ in range(3):
        guess = low + (us - at_low) * (high - low) / (at_high - at_low)
        value = modelled(guess)
        if abs(value - us) < 0.5:
            break
        if value < us:
            low, at_low = guess, value
        else:
            high, at_high = guess, value
    return round(guess, 2)


def study(progress: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """All tables. progress: is told each part's name before it is computed. About two minutes."""
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "bandwidth": _bandwidth,
        "reported": _reported,
        "arms": _arms,
        "waves": _waves,
        "instruction_size": _instruction_size,
        "policies": _policies,
        "batches": _batches,
    }
    data: dict[str, Any] = {
        "what": "MODELLED, not measured: minifer/perf/timeline/model.py",
        "command": "minifer kernels timeline --table --json modelled_bandwidth.json",
        "date": date.today().isoformat(),
        "versions": {"minifer": __version__, "python": sys.version.split()[0]},
        "model": MODEL,
        "assumptions": asdict(Assumptions()),
    }
    for name, compute in parts.items():
        progress(name)
        data[name] = compute()
    return data


def _rows(keys: Iterable[dict[str, Any]], **fixed: Any) -> list[dict[str, Any]]:
    """Each key with the cell it names; overhead_us and in_flight_kib are in a reader's units."""
    rows = []
    for key in keys:
        options = dict(key) | fixed
        for name, field, unit in (
            ("overhead_us", "overhead", 1e-6),
            ("in_flight_kib", "in_flight", 1024),
        ):
            if name in options:
                options[field] = options.pop(name) * unit
        rows.append(key | cell(**options))
    return rows


def _bandwidth() -> list[dict[str, Any]]:
    return _rows(
        {"device": device, "overhead_us": overhead, "tile": tile, "arm": arm}
        for device in CHIPS
        for overhead in OVERHEADS
        for tile in TILES
        for arm in MEGAKERNELS
    )


def _arms() -> list[dict[str, Any]]:
    return _rows(
        {"device": device, "overhead_us": overhead, "arm": arm}
        for device in CHIPS
        for overhead in OVERHEADS
        for arm in (UNFUSED, FUSED, FUSED_PDL)
    )


def _reported() -> list[dict[str, Any]]:
    rows = []
    for entry in REPORTED:
        chip = find_device(entry["device"])
        peak_us = useful_bytes(_shape(1, REPORTED_CONTEXT, chip.num_sms or 1, 16), REPORTED_CONTEXT)
        peak_us *= 1e6 / chip.memory_bandwidth
        us = entry.get("us") or peak_us / entry["share"]
        arms = (FUSED_PDL,) if "graph" in entry["what"] else MEGAKERNELS
        implied = {
            f"{arm} at {achievable:.0%}": implied_overhead(chip.name, arm, us, achievable)
            for arm in arms
            for achievable in ACHIEVABLE
        }
        row = {"us": round(us, 1), "share": round(peak_us / us, 4), "implied_overhead_us": implied}
        rows.append(entry | row)
    return rows


def _waves() -> list[dict[str, Any]]:
    return _rows(
        (
            {"in_flight_kib": in_flight, "tile": tile, "arm": arm}
            for in_flight in (18, 24, 48)
            for tile in TILES
            for arm in (COUNTERS, PREFETCH)
        ),
        device="H100-SXM",
    )


def _instruction_size() -> list[dict[str, Any]]:
    keys = ({"pieces": pieces, "arm": arm} for pieces in (1, 2, 4) for arm in MEGAKERNELS)
    return _rows(keys, device="H100-SXM", tile=8)


def _policies() -> list[dict[str, Any]]:
    keys = (
        {"policy": policy, "arm": arm}
        for policy in POLICIES
        if policy != "random"
        for arm in (GRID, *MEGAKERNELS)
    )
    return _rows(keys, device="H100-SXM")


def _batches() -> list[dict[str, Any]]:
    keys = (
        {"batch": batch, "context": context, "arm": arm}
        for batch in (1, 4, 16)
        for context in (512, 4096, 32768)
        for arm in (FUSED, FUSED_PDL, COUNTERS, PREFETCH)
    )
    return _rows(keys, device="H100-SXM")


# -- for people


def markdown(data: dict[str, Any]) -> str:
    """The tables of `study`, of which nothing is a measurement of ours."""
    a = replace(Assumptions(), **data["assumptions"])
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [
        "# Modelled time and bandwidth of a Llama-1B decode step",
        "",
        f"**Modelled, not measured**, by `{data['command']}` on {data['date']} ({versions}).",
        "The model is `minifer/perf/timeline/model.py`. Each cell: share of the data sheet's "
        "bandwidth (weights and KV cache ÷ time) · µs a step.",
        "Unless a table says otherwise: bfloat16, batch 1, context 512, tile 16, list scheduling, "
        f"{a.overhead * 1e6:g} µs overhead an instruction, {a.in_flight / 1024:g} KiB in flight an "
        f"SM at {a.latency * 1e6:g} µs latency, {a.prefetch / 1024:g} KiB prefetch, "
        f"{a.gap * 1e6:g} µs between the kernels of a CUDA graph, {a.pdl_gap * 1e6:g} µs with PDL.",
    ]
    for device in CHIPS:
        lines += _title(f"{device}: overhead × tile")
        lines.append("Three columns a tile: no prefetch, prefetch while waiting, loads ahead.\n")
        rows = [row for row in data["bandwidth"] if row["device"] == device]
        columns = [(tile, arm) for tile in TILES for arm in MEGAKERNELS]
        heads = [f"{tile}, {_short(arm)}" for tile, arm in columns]
        lines += _pivot(rows, ["overhead_us"], ["tile", "arm"], ["overhead µs", *heads])
    lines += _title("The same step as launches")
    lines += _pivot(
        data["arms"],
        ["device", "overhead_us"],
        ["arm"],
        ["device", "overhead µs", UNFUSED, FUSED, FUSED_PDL],
    )
    lines += _reported_lines(data)
    titles = {
        "waves": "Wave quantisation: bytes in flight × tile, H100",
        "instruction_size": "More, smaller instructions: pieces of an operation an SM, H100, "
        "tile 8",
        "policies": "Who gets what: policy × synchronisation, H100",
        "batches": "Batch × context, H100",
    }
    for part, title in titles.items():
        lines += [*_title(title), _SAYS[part], ""]
        names = [key for key in data[part][0] if key not in ("arm", "us", "share")]
        arms = list(dict.fromkeys(row["arm"] for row in data[part]))
        heads = [name.replace("_kib", " KiB").replace("_", " ") for name in names]
        lines += _pivot(data[part], names, ["arm"], [*heads, *arms])
    lines += [*_title("What the model leaves out"), _LEFT_OUT]
    return "\n".join(lines) + "\n"


_SAYS = {
    "waves": "At tile 32 the output and down projections have 64 tiles for 132 SMs. That costs "
    "where 64 SMs cannot fill the memory: with few bytes in flight. With 48 KiB they can.",
    "instruction_size": "Twice the instructions pay twice the overhead. Only loads that run ahead "
    "hide it.",
    "policies": "Nearly all waits are for a whole operation: the model cannot tell such counters "
    "from grid barriers, whose own cost is in the overhead of both. Each operation has about one "
    "piece an SM, so that any policy which gives no SM two of them does as well.",
    "batches": "Weights are read once whatever the batch; the KV cache grows with both. The model "
    "has no arithmetic, and batch 16 needs tensor cores to keep up.",
}
_LEFT_OUT = """\
- Arithmetic, instruction issue, and the work of a batch above 1: only bytes count.
- Activations and counters, which live in L2, and L2 hits of anything else.
- The difference between a barrier, a counter and a kernel's start: all are in the one overhead.
- What prefetched weights displace, in L2 or in registers; loads ahead have no limit but their size.
- Real grids: several blocks an SM hide a part of the overhead that launches are charged here.
- DRAM: refresh, row misses, read-write turns. `achievable` stands for them, 1 unless stated.
- Clocks, power, other work on the chip, the spread from run to run.
- Latency that grows with load: bytes in flight ÷ a constant is what one SM can draw."""


def _reported_lines(data: dict[str, Any]) -> list[str]:
    lines = _title("Reported by others, and the overhead at which the model says the same")
    lines += [
        f"Context {REPORTED_CONTEXT}. Overheads in µs an instruction (or block), with all of the "
        f"data sheet's bandwidth, and with 92 % of it ({_STREAM}; assumed for the H200 too). "
        "–: the model is slower even without any overhead.",
        "",
        "| reported | device | µs | share | arm of the model | overhead at 100 % | at 92 % |",
        "|---|---|---:|---:|---|---:|---:|",
    ]
    for row in data["reported"]:
        implied = row["implied_overhead_us"]
        for arm in dict.fromkeys(name.rpartition(" at ")[0] for name in implied):
            found = [implied[f"{arm} at {achievable:.0%}"] for achievable in ACHIEVABLE]
            cells = " | ".join("–" if value is None else f"{value:.2f}" for value in found)
            lines.append(
                f"| {row['what']} | {row['device']} | {row['us']:.1f} | {row['share']:.1%} | "
                f"{arm} | {cells} |"
            )
    sources = dict.fromkeys(row["source"] for row in data["reported"])
    return [*lines, "", "Sources: " + "; ".join(sources) + ".", "", *_reading(data)]


def _reading(data: dict[str, Any]) -> list[str]:
    """What the overheads say, and what they do not."""
    found: dict[str, list[float]] = {}
    for row in data["reported"]:
        for arm, overhead in row["implied_overhead_us"].items():
            if overhead is not None and "megakernel" in row["what"]:
                found.setdefault(arm, []).append(overhead)
    ranges = "; ".join(f"{k}: {min(v):.1f} to {max(v):.1f} µs" for k, v in found.items())
    inside = [arm for arm, overheads in found.items() if max(overheads) <= OVERHEADS[-1]]
    return [
        "To say what was reported of Hazy's megakernel, the model needs, by arm and bandwidth, "
        f"{ranges}. The tables above end at {OVERHEADS[-1]:g} µs; they bracket all the reported "
        f"times in these cases: {', '.join(inside) or 'none'}. Hazy's own loads run ahead, so the "
        "model leaves out something that costs as much as the overhead it asks for beyond that. In "
        "each arm the same overhead serves both chips to within half a microsecond, which speaks "
        "for the form of the model; the overhead itself is a fit to these few numbers and no "
        "prediction."
    ]


def _title(text: str) -> list[str]:
    return ["", f"## {text}", ""]


def _short(arm: str) -> str:
    return {COUNTERS: "none", PREFETCH: "prefetch", AHEAD: "ahead"}[arm]


def _pivot(
    rows: Sequence[dict[str, Any]], down: list[str], across: list[str], heads: list[str]
) -> list[str]:
    """One line for each combination of `down`, one column for each of `across`, in their order."""
    table: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        line = table.setdefault(tuple(row[name] for name in down), [])
        line.append(f"{row['share']:.1%} · {row['us']:,.0f}")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    lines += ["| " + " | ".join([*map(str, key), *cells]) + " |" for key, cells in table.items()]
    return lines
