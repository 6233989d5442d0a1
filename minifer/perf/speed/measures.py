"""From one run of a task to the numbers a benchmark keeps: rates, bytes, FLOPs, stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minifer.config import ModelConfig
from minifer.perf.costs import step_cost
from minifer.perf.speed.cells import Ask
from minifer.perf.speed.session import STAGES, Run, StepLaps
from minifer.perf.speed.stamps import decode_window, first_tokens, whole_run
from minifer.perf.speed.traffic import Traffic, decode_bytes

UNITS: Mapping[str, str] = {
    "tokens_per_second": "tokens/s",
    "input_tokens_per_second": "tokens/s",
    "requests_per_second": "1/s",
    "step_seconds": "s",
    "first_token_seconds": "s",
    "bytes_per_second": "B/s",
    "flops_per_second": "FLOP/s",
    "preparation_share": "",
    "acceptance": "",
    "tokens_per_step": "tokens",
    **{f"{stage}_seconds": "s" for stage in STAGES},
}


@dataclass(frozen=True)
class Task:
    """Requests that belong together. kind: "decode", "prefill" or "throughput"."""

    name: str
    kind: str
    asks: tuple[Ask, ...]

    @property
    def prompts(self) -> list[int]:
        return [len(ask.prompt) for ask in self.asks]

    def as_cell(self) -> dict[str, Any]:
        """As a job names it."""
        requests = [{"prompt": list(a.prompt), "max_tokens": a.max_tokens} for a in self.asks]
        return {"name": self.name, "requests": requests}


def measures(
    task: Task, run: Run, config: ModelConfig, traffic: Traffic | None = None
) -> dict[str, float]:
    """The numbers of one run, by the names of `UNITS`; what is not known is left out.

    Raises `ValueError` where the tokens do not allow it (`stamps.decode_window`).
    """
    if task.kind == "decode":
        return _decode(task, run, config, traffic)
    if task.kind == "prefill":
        return _prefill(task, run, config)
    seconds = whole_run(run.started, run.stamps)
    return {
        "tokens_per_second": sum(map(len, run.stamps)) / seconds,
        "input_tokens_per_second": sum(task.prompts) / seconds,
        "requests_per_second": len(task.asks) / seconds,
        "first_token_seconds": first_tokens(run.started, run.stamps)[0],
        **_stages(run.steps),
    }


def _decode(task: Task, run: Run, config: ModelConfig, traffic: Traffic | None) -> dict[str, float]:
    window = decode_window(run.stamps)
    out = {
        "tokens_per_second": window.tokens_per_second,
        "step_seconds": window.seconds / len(window.steps),
    }
    if not run.repeated:
        out["first_token_seconds"] = first_tokens(run.started, run.stamps)[1]
    if traffic is not None:
        out["bytes_per_second"] = decode_bytes(traffic, task.prompts, window.steps) / window.seconds
    if config.loop is None and not run.speculation:  # of drafts that were wrong nobody knows
        ends = (window.steps[0], window.steps[-1])  # between them it grows evenly
        flops = sum(step_cost(config, _queries(task, had)).total().flops for had in ends) / 2
        out["flops_per_second"] = flops * len(window.steps) / window.seconds
    inside = [step for step in run.steps if window.start < step.ended <= window.end]
    out.update(_stages(inside))
    if run.speculation:
        out["acceptance"] = run.speculation["accepted"] / max(1.0, run.speculation["drafted"])
        out["tokens_per_step"] = window.tokens / len(window.steps) / len(task.asks)
    return out


def _queries(task: Task, had: Sequence[int]) -> list[tuple[int, int]]:
    """(query, context) of a decode step. had: tokens each request was answered before it."""
    return [(1, p + count) for p, count in zip(task.prompts, had, strict=True)]


def _prefill(task: Task, run: Run, config: ModelConfig) -> dict[str, float]:
    _, seconds = first_tokens(run.started, run.stamps)
    out = {"tokens_per_second": sum(task.prompts) / seconds, "first_token_seconds": seconds}
    if config.loop is None:
        total = step_cost(config, [(p, p) for p in task.prompts]).total()
        out["flops_per_second"] = total.flops / seconds
    return out | _stages(run.steps)


def _stages(steps: Sequence[StepLaps]) -> dict[str, float]:
    """Mean seconds of each stage of a step, and the share of scheduling and preparation."""
    if not steps:
        return {}
    means = [sum(column) / len(steps) for column in zip(*(s.seconds for s in steps), strict=True)]
    out = {f"{stage}_seconds": mean for stage, mean in zip(STAGES, means, strict=True)}
    out["preparation_share"] = sum(s.preparation for s in steps) / sum(s.whole for s in steps)
    return out


def step_intensity(task: Task, config: ModelConfig, traffic: Traffic) -> tuple[float, float]:
    """(FLOPs, bytes) of a task's middle step: where it stands under a roofline."""
    if task.kind == "prefill":
        cost = step_cost(config, [(p, p) for p in task.prompts]).total()
        kv = sum(layers for _, layers in traffic.windows) * traffic.kv_token * sum(task.prompts)
        return cost.flops, traffic.weights + traffic.row * sum(task.prompts) + kv
    contexts = [len(a.prompt) + a.max_tokens // 2 for a in task.asks]
    cost = step_cost(config, [(1, c) for c in contexts]).total()
    return cost.flops, traffic.step(contexts)
