"""Kernels against the memory's speed: what is predicted, and what a GPU says where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minifer.config import ModelConfig
from minifer.course.figures import HATCHES, PALETTE, finish, new_figure, patch
from minifer.course.kernel_mistakes import SUITES, Verdict
from minifer.perf.costs import OpCost
from minifer.perf.devices import Device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP = (
    1.3e-6  # seconds from one kernel to the next in a CUDA graph: "Look Ma, No Bubbles!", May 2025
)


@dataclass(frozen=True)
class Forecast:
    """One kernel on one chip. seconds: of its bytes at the data sheet's bandwidth, plus the gap."""

    name: str
    bytes: float
    seconds: float
    bandwidth: float

    @property
    def share(self) -> float:
        """Of the data sheet's bandwidth."""
        return self.bytes / self.seconds / self.bandwidth


def decode_kernels(config: ModelConfig, context: int) -> dict[str, OpCost]:
    """The kernels of a decode step of one request, by name, with what they must move."""
    from minifer.kernels.gemv import gemv_cost
    from minifer.kernels.paged_decode import paged_decode_cost
    from minifer.kernels.rms_norm import rms_norm_cost
    from minifer.kernels.rope_append import rope_append_cost

    D, C, H, K = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    return {
        "RMSNorm": rms_norm_cost(1, D),
        "RoPE and append": rope_append_cost(1, H, K, C),
        f"paged attention, {context:,} tokens": paged_decode_cost([context], H, K, C),
        "GEMV, query key value": gemv_cost(D, (H + 2 * K) * C),
        "GEMV, down": gemv_cost(config.intermediate_size, D),
        "GEMV, head": gemv_cost(D, config.vocab_size),
    }


def forecasts(
    config: ModelConfig, device: Device, context: int = 4096, gap: float = GAP
) -> list[Forecast]:
    """Modelled: a kernel is its bytes at full bandwidth and one gap."""
    beta = device.memory_bandwidth
    return [
        Forecast(name, cost.bytes, gap + cost.bytes / beta, beta)
        for name, cost in decode_kernels(config, context).items()
    ]


def measured_here(model: str = "llama-1b") -> list[str]:
    """What `minifer bench kernels` says of a decode step's kernels on this machine's GPU; without a
    GPU the one line that says so.

    In a process of its own, for this one may run Triton's interpreter.
    """
    import torch

    if not torch.cuda.is_available():
        return ["no GPU here: nothing is measured, the bars above are a model"]
    command = [sys.executable, "-m", "minifer", "bench", "kernels", "--model", model]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return (done.stdout if done.returncode == 0 else done.stderr).splitlines()


def warm_and_cold(sizes: Sequence[int] = (1, 200)) -> list[str]:
    """A line a size in MB: a product with a matrix of so many float32, repeated, as bytes a second.
    The small one is in a cache after the first call."""
    import time

    import torch

    lines = []
    for megabytes in sizes:
        matrix, x = torch.randn(megabytes * 256, 1024), torch.randn(1024)
        calls = max(2, sizes[-1] // megabytes)
        torch.mv(matrix, x)
        begin = time.perf_counter()
        for _ in range(calls):
            torch.mv(matrix, x)
        rate = calls * matrix.nbytes / (time.perf_counter() - begin)
        lines.append(f"{megabytes:4} MB, read {calls} times: {rate / 1e9:5.1f} GB/s")
    return lines


def forecast_figure(rows: Sequence[Forecast], *, title: str) -> Figure:
    """A bar a kernel: the share of the bandwidth that the model lets it reach."""
    figure = new_figure(8.2, 1.5 + 0.45 * len(rows))
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(
        places,
        [100 * row.share for row in rows],
        height=0.6,
        color=PALETTE["decode"],
        hatch=HATCHES["decode"],
        edgecolor="white",
    )
    for place, row in enumerate(rows):
        size = f"{row.bytes / 1e6:,.3g} MB, {row.seconds * 1e6:,.1f} µs"
        axes.text(100 * row.share + 1, place, size, va="center", fontsize=9)
    axes.set_xlim(0, 130)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(0, 101, 20))
    axes.set_yticks(places, [row.name for row in rows])
    axes.set_xlabel("share of the memory's bandwidth (%), modelled")
    finish(figure, axes, title, [patch("reached, if the gap is all that is lost", PALETTE["decode"],
                                       HATCHES["decode"], "white")])  # fmt: skip
    return figure


def verdict_figure(verdicts: Sequence[Verdict], *, title: str) -> Figure:
    """A row a mistake, a column a suite: who lets it through."""
    figure = new_figure(7.6, 1.6 + 0.3 * len(verdicts))
    axes = figure.subplots()
    for y, verdict in enumerate(verdicts):
        for x, found in enumerate(verdict.found):
            face = PALETTE["cached"] if found else PALETTE["decode"]
            hatch = "" if found else HATCHES["decode"]
            axes.barh(
                y, 0.94, left=x - 0.47, height=0.86, color=face, hatch=hatch, edgecolor="white"
            )
            words = "found" if found else "accepted"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
            axes.text(x, y, words, ha="center", va="center", fontsize=9, bbox=box)
    axes.set_xlim(-0.5, len(SUITES) - 0.5)
    axes.set_ylim(len(verdicts) - 0.5, -0.5)
    axes.set_xticks(range(len(SUITES)), SUITES)
    axes.set_yticks(range(len(verdicts)), [v.mistake for v in verdicts])
    axes.set_xlabel("suite of tests, each stricter than the one before")
    legend = [
        patch("a test fails", PALETTE["cached"]),
        patch("all tests pass", PALETTE["decode"], HATCHES["decode"], "white"),
    ]
    finish(figure, axes, title, legend)
    return figure
