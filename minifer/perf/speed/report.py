"""A result in words, for people: where it ran, what the machine can do, what the engines do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minifer.perf.bench import in_words
from minifer.perf.limit_bench import aligned
from minifer.perf.speed.benchmark import OURS, SpeedReport
from minifer.perf.speed.session import STAGES

_GIB = 2.0**30


def table(report: SpeedReport) -> str:
    """Header, ceilings, a line a task, the stages of a step, then the others."""
    result, here = report.result, report.here
    read = result.details["read_bandwidth"]
    lines = [
        *result.header(),
        "",
        f"{here.name}: reads {read['memory'] / 1e9:.1f} GB/s from memory"
        f" ({read['same_size'] / 1e9:.1f} of a buffer as large as the weights), multiplies "
        f"{here.peak_flops / 1e9:,.0f} GFLOP/s ({here.note.partition(';')[0]}); the best of all "
        "rounds",
        "",
        *aligned(_speeds(report)),
        *_how(report.rows),
    ]
    if any("forward_seconds" in row for row in report.rows):
        lines += ["", "mean time of each stage of a step:", "", *aligned(_stages(report.rows))]
    if report.versus or report.skipped:
        lines += ["", *_others(report)]
    return "\n".join(lines)


def _how(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the speeds are."""
    lines = []
    if any(row["kind"] == "decode" for row in rows):
        lines += [
            "tokens/s: of all requests, from the last first token to the first last one",
            "MBU: bytes of weights and KV a second, of the best reading of all rounds; beside it, "
            "of what the same round read",
        ]
    if any(row.get("mfu") is not None for row in rows):
        lines.append("MFU: FLOPs of the products a second, of what the machine multiplies at best")
    return lines


def _speeds(report: SpeedReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]]
    rows = [("work", "tokens/s", "IQR", "a step", "first token", "MBU", "of its round", "MFU", "")]
    for row in report.rows:
        extra = []
        if "acceptance" in row:
            extra.append(f"{row['acceptance']:.0%} of drafts right")
            extra.append(f"{row['tokens_per_step']:.2f} tokens a step")
        if "input_tokens_per_second" in row:
            extra.append(f"{row['input_tokens_per_second']:,.0f} tokens/s in")
            extra.append(f"{row['requests_per_second']:.2f} requests/s")
        rows.append(
            (
                row["work"],
                f"{row['tokens_per_second']:,.1f}",
                f"{row['spread']:.2g}",
                _milliseconds(row.get("step_seconds")),
                _milliseconds(row.get("first_token_seconds")),
                _percent(row.get("mbu")) if row["kind"] == "decode" else "–",
                _percent(row.get("mbu_of_round")) if row["kind"] == "decode" else "–",
                _percent(row.get("mfu")),
                ", ".join(extra),
            )
        )
    return rows


def _stages(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = [("work", *STAGES, "scheduling and preparation")]
    for row in rows:
        if "forward_seconds" in row:
            times = (_milliseconds(row[f"{stage}_seconds"]) for stage in STAGES)
            out.append((row["work"], *times, f"{row['preparation_share']:.1%} of the step"))
    return out


def _others(report: SpeedReport) -> list[str]:
    """Ratios with their spread, lost ones too; who they were; who is missing."""
    result = report.result
    lines: list[str] = []
    if report.versus:
        rows: list[tuple[str, ...]]
        rows = [("minifer ÷ other, in tokens/s", "minifer", "other", "ratio", "from", "to", "")]
        for other, by_task in report.versus.items():
            for task, ratio in by_task.items():
                key = f"{task}: tokens_per_second"
                same = result.details["engines"][other]["same_tokens"].get(task)
                rows.append(
                    (
                        f"{other}, {task}",
                        f"{result.arms[OURS][key].median:,.1f}",
                        f"{result.arms[other][key].median:,.1f}",
                        f"{ratio.median:.2f}×",
                        f"{ratio.min:.2f}",
                        f"{ratio.max:.2f}",
                        ""
                        if same is None
                        else f"{same:.0%} of the tokens before the first that differs",
                    )
                )
        lines += [*aligned(rows), ""]
    for engine, about in result.details["engines"].items():
        if about.get("versions"):
            lines.append(f"{engine}: {_about(about)}")
    weights = result.settings.get("engine", {}).get("quantize", "none")
    if "llamacpp" in report.versus and weights != "file":
        lines.append(
            "llamacpp multiplies by the file's weights, minifer by others: --quantize file "
            "compares like with like"
        )
    lines += [f"{engine} is left out: {why}" for engine, why in report.skipped.items()]
    return lines


def _about(about: Mapping[str, Any]) -> str:
    parts = [f"{name} {number}" for name, number in about["versions"].items()]
    parts.append(f"weights and numbers: {about['dtype']}")
    if about.get("load_seconds") is not None:
        compiled = about.get("compile_seconds")
        of_it = "" if compiled is None else f", {compiled:.1f} s of it compiling"
        parts.append(f"loaded in {about['load_seconds']:.1f} s{of_it}")
    if about.get("peak_rss_bytes") is not None:
        parts.append(f"at most {about['peak_rss_bytes'] / _GIB:.2f} GiB")
    return "; ".join([", ".join(parts), in_words(about.get("config") or {})])


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g} ms"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
