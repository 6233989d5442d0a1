"""One kernel after the other: what the launches alone cost, and whom it hurts.

Seven launches a layer at 1.3 µs are counted against the floor of a step: weights and KV once over
the memory bandwidth, or the arithmetic where that is slower. Small models at batch 1 lose a fifth;
everybody else loses little, and the published 29.9 ms of a 70B step are not explained by launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minifer.claims.claim import BarPanel, Claim, Findings, Settings, Table
from minifer.claims.shapes import LLAMA_1B, LLAMA_8B, LLAMA_70B
from minifer.claims.sources import NO_BUBBLES, SPLITWISE, TALK
from minifer.config import ModelConfig
from minifer.kernels.mega.shapes import decode_shape
from minifer.perf.costs import num_parameters, step_cost
from minifer.perf.devices import DEVICES
from minifer.perf.timeline.launches import launches

H100 = DEVICES["H100-SXM"]
LAUNCH = 1.3e-6  # s, in a CUDA graph on an H100 (the post)
KERNELS_A_LAYER = 7  # the post's count
MEASURED_70B = 29.9e-3  # s, decode of Llama 2 70B on 8 × H100, batch → 0 (Splitwise's table)
GPUS_70B = 8


@dataclass(frozen=True)
class Step:
    """One step of a model on `chips` H100s: (query, context) pairs as in `perf.costs`."""

    label: str
    model: ModelConfig
    batch: Sequence[tuple[int, int]]
    chips: int = 1

    @property
    def floor(self) -> float:
        """Seconds no step can beat: weights and KV over the bandwidth, or the arithmetic."""
        cost = step_cost(self.model, self.batch).total()
        moved = 2 * num_parameters(self.model) + cost.kv_bytes
        return H100.seconds(cost.flops / self.chips, moved / self.chips)

    @property
    def launching(self) -> float:
        return KERNELS_A_LAYER * self.model.num_layers * LAUNCH


STEPS = (
    Step("1B, batch 1", LLAMA_1B, [(1, 1)]),
    Step("1B, batch 64, context 2,048", LLAMA_1B, [(1, 2048)] * 64),
    Step("8B, batch 1", LLAMA_8B, [(1, 1)]),
    Step("8B, batch 64, context 2,048", LLAMA_8B, [(1, 2048)] * 64),
    Step("8B, a prompt of 2,048", LLAMA_8B, [(2048, 2048)]),
    Step("70B on 8 GPUs, batch 1", LLAMA_70B, [(1, 1)], GPUS_70B),
)


def num_kernels(model: ModelConfig, *, fused: bool) -> int:
    """Kernels of one decode step as our own launches cut it."""
    queues = launches(decode_shape(model), H100.num_sms or 1, 1, fused=fused)
    return 1 + max(task.signal for queue in queues for task in queue)


def reproduce(settings: Settings) -> Findings:
    small, big = STEPS[0], STEPS[-1]
    share = small.launching / small.floor
    reached = big.floor / MEASURED_70B
    explained = big.launching / (MEASURED_70B - big.floor)
    prefill = STEPS[4]
    ours = {kind: num_kernels(LLAMA_1B, fused=kind == "fused") for kind in ("un-fused", "fused")}
    return Findings(
        basis="arithmetic: the post's launch time, data sheets' H100; nothing is timed here",
        verdict=f"holds for small models at batch 1 ({share:.0%} of the floor), not in general "
        f"({STEPS[3].launching / STEPS[3].floor:.1%} for 8B at batch 64)",
        reproduction=f"{KERNELS_A_LAYER} kernels × {LLAMA_1B.num_layers} layers × "
        f"{LAUNCH * 1e6} µs = {small.launching * 1e6:.1f} µs beside a floor of "
        f"{small.floor * 1e6:.0f} µs: {share:.1%}. Our own step has {ours['un-fused']} kernels, or "
        f"{ours['fused']} when neighbours are fused.",
        breaking=f"more work a launch. A prompt of 2,048 tokens of an 8B model pays "
        f"{prefill.launching / prefill.floor:.1%}, 64 requests that decode "
        f"{STEPS[3].launching / STEPS[3].floor:.1%}. And launches are not all that is lost: a 70B "
        f"step on 8 H100s took {MEASURED_70B * 1e3} ms in 2023, its floor {big.floor * 1e3:.1f} ms "
        f"is {reached:.1%} of that, and launches of this price explain only {explained:.0%} of the "
        "rest.",
        honest=(
            "Launches matter where a step is short: small model, small batch, decode.",
            "Count kernels and divide by the floor before fusing anything.",
            "1.3 µs is one group's figure for CUDA graphs on an H100; kernels that wait for each "
            "other also drain and fill the chip, which this does not count "
            "(`minifer kernels timeline` does).",
        ),
        tables=(
            Table(
                f"launches of {LAUNCH * 1e6} µs, {KERNELS_A_LAYER} a layer, on H100s",
                {"step": "", "floor, µs": ",.0f", "launches, µs": ",.1f", "of the floor": ".1%"},
                tuple(
                    (s.label, s.floor * 1e6, s.launching * 1e6, s.launching / s.floor)
                    for s in STEPS
                ),
            ),
        ),
        panels=(
            BarPanel(
                f"Launches ({KERNELS_A_LAYER} a layer, {LAUNCH * 1e6} µs each) on top of the floor",
                "% of the step's floor",
                tuple(step.label for step in STEPS),
                {"launches": tuple(100 * step.launching / step.floor for step in STEPS)},
            ),
            BarPanel(
                "A decode step of 70B on 8 H100s: where 29.9 ms went",
                "ms",
                ("floor", "launches", "everything else"),
                {
                    "time": (
                        big.floor * 1e3,
                        big.launching * 1e3,
                        (MEASURED_70B - big.floor - big.launching) * 1e3,
                    )
                },
            ),
        ),
        values={
            "launches_us": small.launching * 1e6,
            "share_of_floor": share,
            "floor_70b_ms": big.floor * 1e3,
            "share_of_published_70b": reached,
            "gap_explained_by_launches": explained,
            "share_8b_batch_64": STEPS[3].launching / STEPS[3].floor,
            "share_8b_prefill": prefill.launching / prefill.floor,
        },
    )


CLAIM = Claim(
    name="launch-overhead",
    statement="running one kernel at a time wastes a decode step's time on launches",
    sources=(TALK, NO_BUBBLES, SPLITWISE),
    reproduce=reproduce,
    code=(
        ("minifer/perf/costs.py", "what a step computes and reads"),
        ("minifer/perf/timeline/launches.py", "the kernels of a step, one by one"),
    ),
)
