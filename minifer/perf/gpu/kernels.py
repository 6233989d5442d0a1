"""Each kernel alone: is it right, and what share of the measured copy bandwidth does it reach?

First a kernel's result is held against its reference in float32; a wrong one gets no speed. Then it
runs in a CUDA graph, over so many copies of its data that none of them is still in the L2 cache
when its turn comes again: what is measured is the memory, without the launches of a host.

Schema of the JSON (`schema_version` 1)::

    schema_version, name "kernels", started, machine, versions, git    as in perf/bench.py
    settings, bandwidth                                                as in perf/gpu/ladder.py
    rows            name, status (ok · wrong · failed), reason,
                    error: rms of the difference ÷ rms of the reference in float32,
                    reference_error: the same of the reference in the kernel's own dtype,
                    bytes and flops of a call, seconds {values, median, min, max, iqr} or null,
                    bytes_per_second, of_copy, of_datasheet, flops_per_second
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifer.perf.bench import Summary, git_state, machine, versions
from minifer.perf.costs import OpCost
from minifer.perf.gpu.bandwidth import Bandwidth, datasheet
from minifer.perf.gpu.timing import captured, seconds_per_call

SCHEMA_VERSION = 1
# A bfloat16 result is rounded by at most 2⁻⁹ of itself, one that was rounded on its way by more: a
# kernel is wrong when it is off by more than two such roundings and more than its reference is.
TOLERANCE = 2.0**-8
_COLD_BYTES = 256 * 2**20  # several times any L2 cache
_MOST_COPIES, _SAMPLES = 4096, 7


@dataclass(frozen=True)
class KernelCase:
    """make: fresh arguments. call, reference: of these arguments. outputs: (result, arguments) →
    what is compared, tensors; by default the result. cost: of one call."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    cost: OpCost
    outputs: Callable[[Any, tuple[Any, ...]], tuple[Tensor, ...]] = lambda result, _: (result,)


@dataclass
class KernelRow:
    """The fields are the schema's."""

    name: str
    status: str = "failed"
    reason: str | None = None
    error: float | None = None
    reference_error: float | None = None
    bytes: float | None = None
    flops: float | None = None
    seconds: dict[str, Any] | None = None
    bytes_per_second: float | None = None
    of_copy: float | None = None
    of_datasheet: float | None = None
    flops_per_second: float | None = None


def bench_kernels(
    groups: Mapping[str, Callable[[], Iterator[KernelCase]]],
    device: torch.device,
    bandwidth: Bandwidth,
    settings: Mapping[str, Any],
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run all cases of all groups, writing the file after each; returns its content.

    groups: name → its cases; one that cannot even be listed is a row with its reason.
    """
    where = machine()
    sheet = datasheet(where["accelerator"])
    peak = sheet.memory_bandwidth if sheet else None
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": "kernels",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": where,
        "versions": versions(),
        "git": git_state(),
        "settings": dict(settings),
        "bandwidth": asdict(bandwidth) | {"datasheet": peak},
        "rows": [],
    }

    def keep(row: KernelRow) -> None:
        result["rows"].append(asdict(row))
        say(_row_line(row))
        if out is not None:
            text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
            part = out.with_name(out.name + ".part")
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, out)

    for group, cases in groups.items():
        try:
            for case in cases():
                keep(run_case(case, device, bandwidth.copy, peak))
        except Exception as error:  # what a kernel's module raises is a row
            keep(KernelRow(group, reason=f"{type(error).__name__}: {error}"[:300]))
    return result


@torch.no_grad()
def run_case(case: KernelCase, device: torch.device, copy: float, peak: float | None) -> KernelRow:
    """Compare, then time; whatever goes wrong becomes the row's reason."""
    row = KernelRow(case.name, bytes=case.cost.bytes, flops=case.cost.flops)
    try:
        error, reference = relative_errors(case)
        if math.isfinite(reference):
            row.reference_error = reference
        if not error <= max(TOLERANCE, row.reference_error or 0.0):  # NaN is not
            row.status, row.reason = "wrong", f"off by {error:.2g} of the reference's rms"
            row.error = error if math.isfinite(error) else None
            return row
        row.error = error
        row.status = "ok"
        if device.type != "cuda":
            row.reason = "in Triton's interpreter: its time says nothing"
            return row
        times = _times(case)
        row.seconds = asdict(Summary.of(times))
        median = row.seconds["median"]
        row.bytes_per_second = case.cost.bytes / median
        row.flops_per_second = case.cost.flops / median
        row.of_copy = row.bytes_per_second / copy
        row.of_datasheet = row.bytes_per_second / peak if peak else None
    except Exception as error:  # a compiler, a driver, a check of the wrapper
        row.status, row.reason = "failed", f"{type(error).__name__}: {error}"[:300]
    return row


def relative_errors(case: KernelCase, wide: torch.dtype = torch.float32) -> tuple[float, float]:
    """Against the reference computed in `wide`: rms of the difference ÷ rms of the reference, of
    the kernel and of the reference in the kernel's own dtype; the worst of all outputs. Raises
    `ValueError` where the shapes differ."""
    arguments = case.make()
    ours, narrow, truth = (
        case.outputs(run(*own), own)
        for run, own in (
            (case.call, _copies(arguments, None)),
            (case.reference, _copies(arguments, None)),
            (case.reference, _copies(arguments, wide)),
        )
    )
    return _difference(ours, truth), _difference(narrow, truth)


def _copies(arguments: tuple[Any, ...], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Tensors of their own, floating-point ones of another dtype: a kernel may write into some."""
    return tuple(
        a.to(dtype if a.is_floating_point() else None, copy=True) if isinstance(a, Tensor) else a
        for a in arguments
    )


def _difference(results: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    worst = 0.0
    for got, truth in zip(results, truths, strict=True):
        if got.shape != truth.shape:
            raise ValueError(f"result {list(got.shape)} instead of {list(truth.shape)}")
        difference = (got.double() - truth.double()).pow(2).mean().sqrt()
        error = (difference / truth.double().pow(2).mean().sqrt().clamp(min=1e-30)).item()
        worst = error if math.isnan(error) else max(worst, error)
    return worst


def _times(case: KernelCase) -> list[float]:
    """Seconds of a call, from a graph of one call on each copy of the data."""
    data = [case.make() for _ in range(copies_to_be_cold(case.cost.bytes))]

    def all_of_them() -> list[Any]:
        return [case.call(*arguments) for arguments in data]

    replay, _results = captured(all_of_them)  # kept, so that each call writes to its own memory
    device = torch.device("cuda")
    replay()
    return [seconds_per_call(replay, 3, device) / len(data) for _ in range(_SAMPLES)]


def copies_to_be_cold(num_bytes: float) -> int:
    """So many that a call's data left the L2 cache before its turn comes again, at least 2."""
    return max(2, min(_MOST_COPIES, math.ceil(_COLD_BYTES / max(1.0, num_bytes))))


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    lines = [_row_line(KernelRow(**row)) for row in result["rows"]]
    copy = result["bandwidth"]["copy"] / 1e9
    header = f"{'kernel':34}{'MB':>9}{'µs':>9}{'GB/s':>8}{'copy':>7}{'error':>10}"
    legend = (
        "MB: read and written; copy: share of the copy bandwidth, as measured "
        f"{copy:,.0f} GB/s;\nerror: rms of the difference to float32 ÷ rms of the result"
    )
    return "\n".join([header, *lines, "", legend])


def _row_line(row: KernelRow) -> str:
    cells = [row.name.ljust(34), f"{row.bytes / 1e6:9.3g}" if row.bytes else " " * 9]
    if row.seconds is not None and row.bytes_per_second is not None and row.of_copy is not None:
        cells.append(f"{row.seconds['median'] * 1e6:9.1f}{row.bytes_per_second / 1e9:8.0f}")
        cells.append(f"{row.of_copy:7.0%}")
    else:
        cells.append(f"{'–':>9}{'–':>8}{'–':>7}")
    cells.append(f"{row.error:10.1e}" if row.error is not None else f"{'–':>10}")
    remark = "" if row.status == "ok" else f"  {row.status}"
    return "".join(cells) + remark + (f"  {row.reason}" if row.reason else "")
