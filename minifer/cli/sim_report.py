"""Tables of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minifer.simulation.measures.capacity import Capacity
    from minifer.simulation.measures.intervals import Interval
    from minifer.simulation.measures.metrics import Percentiles, RunMetrics

_SERIES = {
    "ttft": "TTFT",
    "cold_ttft": "  cold",
    "warm_ttft": "  warm",
    "queue": "waiting",
    "tpot": "TPOT",
    "itl": "ITL",
    "max_itl": "longest gap",
    "e2e": "E2E",
}
_FLAG = "PAST SATURATION"


def run_table(m: RunMetrics) -> str:
    """One run: every percentile, and what else it was worth."""
    rows = [f"  {'':14}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}   values"]
    for name, title in _SERIES.items():
        p: Percentiles | None = getattr(m, name)
        if p is not None:
            values = "".join(f"{_seconds(x):>10}" for x in (p.mean, p.p50, p.p90, p.p99, p.max))
            rows.append(f"  {title:14}{values}{p.count:9}")
    came = f"in {m.seconds:.0f} s of arrivals, {m.offered:.3g} a second"
    ended = f"{m.num_finished} of {m.num_requests} requests"
    rows.append(
        f"  finished      {ended} {came if m.seconds else 'that came at once'}, "
        f"{m.num_rejected} refused"
    )
    if m.attainment is not None:
        shown = _interval(m.attainment, percent=True)
        rows.append(f"  within SLO    {shown} of them, with the 95 % interval")
    if m.goodput is not None:
        rows.append(f"  goodput       {_interval(m.goodput)} requests/s within the SLO")
    rows.append(f"  hit rate      {m.hit_rate:.1%} of the prompt tokens")
    rows.append(
        f"  starvation    {_seconds(m.starvation_age)} was the longest wait for a first step"
    )
    busy = ", ".join(f"{name} {share:.0%}" for name, share in m.utilisation.items())
    rows.append(f"  busy          {busy}")
    load = ", ".join(f"{role} {load:.0%}" for role, load in m.saturation.offered.items())
    if load:
        rows.append(f"  offered load  {load} of what these can prefill")
    first, second = m.saturation.queue
    rows.append(
        f"  queue         {first:.1f} waiting in the first half, {second:.1f} in the second"
    )
    if m.saturation.unstable:
        rows.append(f"  {_FLAG}: {m.saturation.reason}.")
        rows.append("  These figures grow with the length of the run: they are no result.")
    return "\n".join(rows)


def rates_table(runs: Mapping[float, RunMetrics]) -> str:
    """A line a rate, and what the columns are."""
    header = f"  {'requests/s':>10}{'TTFT p50':>10}{'p90':>9}{'p99':>9}{'gap p99':>9}"
    rows = [f"{header}{'queue':>9}{'hits':>7}  within SLO"]
    for rate, m in sorted(runs.items()):
        ttft = [m.ttft.p50, m.ttft.p90, m.ttft.p99] if m.ttft else [None] * 3
        gap = m.max_itl.p99 if m.max_itl else None
        values = "".join(f"{'—' if x is None else _seconds(x):>9}" for x in [*ttft, gap])
        slo = "—" if m.attainment is None else _interval(m.attainment, percent=True)
        flag = f"  {_FLAG}" if m.saturation.unstable else ""
        rows.append(
            f"  {rate:10.3g} {values}{m.saturation.queue[1]:9.1f}{m.hit_rate:7.0%}  {slo}{flag}"
        )
    rows += [
        "  gap: the longest of a request; queue: requests that wait, mean of the second half;",
        "  hits: of the prompt tokens; [ ]: 95 % interval",
    ]
    return "\n".join(rows)


def capacity_table(found: Capacity, share: float) -> str:
    """The rate, and what was tried."""
    rows = []
    if found.rate:
        above = f", and no longer at {found.failed:.3g}" if found.failed < float("inf") else ""
        rows.append(f"  {found.rate:.3g} requests/s keep {share:.0%} within the SLO{above}")
    else:
        rows.append(f"  not even {found.failed:.3g} requests/s keep {share:.0%} within the SLO")
    if found.unstable:
        rows.append(f"  {_FLAG} there: the limits hold, and prove nothing")
    rows.append(f"    {'tried':>8}  {'within':>8}")
    for probe in sorted(found.probes, key=lambda probe: probe.rate):
        kept = "given up" if probe.stopped else f"{probe.measures['attainment']:.1%}"
        flag = f"  {_FLAG}" if probe.unstable and not probe.stopped else ""
        rows.append(f"    {probe.rate:8.3g}  {kept:>8}{flag}")
    if any(probe.stopped for probe in found.probes):
        rows.append("  given up: before the end too many had missed the SLO")
    return "\n".join(rows)


def _interval(interval: Interval, percent: bool = False) -> str:
    value, low, high = interval.value, interval.low, interval.high
    if percent:
        return f"{value:.1%} [{low:.1%}, {high:.1%}]"
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
