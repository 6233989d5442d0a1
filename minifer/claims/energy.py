"""Joules a token: a model with its boundary, and a measurement where there is a counter.

A chip that runs a step draws its full power for as long as the step takes, so a token costs
power × seconds ÷ batch. Everything that changes the figure by more than any kernel could stands
beside it: the batch, how busy the chip is, and where the boundary is drawn.
"""

from __future__ import annotations

from minifer.claims import power
from minifer.claims.claim import BarPanel, Claim, Curve, CurvePanel, Findings, Settings, Table
from minifer.claims.shapes import LLAMA_8B, LLAMA_70B
from minifer.claims.sources import GEMINI_ENERGY, ML_ENERGY, TALK, WORDS_TO_WATTS
from minifer.config import ModelConfig
from minifer.perf.costs import num_parameters, prefill_cost, step_cost
from minifer.perf.devices import DEVICES

H100 = DEVICES["H100-SXM"]
BANDWIDTH_SHARE, FLOPS_SHARE = 0.7, 0.5  # of the data sheet's, sustained
IDLE_SHARE = 0.1  # of full power, a GPU that waits: an assumption
CONTEXT = 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PUBLISHED_8B = (0.12, 0.20)  # J a token, Llama 3.1 8B, H100, batch 64 (ML.ENERGY)
GEMINI_WH, GEMINI_CHIP_WH = 0.24, 0.10
PROMPT, OUTPUT = 1155, 211  # mean lengths of Azure's conversations of 2023
BUSY = (1.0, 0.5, 0.1)  # share of time in which there is work
HERE_BATCH, HERE_TOKENS, HERE_ROUNDS = 16, 128, 3  # what this machine serves to be measured
HERE_IDLE = 1.0  # seconds it does nothing, for comparison


def step_seconds(model: ModelConfig, batch: int, context: int = CONTEXT) -> float:
    """A decode step on an H100 that sustains the shares above."""
    cost = step_cost(model, [(1, context)] * batch).total()
    moved = 2 * num_parameters(model) + cost.kv_bytes
    return max(
        moved / (BANDWIDTH_SHARE * H100.memory_bandwidth),
        cost.flops / (FLOPS_SHARE * H100.peak_flops),
    )


def joules_a_token(model: ModelConfig, batch: int, busy: float = 1.0) -> float:
    """Of the chip. busy: share of time with work; the power of the rest, idle, is charged to the
    tokens too."""
    waiting = IDLE_SHARE * H100.power_watts * (1 / busy - 1)
    return (H100.power_watts + waiting) * step_seconds(model, batch) / batch


def joules_a_request(model: ModelConfig, batch: int) -> tuple[float, float]:
    """(prompt, output) of a request of mean length: a prompt is computed alone, at full power."""
    seconds = prefill_cost(model, PROMPT).total().flops / (FLOPS_SHARE * H100.peak_flops)
    return H100.power_watts * seconds, OUTPUT * joules_a_token(model, batch)


def measured_here() -> tuple[str, dict[str, float]]:
    """A sentence about this machine, and its numbers: minifer-tiny, with RAPL's counters."""
    if not power.readable():
        return "This machine shows no energy counter (RAPL): not measurable here.", {}
    import time

    from minifer import LLM, SamplingParams

    llm = LLM("minifer-tiny")
    prompts = ["The energy of a token"] * HERE_BATCH
    sampling = SamplingParams(max_tokens=HERE_TOKENS, ignore_eos=True)
    llm.generate(prompts[:1], sampling)
    idle = power.measure(lambda: time.sleep(HERE_IDLE))
    tokens = HERE_ROUNDS * HERE_BATCH * HERE_TOKENS

    def serve() -> None:
        for _ in range(HERE_ROUNDS):
            llm.generate(prompts, sampling)

    used = power.measure(serve)
    llm.close()
    gross = used.joules / tokens
    net = gross - idle.joules / idle.seconds * used.seconds / tokens
    said = (
        f"Measured here with RAPL, CPU packages only: minifer-tiny at batch {HERE_BATCH} uses "
        f"{gross:.4f} J a token, {net:.4f} without what the machine uses idle."
    )
    return said, {"here_gross_j": gross, "here_net_j": net}


def reproduce(settings: Settings) -> Findings:
    per_token = {batch: joules_a_token(LLAMA_8B, batch) for batch in BATCHES}
    tenth = joules_a_token(LLAMA_8B, 64, busy=0.1)
    full = H100.power_watts * 2 * num_parameters(LLAMA_8B) / H100.memory_bandwidth
    boundary = GEMINI_WH / GEMINI_CHIP_WH
    here, here_values = measured_here()
    requests = {batch: joules_a_request(LLAMA_8B, batch) for batch in (1, 8, 64)}
    rows = tuple(
        (
            batch,
            step_seconds(LLAMA_8B, batch) * 1e3,
            *(joules_a_token(LLAMA_8B, batch, busy) for busy in BUSY),
            boundary * joules_a_token(LLAMA_8B, batch),
            joules_a_token(LLAMA_70B, batch),
        )
        for batch in BATCHES
    )
    return Findings(
        basis=f"model: an H100 at its {H100.power_watts:.0f} W while it works, "
        f"{BANDWIDTH_SHARE:.0%} of its bandwidth, {FLOPS_SHARE:.0%} of its FLOP/s, "
        f"{CONTEXT:,} tokens of context; the boundary is the chip. {here}",
        verdict=f"one model on one chip: {per_token[1]:.1f} J a token at batch 1, "
        f"{per_token[64]:.2f} at 64; no figure means anything without batch, load and boundary",
        reproduction=f"Llama 8B on an H100 uses {per_token[64]:.2f} J a token at batch 64 "
        f"(ML.ENERGY measured {PUBLISHED_8B[1]:.2f}, and {PUBLISHED_8B[0]:.2f} with newer software)"
        f" and {per_token[1]:.1f} at batch 1; with the whole bandwidth it would be {full:.2f}.",
        breaking="the setting is the result. From batch 1 to 64 the same model and chip go down "
        f"by {per_token[1] / per_token[64]:.0f}×; a chip that has work a tenth of the time goes up "
        f"by {tenth / per_token[64]:.1f}×; and the boundary is worth {boundary:.1f}× (Google: "
        f"{GEMINI_WH} Wh a prompt in full, {GEMINI_CHIP_WH} if only the chips count).",
        honest=(
            "Name model, chip, batch, context, load and boundary: chip, server or data centre.",
            "Energy belongs to requests: a token of an answer also carries its share of the prompt "
            f"({requests[64][0] / sum(requests[64]):.0%} of a request of {PROMPT:,} + {OUTPUT} "
            "tokens at batch 64).",
            "A chip's rated power is an upper bound of what it draws; a meter is better than any "
            "model.",
            here,
        ),
        tables=(
            Table(
                "J a token of decode, Llama 8B on one H100 (last column: 70B's weights, on as many "
                "chips as it takes)",
                {
                    "batch": "d",
                    "step, ms": ".1f",
                    "J, always busy": ".3f",
                    "half": ".3f",
                    "a tenth": ".3f",
                    f"× {boundary:.1f} boundary": ".3f",
                    "70B": ".2f",
                },
                rows,
            ),
            Table(
                f"J a request: {PROMPT:,} tokens of prompt, {OUTPUT} of answer, Llama 8B",
                {"batch": "d", "prompt": ".0f", "answer": ".0f", "Wh in all": ".3f"},
                tuple((b, p, o, (p + o) / 3600) for b, (p, o) in requests.items()),
            ),
        ),
        panels=(
            CurvePanel(
                "Joules a token of decode: Llama 8B on an H100",
                "requests that decode together",
                "J a token",
                tuple(
                    Curve.of(
                        f"busy {busy:.0%} of the time",
                        {batch: joules_a_token(LLAMA_8B, batch, busy) for batch in BATCHES},
                    )
                    for busy in BUSY
                ),
                log="xy",
                y_marks={f"measured, batch 64: {j} J": j for j in PUBLISHED_8B},
            ),
            BarPanel(
                "One request, by batch: prompt and answer (the chip alone)",
                "J",
                tuple(f"batch {batch}" for batch in requests),
                {
                    "prompt": tuple(p for p, _ in requests.values()),
                    "answer": tuple(o for _, o in requests.values()),
                },
                log="x",
            ),
        ),
        values={
            "j_batch_1": per_token[1],
            "j_batch_64": per_token[64],
            "j_batch_1_full_bandwidth": full,
            "batch_factor": per_token[1] / per_token[64],
            "load_factor": tenth / per_token[64],
            "boundary_factor": boundary,
            **here_values,
        },
    )


CLAIM = Claim(
    name="energy",
    statement="inference turns electricity into tokens, at so many joules each",
    sources=(TALK, ML_ENERGY, WORDS_TO_WATTS, GEMINI_ENERGY),
    reproduce=reproduce,
    code=(
        ("minifer/claims/energy.py", "the model"),
        ("minifer/claims/power.py", "this machine's counters"),
        ("minifer/perf/costs.py", "what a step computes and reads"),
    ),
)
