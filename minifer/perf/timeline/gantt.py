"""Timelines as a picture: SMs down, time across, one panel a timeline, all on one time axis.

`svg` needs nothing but the standard library; `figure` draws the same with matplotlib. Both show the
same few layers of each timeline, so that a shorter panel is a faster step, and below each panel how
much of the memory's bandwidth is in use.
"""

from __future__ import annotations

import html
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minifer.perf.timeline.model import Machine, Timeline

# Kind → colour (Okabe and Ito, 2008: told apart without colour vision), and its entry in the legend
KINDS = {
    "QKV": ("#0072B2", "Q, K, V"),
    "attention": ("#E69F00", "attention, merge"),
    "output": ("#56B4E9", "output"),
    "gate·up": ("#009E73", "gate, up"),
    "down": ("#CC79A7", "down"),
    "small": ("#D55E00", "norm, RoPE, residual …"),
    "overhead": ("#B8B8B8", "overhead of an instruction or block"),
    "prefetch": ("#F0E442", "weights that arrive while the SM waits"),
}
_KIND_OF = {
    "QKV": "QKV",
    "ATTENTION": "attention",
    "MERGE": "attention",
    "OUTPUT": "output",
    "GATE_UP": "gate·up",
    "gate": "gate·up",
    "up": "gate·up",
    "DOWN": "down",
}
# Task → what is written on it
_LABELS = {
    "QKV": "QKV",
    "ATTENTION": "attention",
    "OUTPUT": "output",
    "GATE_UP": "gate, up",
    "gate": "gate",
    "up": "up",
    "DOWN": "down",
}
_NO_LAYER = ("EMBED", "HEAD", "PICK")
_LEFT, _WIDTH, _ROW, _STRIP = 54, 926, 132, 30  # pixels of an SVG 1000 wide
_TITLE, _GAP = 34, 16


@dataclass(frozen=True)
class Panel:
    """A timeline with what the picture says about it.

    machine: for the strip of bandwidth, None where it is not known. note: stands after the name.
    peak: bytes a second, for the share of it in the heading.
    """

    timeline: Timeline
    machine: Machine | None = None
    note: str = ""
    peak: float | None = None


@dataclass(frozen=True)
class Bar:
    """A rectangle: programs [first, last) × [start, end) in microseconds, and its kind."""

    kind: str
    start: float
    end: float
    first: int
    last: int


def shown_layers(panels: Sequence[Panel], count: int = 2) -> range:
    """`count` layers from the second on: the first one starts on an idle chip."""
    most = 1 + max((span.task.layer for p in panels for span in p.timeline.spans), default=0)
    first = 1 if most > count else 0
    return range(first, min(most, first + count))


def window(timeline: Timeline, layers: range) -> tuple[float, float]:
    """From the first start to the last end of the layers' tasks, seconds. Raises `ValueError` when
    the timeline has none."""
    spans = [
        span
        for span in timeline.spans
        if span.task.layer in layers and span.task.name not in _NO_LAYER
    ]
    if not spans:
        raise ValueError(f"layers must be some of the timeline's, got {list(layers)}")
    return min(span.start for span in spans), max(span.end for span in spans)


def bars(timeline: Timeline, start: float, end: float, resolution: float = 0.02) -> list[Bar]:
    """The rectangles of a window, times from its start. Neighbours that work at the same time, to
    `resolution` microseconds, become one."""
    cells: dict[tuple[str, float, float], list[int]] = defaultdict(list)

    def add(kind: str, program: int, first: float, last: float) -> None:
        first, last = max(first, start), min(last, end)
        if last > first:
            edges = [round((t - start) * 1e6 / resolution) * resolution for t in (first, last)]
            cells[kind, edges[0], edges[1]].append(program)

    for program, _, first, last in timeline.prefetched:
        add("prefetch", program, first, last)
    for span in timeline.spans:
        kind = _KIND_OF.get(span.task.name, "small")
        worked = span.end
        if kind != "small":  # whose time is all overhead
            worked -= timeline.overhead or 0.0
            add("overhead", span.program, worked, span.end)
        if span.task.name not in _NO_LAYER:
            add(kind, span.program, span.start, worked)
    found = []
    for (kind, first_us, last_us), programs in cells.items():
        for low, high in _runs(sorted(set(programs))):
            found.append(Bar(kind, first_us, last_us, low, high))
    return found


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def bandwidth_in_use(panel: Panel, start: float, end: float, columns: int) -> list[float]:
    """The mean share of the machine's bandwidth in each of `columns` parts of a window."""
    machine = panel.machine
    if machine is None or not panel.timeline.streaming:
        return []
    # The integral of the share up to each change; between two changes it is a straight line.
    steps = [*panel.timeline.streaming, (max(end, panel.timeline.seconds), 0)]
    times, sums, shares = [0.0], [0.0], [0.0]
    for time, active in steps:
        sums.append(sums[-1] + shares[-1] * (time - times[-1]))
        times.append(time)
        shares.append(min(1.0, active * machine.program_bandwidth / machine.bandwidth))

    def until(time: float) -> float:
        at = bisect_right(times, time) - 1
        return sums[at] + shares[at] * (time - times[at])

    edges = [until(start + (end - start) * i / columns) for i in range(columns + 1)]
    width = (end - start) / columns
    return [(after - before) / width for before, after in itertools.pairwise(edges)]


def svg(panels: Sequence[Panel], title: str, subtitle: str, layers: range | None = None) -> str:
    """The picture as inline SVG, 1000 pixels wide. title, subtitle: what was modelled or measured.

    Raises `ValueError` without panels.
    """
    windows, layers, longest = _frame(panels, layers)
    scale = _WIDTH / longest
    out = [_style()]
    out.append(f'<text x="{_LEFT}" y="22" class="h">{html.escape(title)}</text>')
    out.append(f'<text x="{_LEFT}" y="40">{html.escape(subtitle)}</text>')
    y = 52 + _svg_legend(out, 52)
    for panel, (start, end) in zip(panels, windows, strict=True):
        y += _TITLE
        _svg_panel(out, panel, layers, start, end, scale, y)
        y += _ROW + 4 + _STRIP + _GAP
    _svg_axis(out, longest, scale, y)
    height = y + 40
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {height}" role="img" '
        f'aria-label="{html.escape(title)}">\n<rect width="1000" height="{height}" fill="#fff"/>'
    )
    return "\n".join([head, *out, "</svg>"]) + "\n"


def _frame(
    panels: Sequence[Panel], layers: range | None
) -> tuple[list[tuple[float, float]], range, float]:
    if not panels:
        raise ValueError("panels must not be empty")
    layers = layers if layers is not None else shown_layers(panels)
    windows = [window(panel.timeline, layers) for panel in panels]
    return windows, layers, max(end - start for start, end in windows) * 1e6 * 1.08


def heading(panel: Panel) -> str:
    """How many launches or instructions, the whole step's time, and whether it is a model's."""
    timeline = panel.timeline
    kind = "modelled" if timeline.modelled else "measured"
    note = f"{panel.note}; " if panel.note else ""
    share = f", {timeline.share_of(panel.peak):.0%} of peak bandwidth" if panel.peak else ""
    return f"{note}whole step {timeline.seconds * 1e6:,.0f} µs{share}, {kind}"


def _style() -> str:
    colours = "".join(f".{_css(kind)}{{fill:{colour}}}" for kind, (colour, _) in KINDS.items())
    return (
        "<style>text{font:12px DejaVu Sans,Helvetica,Arial,sans-serif;fill:#222}"
        f".h{{font-size:16px;font-weight:bold}}.b{{font-weight:bold}}.s{{font-size:10px}}"
        f".l{{paint-order:stroke;stroke:#fff;stroke-width:3px}}{colours}"
        "</style>"
    )


def _css(kind: str) -> str:
    return "k-" + kind.replace("·", "")


def _svg_legend(out: list[str], y: int) -> int:
    """Returns its height."""
    x, line = _LEFT, 0
    entries = [(f'class="{_css(kind)}"', label) for kind, (_, label) in KINDS.items()]
    entries.append(('fill="#fff" stroke="#888"', "white: the SM waits"))
    for fill, label in entries:
        width = 26 + 7 * len(label)
        if x + width > 1000:
            x, line = _LEFT, line + 18
        out.append(f'<rect x="{x}" y="{y + line}" width="12" height="12" {fill}/>')
        out.append(f'<text x="{x + 17}" y="{y + line + 10}">{html.escape(label)}</text>')
        x += width
    return line + 14


def _svg_panel(
    out: list[str], panel: Panel, layers: range, start: float, end: float, scale: float, y: float
) -> None:
    timeline = panel.timeline
    row = _ROW / timeline.programs
    paths: dict[str, list[str]] = defaultdict(list)
    for bar in bars(timeline, start, end):
        x, w = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
        h = max(1.5, (bar.last - bar.first) * row)  # one SM's work is to be seen too
        top = min(y + bar.first * row, y + _ROW - h)
        paths[bar.kind].append(f"M{x:.1f} {top:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z")
    width = (end - start) * 1e6 * scale
    out.append(
        f'<text x="{_LEFT}" y="{y - 8}"><tspan class="b">{html.escape(timeline.name)}</tspan>'
        f": {html.escape(heading(panel))}</text>"
    )
    out.append(
        f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW}" fill="#fff" '
        'stroke="#888" stroke-width=".6"/>'
    )
    out += [f'<path class="{_css(kind)}" d="{"".join(d)}"/>' for kind, d in paths.items()]
    _svg_labels(out, timeline, layers, start, scale, y)
    out.append(f'<text x="{_LEFT - 4}" y="{y + 9}" class="s" text-anchor="end">SM 0</text>')
    last = f'y="{y + _ROW}" class="s" text-anchor="end">{timeline.programs - 1}'
    out.append(f'<text x="{_LEFT - 4}" {last}</text>')
    base = y + _ROW + 4 + _STRIP
    columns = bandwidth_in_use(panel, start, end, max(1, round(width)))
    if columns:
        step = width / len(columns)
        line = "".join(f"V{base - _STRIP * share:.1f}h{step:.2f}" for share in columns)
        out.append(f'<path d="M{_LEFT} {base}{line}V{base}z" fill="#444"/>')
        out.append(
            f'<text x="{_LEFT - 4}" y="{base - 18}" class="s" text-anchor="end">memory</text>'
        )
        out.append(
            f'<text x="{_LEFT - 4}" y="{base - 6}" class="s" text-anchor="end">in use</text>'
        )
    out.append(
        f'<rect x="{_LEFT}" y="{base - _STRIP}" width="{width:.1f}" height="{_STRIP}" fill="none" '
        'stroke="#888" stroke-width=".6"/>'
    )
    took = f"{len(layers)} layers: {(end - start) * 1e6:.0f} µs"
    anchor = f'x="{_LEFT + width + 6:.1f}"' if width < 0.85 * _WIDTH else f'x="{_LEFT + width}"'
    align = "" if width < 0.85 * _WIDTH else ' text-anchor="end"'
    place = y + _ROW / 2 if width < 0.85 * _WIDTH else y - 8
    out.append(f'<text {anchor} y="{place}" class="b"{align}>{took}</text>')


def _svg_labels(
    out: list[str], timeline: Timeline, layers: range, start: float, scale: float, y: float
) -> None:
    """The operations' names on their bars, upright where there is room."""
    extents: dict[tuple[str, int], tuple[float, float]] = {}
    for span in timeline.spans:
        if span.task.layer in layers and span.task.name in _LABELS:
            first, last = extents.get((span.task.name, span.task.layer), (span.start, span.end))
            extents[span.task.name, span.task.layer] = (
                min(first, span.start),
                max(last, span.end - (timeline.overhead or 0.0)),
            )
    for (name, _), (first, last) in extents.items():
        label = _LABELS[name]
        x = _LEFT + ((first + last) / 2 - start) * 1e6 * scale
        room = (last - first) * 1e6 * scale
        place = f'x="{x:.1f}" y="{y + _ROW / 2 + 4}"'
        if room < 7 * len(label) + 4:
            place = f'transform="translate({x + 4:.1f} {y + _ROW / 2})rotate(-90)"'
        out.append(f'<text {place} text-anchor="middle" class="l">{label}</text>')


def _svg_axis(out: list[str], longest: float, scale: float, y: float) -> None:
    steps = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    step = next(step for step in steps if longest / step <= 16)
    out.append(f'<path d="M{_LEFT} {y}h{_WIDTH}" stroke="#222"/>')
    for tick in range(0, int(longest) + 1, step):
        x = _LEFT + tick * scale
        out.append(f'<path d="M{x:.1f} {y}v5" stroke="#222"/>')
        out.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{tick}</text>')
    out.append(f'<text x="{_LEFT + _WIDTH}" y="{y + 34}" text-anchor="end">time, µs</text>')


def figure(panels: Sequence[Panel], title: str, layers: range | None = None) -> Any:
    """The same picture as a matplotlib `Figure`. Raises `ValueError` without panels and
    `ImportError` without matplotlib (the `course` extra)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    windows, layers, longest = _frame(panels, layers)
    drawing = Figure(figsize=(10, 2.2 * len(panels) + 1.2), layout="constrained")
    grid = drawing.add_gridspec(2 * len(panels), 1, height_ratios=[4, 1] * len(panels))
    top = None
    for i, (panel, (start, end)) in enumerate(zip(panels, windows, strict=True)):
        axes = drawing.add_subplot(grid[2 * i], sharex=top)
        strip = drawing.add_subplot(grid[2 * i + 1], sharex=axes)
        top = top or axes
        for bar in bars(panel.timeline, start, end):
            axes.broken_barh(
                [(bar.start, bar.end - bar.start)],
                (bar.first, bar.last - bar.first),
                color=KINDS[bar.kind][0],
                linewidth=0,
            )
        took = f"{len(layers)} layers: {(end - start) * 1e6:.0f} µs"
        axes.set_title(f"{panel.timeline.name}: {took}; {heading(panel)}", loc="left", fontsize=9)
        axes.set(xlim=(0, longest), ylim=(panel.timeline.programs, 0), ylabel="SM")
        axes.tick_params(labelbottom=False)
        used = bandwidth_in_use(panel, start, end, 800)
        width = (end - start) * 1e6 / max(1, len(used))
        strip.fill_between(
            [c * width for c in range(len(used))], used, step="post", color="#444", linewidth=0
        )
        strip.set(ylim=(0, 1), yticks=[0, 1], ylabel="memory")
        strip.tick_params(labelbottom=i == len(panels) - 1)
    strip.set_xlabel("time, µs")
    patches = [Patch(color=colour, label=label) for colour, label in KINDS.values()]
    drawing.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=9)
    drawing.suptitle(title)
    return drawing
