"""`minifer kernels timeline`: what a decode step would look like on a chip. A model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli.parser import add_command
from minifer.cli.session import note
from minifer.kernels.mega.schedule import POLICIES
from minifer.kernels.mega.shapes import MODELS
from minifer.perf.devices import find_device
from minifer.perf.timeline.loop_resident import MODELS as LOOP_MODELS

if TYPE_CHECKING:
    from minifer.perf.timeline.decode import Assumptions
    from minifer.perf.timeline.gantt import Panel

DEFAULTS: dict[str, Any] = {
    "model": "llama-1b",
    "gpu": "h100",
    "batch": 1,
    "context": 512,
    "overhead": 1.2,
    "gap": 1.3,
    "tile": 16,
    "policy": "list",
    "prefetch": 64.0,
    "in_flight": 48.0,
    "latency": 0.7,
    "achievable": 1.0,
    "layers": None,
    "loops": None,
    "out": None,
    "trace": None,
}
_POLICIES = [policy for policy in POLICIES if policy != "random"]


def add(questions: Any) -> None:
    parser = add_command(
        questions,
        "timeline",
        run,
        summary="one decode step as launches and as a megakernel, modelled: µs, waits, a picture",
        about="Model a decode step un-fused, fused, and as one persistent kernel: every SM "
        "streams its bytes from a memory that all share, pays an overhead an instruction, and "
        "waits for its inputs. Prints the time, the predicted share of peak bandwidth and where "
        "the SMs' time goes. Of a loop model: as launches and as a megakernel, its core read from "
        "memory in every iteration or kept in the L2 cache. Nothing is measured, and the overhead "
        "decides: look at a table of it (--table, --loop-table), not at one number.",
        examples=[
            ("kernels timeline --model llama-1b --gpu h100", "the seven ways side by side"),
            ("kernels timeline --gpu h200 --overhead 2.5", "a dearer instruction"),
            ("kernels timeline --out timeline.svg", "SMs × time; --trace FILE: for Perfetto"),
            ("kernels timeline --model parcae-140m --loops 8", "what a core kept in L2 saves"),
            ("kernels timeline --table --json table.json", "all tables (minutes)"),
        ],
        code=[
            ("minifer/perf/timeline/model.py", "the model, and measured timestamps in its form"),
            ("minifer/perf/timeline/launches.py", "the same step as kernels"),
            ("minifer/perf/timeline/decode.py", "the seven ways, and what is assumed"),
            ("minifer/perf/timeline/loop_resident.py", "a loop model's five ways"),
        ],
        prog="minifer kernels",
    )

    def option(name: str, kind: type, metavar: str, text: str, **more: Any) -> None:
        default = DEFAULTS[name]
        if default is not None:
            text += f" (default: {default})"
        flag = "--" + name.replace("_", "-")
        more |= {"type": kind, "metavar": metavar, "help": text}
        parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, **more)

    models = (*MODELS, *LOOP_MODELS)
    option("model", str, "NAME", f"{', '.join(models)}: shapes only", choices=models)
    option("gpu", str, "CHIP", "h100, h200, a100, b200, t4 or a full name")
    option("batch", int, "B", "requests, at most 16")
    option("context", int, "S", "tokens that every request attends to")
    option("overhead", float, "US", "µs of an instruction, or of a kernel's block")
    option("gap", float, "US", "µs from one kernel to the next in a CUDA graph; half with PDL")
    option("tile", int, "N", "rows of a weight tile")
    option("policy", str, "NAME", ", ".join(_POLICIES), choices=_POLICIES)
    option("prefetch", float, "KIB", "weights of an instruction that may arrive early")
    option("in_flight", float, "KIB", "bytes that an SM's loads have under way")
    option("latency", float, "US", "µs from a load to its bytes, under load")
    option("achievable", float, "X", "the part of the bandwidth that can be had at all")
    option("loops", int, "T", "of a loop model, iterations (default: what it was trained with)")
    option("layers", int, "N", "layers in the picture (default: 2; three iterations of a core)")
    option("out", str, "FILE", "write the picture: .svg, or .png or .pdf with matplotlib")
    option("trace", str, "FILE", "write a Chrome trace for ui.perfetto.dev")
    parser.add_argument(
        "--table", action="store_true", help="Llama-1B on H100 and H200: all tables, as Markdown"
    )
    parser.add_argument(
        "--loop-table", action="store_true", help="Parcae on four chips: all tables, as Markdown"
    )
    parser.add_argument("--json", metavar="FILE", help="with a table: its numbers")


def run(arguments: argparse.Namespace) -> int:
    given = [name for name in DEFAULTS if hasattr(arguments, name)]
    for option in ("out", "trace", "json"):
        file = getattr(arguments, option, None)
        if file and not Path(file).absolute().parent.is_dir():
            folder = Path(file).parent
            raise ValueError(f"--{option}: there is no folder {folder}, make it first")
    if arguments.table or arguments.loop_table:
        name = "--table" if arguments.table else "--loop-table"
        if arguments.table and arguments.loop_table:
            raise ValueError("--table and --loop-table are one at a time")
        if given:
            flag = given[0].replace("_", "-")
            raise ValueError(f"{name} has its own settings: leave out --{flag}")
        return _tables(arguments.json, arguments.loop_table)
    if arguments.json:
        raise ValueError("--json needs --table or --loop-table")
    settings = argparse.Namespace(**(DEFAULTS | vars(arguments)))
    if settings.out and Path(settings.out).suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--out must end in .svg, .png or .pdf, got {settings.out!r}")
    if settings.layers is not None and settings.layers < 1:
        raise ValueError(f"--layers must be at least 1, got {settings.layers}")
    if find_device(settings.gpu).num_sms is None:
        raise ValueError(f"--gpu must be a GPU with SMs, got {find_device(settings.gpu).name}")
    if settings.context < 1:
        raise ValueError(f"--context must be at least 1, got {settings.context}")
    looped = settings.model in LOOP_MODELS
    if looped and "policy" in given:
        raise ValueError("--policy is not for loop models, whose pieces stay on their SMs")
    if not looped and settings.loops is not None:
        raise ValueError(f"--loops needs a loop model: {', '.join(LOOP_MODELS)}")
    panels, layers = (_loop_panels if looped else _panels)(settings)
    print(_summary(settings, panels))
    _write(settings, panels, layers)
    return 0


def _panels(settings: argparse.Namespace) -> tuple[list[Panel], range]:
    """All ways to run the step, and the layers for a picture."""
    from minifer.kernels.mega.shapes import decode_shape, kv_splits
    from minifer.perf.timeline.decode import ARMS, panel
    from minifer.perf.timeline.gantt import shown_layers

    device, assumed = find_device(settings.gpu), _assumptions(settings)
    config = MODELS[settings.model]
    splits = kv_splits(settings.context, settings.batch, config.num_kv_heads, device.num_sms or 1)
    shape = decode_shape(config, settings.batch, splits, settings.tile)
    panels = [
        panel(arm, shape, device, settings.context, assumed, policy=settings.policy) for arm in ARMS
    ]
    return panels, shown_layers(panels, settings.layers or 2)


def _loop_panels(settings: argparse.Namespace) -> tuple[list[Panel], range]:
    """The same of a loop model. Its number of loops becomes a setting."""
    from minifer.parcae.presets import PRESETS
    from minifer.perf.timeline.loop_resident import ARMS, LoopStep, drawn_layers, loop_panel

    config = PRESETS[settings.model]
    if settings.loops is None:
        assert config.loop is not None
        settings.loops = config.loop.mean_recurrence
    step = LoopStep(config, settings.loops, settings.batch, settings.context, settings.tile)
    device, assumed = find_device(settings.gpu), _assumptions(settings)
    panels = [loop_panel(arm, step, device, assumed) for arm in ARMS]
    return panels, drawn_layers(step, settings.layers)


def _assumptions(settings: argparse.Namespace) -> Assumptions:
    from minifer.perf.timeline.decode import Assumptions

    return Assumptions(
        overhead=settings.overhead * 1e-6,
        gap=settings.gap * 1e-6,
        pdl_gap=settings.gap / 2 * 1e-6,
        prefetch=settings.prefetch * 1024,
        in_flight=settings.in_flight * 1024,
        latency=settings.latency * 1e-6,
        achievable=settings.achievable,
    )


def _subtitle(settings: argparse.Namespace) -> str:
    device = find_device(settings.gpu)
    loops = f", {settings.loops} loops" if settings.loops else ""
    return (
        f"{settings.model}{loops} on {device.name} ({device.num_sms} SMs, "
        f"{device.memory_bandwidth / 1e12:g} TB/s), batch {settings.batch}, context "
        f"{settings.context:,}, tile {settings.tile}, {settings.overhead:g} µs an instruction"
    )


def _summary(settings: argparse.Namespace, panels: list[Panel]) -> str:
    peak = find_device(settings.gpu).memory_bandwidth
    rows: list[tuple[str, ...]] = [
        ("modelled", "µs", "of peak", "stream", "overhead", "tail", "bubble")
    ]
    for panel in panels:
        timeline = panel.timeline
        shares = timeline.shares()
        parts = [timeline.share_of(peak), *(shares[name] for name in rows[0][3:])]
        name = f"{timeline.name}: {panel.note}"
        rows.append((name, f"{timeline.seconds * 1e6:,.0f}", *(f"{x:.1%}" for x in parts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"MODELLED, not measured: {_subtitle(settings)}", ""]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    lines += ["", "of peak: bytes ÷ time ÷ the data sheet's bandwidth. The SMs' time: stream;"]
    lines += ["overhead; tail: waiting while others stream; bubble: waiting while nobody does."]
    return "\n".join(lines)


def _write(settings: argparse.Namespace, panels: list[Panel], layers: range) -> None:
    from minifer.perf.timeline import decode, gantt, loop_resident
    from minifer.perf.timeline.model import chrome_trace

    if settings.out:
        names: tuple[str, ...] = decode.DRAWN
        title = "What a megakernel removes: a decode step, modelled"
        if settings.loops:
            names = loop_resident.DRAWN
            title = "A core that stays in L2: its first iterations, modelled; no GPU has run this"
        drawn = [panel for panel in panels if panel.timeline.name in names]
        out = Path(settings.out)
        if out.suffix == ".svg":
            text = gantt.svg(drawn, title, _subtitle(settings), layers)
            out.write_text(text, encoding="utf-8")
        else:
            gantt.figure(drawn, f"{title}\n{_subtitle(settings)}", layers).savefig(out, dpi=120)
    if settings.trace:
        trace = chrome_trace(panel.timeline for panel in panels)
        Path(settings.trace).write_text(
            json.dumps(trace, ensure_ascii=False, separators=(",", ":")), encoding="utf-8"
        )
        note(
            f"{settings.trace} holds {len(trace['traceEvents']):,} events: ui.perfetto.dev opens it"
        )


def _tables(file: str | None, looped: bool) -> int:
    from tqdm import tqdm

    with tqdm(unit="table", disable=not sys.stderr.isatty(), leave=False) as bar:
        if looped:
            from minifer.parcae.presets import PRESETS
            from minifer.perf.timeline import loop_tables

            data = loop_tables.study(PRESETS, progress=lambda name: bar.update())
            text = loop_tables.markdown(data)
        else:
            from minifer.perf.timeline.tables import markdown, study

            data = study(progress=lambda name: bar.update())
            text = markdown(data)
    if file:
        numbers = json.dumps(data, indent=1, ensure_ascii=False)
        Path(file).write_text(numbers + "\n", encoding="utf-8")
    print(text, end="")
    return 0
