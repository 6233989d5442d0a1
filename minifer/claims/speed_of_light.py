"""72 % or 78 % of an H100's bandwidth: what a decode step of Llama 1B takes at either.

A decode step at batch 1 reads every weight once. Its floor is bytes ÷ bandwidth; a share of the
bandwidth is the floor divided by the time. All here is data sheet and shape; nothing is timed.
"""

from __future__ import annotations

import math

from minifer.claims.claim import BarPanel, Claim, Curve, CurvePanel, Findings, Settings, Table
from minifer.claims.shapes import LLAMA_1B
from minifer.claims.sources import NO_BUBBLES, TALK
from minifer.perf.costs import kv_bytes_per_token, num_parameters
from minifer.perf.devices import DEVICES

H100, H200, B200 = DEVICES["H100-SXM"], DEVICES["H200-SXM"], DEVICES["B200"]
TALK_SHARE, POST_SHARE = 0.72, 0.78
POST_LIMIT = 1e-3  # "under a millisecond" on an H100
POST_B200 = (600e-6, 680e-6)
BASELINE_SHARE = 0.50  # "at most", of vLLM and SGLang
CONTEXTS = (32, 1024, 4096, 16_384, 65_536)

WEIGHT_BYTES = 2 * num_parameters(LLAMA_1B)
KV_BYTES = kv_bytes_per_token(LLAMA_1B)


def floor_seconds(bandwidth: float, context: int = 0, batch: int = 1) -> float:
    """Weights once, and the KV of `context` tokens of each of `batch` requests."""
    return (WEIGHT_BYTES + batch * context * KV_BYTES) / bandwidth


def reproduce(settings: Settings) -> Findings:
    floor = floor_seconds(H100.memory_bandwidth)
    talk, post = floor / TALK_SHARE, floor / POST_SHARE
    least = floor / POST_LIMIT
    b200 = tuple(floor_seconds(B200.memory_bandwidth) / seconds for seconds in POST_B200)
    contexts = [
        (s, floor_seconds(H100.memory_bandwidth, s), floor_seconds(H100.memory_bandwidth, s) / post)
        for s in CONTEXTS
    ]
    reached = math.ceil((post * H100.memory_bandwidth - WEIGHT_BYTES) / KV_BYTES)
    rows = (
        ("talk: 72 % of an H100", talk * 1e6, TALK_SHARE, ""),
        ("post: 78 % of an H100", post * 1e6, POST_SHARE, ""),
        ("post: under 1 ms on an H100", POST_LIMIT * 1e6, least, "at least this share"),
        ("post: baselines, at most 50 %", floor / BASELINE_SHARE * 1e6, BASELINE_SHARE, ""),
        ("post: 680 µs on a B200", POST_B200[1] * 1e6, b200[1], ""),
        ("post: 600 µs on a B200", POST_B200[0] * 1e6, b200[0], ""),
    )
    return Findings(
        basis=f"arithmetic: Llama 3.2 1B is {WEIGHT_BYTES / 1e9:.2f} GB in bfloat16, data sheets' "
        "bandwidths; nothing is timed here",
        verdict=f"two figures for one kernel: 72 % is {talk * 1e6:,.0f} µs, 78 % is "
        f"{post * 1e6:,.0f} µs, and only the second is under the millisecond that was published",
        reproduction=f"the floor on an H100 is {floor * 1e6:.0f} µs. 72 % of the bandwidth (the "
        f"talk) is a step of {talk * 1e6:,.0f} µs, 78 % (the post of the same group) one of "
        f'{post * 1e6:,.0f} µs. The post\'s "under 1 ms" needs at least {least:.1%}: it fits its '
        "own figure, not the talk's.",
        breaking="another chip, or a context. On a B200 the published 600 to 680 µs are "
        f"{b200[1]:.0%} to {b200[0]:.0%} of the bandwidth: faster in time, farther from the limit. "
        f"And the share counts weights alone: from {reached:,} tokens of context on the floor "
        f"with its KV lies above {post * 1e6:,.0f} µs, and no kernel whatever can keep that time.",
        honest=(
            "A share of a bandwidth means: these bytes, this chip's data sheet, this batch and "
            "this context. Name all four.",
            "Time is what a user feels, and the share is what is left to gain: report both.",
            f"A measured copy reaches less than the data sheet. On an H200 the floor is "
            f"{floor_seconds(H200.memory_bandwidth) * 1e6:.0f} µs, "
            f"{floor_seconds(H200.memory_bandwidth) / TALK_SHARE * 1e6:.0f} at 72 %.",
        ),
        tables=(
            Table(
                "the published figures, in one unit",
                {"figure": "", "µs a step": ",.0f", "share of bandwidth": ".1%", "": ""},
                rows,
            ),
            Table(
                "the floor with the KV of one request, H100",
                {"context": ",d", "floor, µs": ",.0f", "share of the 78 % step": ".1%"},
                tuple((s, seconds * 1e6, share) for s, seconds, share in contexts),
            ),
        ),
        panels=(
            BarPanel(
                "One decode step of Llama 3.2 1B, batch 1, as published",
                "µs a step",
                tuple(row[0] for row in rows),
                {"time": tuple(float(row[1]) for row in rows)},
                x_marks={
                    "floor B200": floor_seconds(B200.memory_bandwidth) * 1e6,
                    "floor H100": floor * 1e6,
                },
            ),
            CurvePanel(
                "What the KV cache adds to the floor on an H100",
                "context, tokens of one request",
                "µs a step",
                (
                    Curve.of(
                        "floor: weights and KV", {s: seconds * 1e6 for s, seconds, _ in contexts}
                    ),
                ),
                log="x",
                y_marks={"72 % of weights alone": talk * 1e6, "78 %": post * 1e6},
            ),
        ),
        values={
            "weight_gb": WEIGHT_BYTES / 1e9,
            "floor_us": floor * 1e6,
            "talk_us": talk * 1e6,
            "post_us": post * 1e6,
            "least_share_for_1_ms": least,
            "b200_share_low": b200[1],
            "b200_share_high": b200[0],
            "breaking_context": reached,
        },
    )


CLAIM = Claim(
    name="speed-of-light",
    statement="a megakernel decodes Llama 1B at 72 % (or 78 %) of an H100's memory bandwidth",
    sources=(TALK, NO_BUBBLES),
    reproduce=reproduce,
    code=(
        ("minifer/perf/costs.py", "what a step reads"),
        ("minifer/perf/devices.py", "what chips can do, with sources"),
        ("kernels/mega/", "a megakernel of our own; `minifer bench limit` measures its machine"),
    ),
)
