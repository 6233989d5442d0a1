"""A result in words, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minifer.perf.bench import BenchmarkResult
from minifer.perf.load import metrics
from minifer.perf.load.benchmark import ARM
from minifer.perf.load.generator import LoadRun

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "late": "sent late by"}


def table(result: BenchmarkResult, runs: Sequence[LoadRun], slo: Mapping[str, float]) -> str:
    """Counts, rates and latencies; of several runs the median of each number."""
    values = {name: summary.median for name, summary in result.arms[ARM].items()}
    lines = [f"{key:13}{text}" for key, text in _overview(values, slo)]
    lines += ["", f"{'':13}" + "".join(f"{name:>10}" for name in metrics.STATISTICS)]
    for name in metrics.LATENCIES:
        cells = [values.get(f"{name}_{key}") for key in metrics.STATISTICS]
        shown = "".join(f"{'–' if x is None else format(x * 1e3, '.1f'):>10}" for x in cells)
        lines.append(f"{_NAMES[name]:13}{shown}  ms")
    return "\n".join(lines + _notes(values, runs))


def _overview(values: Mapping[str, float], slo: Mapping[str, float]) -> list[tuple[str, str]]:
    rows = [
        (
            "requests",
            f"{values['completed']:.10g} completed, {values['failed']:.10g} failed in "
            f"{values['seconds']:.2f} s; at most {values['max_in_flight']:.10g} in flight",
        ),
        (
            "tokens",
            f"{values['prompt_tokens']:.10g} of prompts, {values['output_tokens']:.10g} generated"
            + (
                f", {values['tokens_per_chunk']:.3g} in a chunk"
                if "tokens_per_chunk" in values
                else ""
            ),
        ),
        (
            "throughput",
            f"{values['request_throughput']:.2f} requests/s, {values['output_throughput']:.1f} "
            f"generated tokens/s, {values['total_throughput']:.1f} tokens/s with prompts",
        ),
    ]
    if "cached_share" in values:
        rows.append(("prefix cache", f"{values['cached_share']:.1%} of the prompt tokens"))
    if slo:
        limits = ", ".join(f"{name} ≤ {limit:g} s" for name, limit in slo.items())
        good = f"{values['goodput']:.2f} requests/s; {values['slo_attainment']:.1%} met {limits}"
        rows.append(("goodput", good))
    return rows


def _notes(values: Mapping[str, float], runs: Sequence[LoadRun]) -> list[str]:
    """What a reader of the numbers has to know."""
    notes = []
    if len(runs) > 1:
        notes.append(f"each number is the median of {len(runs)} runs")
    for kind, count in metrics.failures(runs).items():
        said = next(r.detail for run in runs for r in run.records if r.error == kind)
        notes.append(f"{count} failed: {kind} {said}".rstrip())
    if unsent := sum(run.num_unsent for run in runs):
        notes.append(f"{unsent} later turns of conversations were not sent: an earlier one failed")
    uncounted = sum(
        r.error is None and r.output_tokens is None for run in runs for r in run.records
    )
    if uncounted:
        notes.append(f"{uncounted} answers came without usage: a chunk is counted as a token")
    if values["late_p99"] > max(0.01, values["ttft_p50"] / 10):
        notes.append(
            "the client could not keep up; its delays are in TTFT and E2E: use a faster one"
        )
    return ["", *(f"note: {note}" for note in notes)] if notes else []
