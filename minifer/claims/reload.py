"""Load a prefix from a lower tier, or compute it again: above which bandwidth loading wins.

Recompute: the FLOPs of a prefill (`perf.costs`) over the FLOP/s a machine sustains. Reload: the
KV's bytes over a tier's bandwidth. Both grow with the prefix, so the break-even bandwidth hardly
moves with its length; it moves with the model, and most of all with how fast the machine computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from minifer.claims.claim import BarPanel, Claim, Curve, CurvePanel, Findings, Settings, Table
from minifer.claims.shapes import LLAMA_1B, LLAMA_8B, LLAMA_70B, SMOLLM2_135M
from minifer.claims.sources import CACHED_ATTENTION, MOONCAKE, TALK
from minifer.config import ModelConfig
from minifer.kv.tiers.break_even import break_even_bandwidth, mooncake_break_even
from minifer.perf.costs import kv_bytes_per_token, prefill_cost
from minifer.perf.devices import DEVICES

GIGA = 1e9
H200, A100, H100 = DEVICES["H200-SXM"], DEVICES["A100-80GB-SXM"], DEVICES["H100-SXM"]
SUSTAINED = 0.5  # of the data sheet's peak, in a prefill
CPU_FLOPS = 100e9  # a laptop's or a small server's, in float32
# Bytes a second of one direction: what a tier may be, from fast to slow.
TIERS = {
    "PCIe 5 x16": 50e9,
    "100 Gbit/s network": 12.5e9,
    "one NVMe": 6.5e9,
    "one slow disk": 0.5e9,
}


@dataclass(frozen=True)
class Machine:
    """A model where it runs. flops: that a prefill sustains. element: bytes of a KV element."""

    label: str
    model: ModelConfig
    flops: float
    element: float = 2.0

    def kv_bytes(self, num_tokens: int) -> float:
        return num_tokens * kv_bytes_per_token(self.model, self.element)

    def recompute(self, num_tokens: int) -> float:
        """Seconds of a prefill of `num_tokens`, logits of the last one only."""
        return prefill_cost(self.model, num_tokens).total().flops / self.flops

    def break_even(self, num_tokens: int) -> float:
        """Bytes a second above which loading is faster."""
        return break_even_bandwidth(self.kv_bytes(num_tokens), self.recompute(num_tokens))


GPU = SUSTAINED * H200.peak_flops
CPU_CASE = Machine("SmolLM2 135M, CPU of 100 GFLOP/s", SMOLLM2_135M, CPU_FLOPS, 4.0)
BIG_CASE = Machine("Llama 70B, 8 × H200", LLAMA_70B, 8 * GPU)
MACHINES = (
    Machine("Llama 1B, H200", LLAMA_1B, GPU),
    Machine("Llama 8B, H200", LLAMA_8B, GPU),
    BIG_CASE,
    CPU_CASE,
)
LENGTHS = (1024, 2048, 8192, 32_768)
TOKENS = 8192  # of the table and of the verdicts; the CPU model's whole context


def mooncake_cases() -> dict[str, float]:
    """Equation 2 of the paper for a 70B model and a prefix of 8,192 tokens, bytes a second."""
    return {
        "8 × A800": mooncake_break_even(8 * A100.peak_flops, 8192, 8, 8192),  # an A100's FLOP/s
        "8 × H800": mooncake_break_even(8 * H100.peak_flops, 8192, 8, 8192),  # an H100's
    }


def reproduce(settings: Settings) -> Findings:
    needed = {machine.label: machine.break_even(TOKENS) for machine in MACHINES}
    big, cpu = needed[BIG_CASE.label], needed[CPU_CASE.label]
    gpus = [needed[machine.label] for machine in MACHINES if machine is not CPU_CASE]
    nvme, disk = TIERS["one NVMe"], TIERS["one slow disk"]
    losing = [tier for tier, speed in TIERS.items() if speed < big]
    published = mooncake_cases()
    rows: list[tuple[str | float, ...]] = []
    for machine in MACHINES:
        kv, computing = machine.kv_bytes(TOKENS), machine.recompute(TOKENS)
        cells = [
            f"{kv / speed * 1e3:,.0f}{' loses' if kv / speed > computing else ''}"
            for speed in TIERS.values()
        ]
        row = (machine.label, kv / 1e6, computing * 1e3, machine.break_even(TOKENS) / GIGA)
        rows.append((*row, *cells))
    return Findings(
        basis=f"arithmetic: FLOPs and bytes from the shapes, {SUSTAINED:.0%} of a GPU's peak "
        "sustained; nothing is timed here",
        verdict=f"holds above a break-even bandwidth: {min(gpus) / GIGA:.1f} to "
        f"{max(gpus) / GIGA:.1f} GB/s on GPUs, {cpu / GIGA:.3f} on a CPU, where everything wins",
        reproduction=f"{TOKENS:,} tokens of an 8B model on an H200 are worth loading from "
        f"{needed['Llama 8B, H200'] / GIGA:.1f} GB/s on, of a 70B model on eight from "
        f"{big / GIGA:.1f}. Mooncake's equation 2 gives {published['8 × A800'] / GIGA:.2f} and "
        f"{published['8 × H800'] / GIGA:.2f} GB/s for 8 × A800 and 8 × H800 (the paper prints 6 "
        "and 19).",
        breaking=f"a fast machine with a slow tier: for 70B on 8 × H200 {' and '.join(losing)} "
        f"({nvme / GIGA:g} and {disk / GIGA:g} GB/s) lose against computing again, and a slow disk "
        "loses for every GPU here. A demonstration on a CPU cannot show it: its break-even is "
        f"{cpu / GIGA:.3f} GB/s, {big / cpu:,.0f} times lower, so every tier wins there.",
        honest=(
            "Print the break-even bandwidth beside every speed-up from reloading.",
            "A speed-up of reloading measured on a CPU says how slowly the CPU computes. It is no "
            "forecast for a GPU.",
            "Faster GPUs, tensor parallelism and higher utilisation raise the break-even; grouped "
            "queries and smaller KV elements lower it.",
            "Loading while computing (layer by layer, or from both ends) moves the break-even down "
            "and is not counted here.",
        ),
        tables=(
            Table(
                f"a prefix of {TOKENS:,} tokens: milliseconds to load it, against computing it",
                {
                    "": "",
                    "KV, MB": ",.0f",
                    "compute, ms": ",.0f",
                    "break-even, GB/s": ".3f",
                    **dict.fromkeys(TIERS, ""),
                },
                tuple(rows),
            ),
        ),
        panels=(
            BarPanel(
                f"Above this bandwidth loading {TOKENS:,} tokens beats computing them",
                "break-even bandwidth, GB/s",
                tuple(needed),
                {"break-even": tuple(value / GIGA for value in needed.values())},
                log="x",
                x_marks={tier: speed / GIGA for tier, speed in TIERS.items()},
            ),
            CurvePanel(
                "It hardly depends on the length of the prefix",
                "prefix, tokens",
                "break-even bandwidth, GB/s",
                tuple(
                    Curve.of(
                        machine.label,
                        {
                            n: machine.break_even(n) / GIGA
                            for n in LENGTHS
                            if n <= machine.model.max_position_embeddings
                        },
                    )
                    for machine in MACHINES
                ),
                log="xy",
            ),
        ),
        values={
            "mooncake_a800_gb_s": published["8 × A800"] / GIGA,
            "mooncake_h800_gb_s": published["8 × H800"] / GIGA,
            "break_even_8b_gb_s": needed["Llama 8B, H200"] / GIGA,
            "break_even_70b_gb_s": big / GIGA,
            "break_even_cpu_gb_s": cpu / GIGA,
        },
    )


CLAIM = Claim(
    name="reload",
    statement="loading stored KV from DRAM, disk or the network beats computing it again",
    sources=(TALK, CACHED_ATTENTION, MOONCAKE),
    reproduce=reproduce,
    code=(
        ("minifer/kv/tiers/break_even.py", "the equation, and the engine's own decision"),
        ("minifer/perf/costs.py", "FLOPs and bytes"),
    ),
)
