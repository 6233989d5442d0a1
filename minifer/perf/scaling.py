"""How the cost of a step grows: with the requests that run, with their contexts, with the queue.

A cost that grows as size^e is a line of slope e on log-log paper, so the exponent is a regression
of log cost on log size. A constant part flattens the small end; the slope of the larger half
of the sizes is given too.

Preparation (all of a step but the model) is measured with the engine's own stages around a model
that costs nothing, `SilentRunner`, in seconds of this process: neighbours on the same cores do not
count. Whole steps are measured with the real model, by the wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.execution.forward_batch import ForwardBatch
from minifer.kv.step_input import StepInput
from minifer.perf.steps import busy_clock
from minifer.request import OutputKind, SamplingParams
from minifer.scheduling.admission import Limits
from minifer.weights.resolve import LoadedModel

BLOCK_SIZE = 16
STAGES = ("schedule", "prepare", "batch", "model", "sample", "postprocess")
PREPARATION = STAGES[:3]  # what has to be there before the model can run
MAX_PLAIN = 2000  # tokens that silent replies are made of


@dataclass(frozen=True)
class Fit:
    """cost ≈ c · size^exponent. error: the exponent's standard error. tail: the exponent of the
    larger half of the sizes. sizes, costs: what was fitted."""

    exponent: float
    error: float
    tail: float
    sizes: tuple[int, ...]
    costs: tuple[float, ...]


def fit_power(sizes: Sequence[int], costs: Sequence[float]) -> Fit:
    """Least squares of log cost on log size.

    Raises `ValueError`: fewer than three different sizes, or a size or cost that is not positive.
    """
    if len(sizes) != len(costs) or len(set(sizes)) < 3:
        raise ValueError(
            f"a fit needs a cost for each of at least 3 sizes, got {len(costs)} costs for the "
            f"sizes {list(sizes)}"
        )
    if min(sizes) <= 0 or min(costs) <= 0:
        raise ValueError(f"sizes and costs must be above 0, got {min(sizes)} and {min(costs)}")
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    slope, error = _line(x, y)
    half = max(2, len(x) // 2)
    order = sorted(range(len(x)), key=x.__getitem__)[-half:]
    tail, _ = _line([x[i] for i in order], [y[i] for i in order])
    return Fit(slope, error, tail, tuple(sizes), tuple(costs))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of the regression line and its standard error (0 where two points leave none)."""
    n, mx, my = len(x), sum(x) / len(x), sum(y) / len(y)
    sxx = sum((a - mx) ** 2 for a in x)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sxx
    rest = sum((b - my - slope * (a - mx)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / (n - 2) / sxx) if n > 2 else 0.0


class SilentRunner:
    """Lays a step out as a model would want it, and answers with logits made beforehand.

    Greedy tokens are drawn from `tokens` and differ from step to step: replies do not repeat
    themselves. lap: told (stage, seconds). rows: at most so many are asked for.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        tokens: Sequence[int],
        lap: Callable[[str, float], None] = lambda stage, seconds: None,
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        self._rows = rows
        self._logits = torch.randn(2 * rows, vocab_size, generator=draw)
        chosen = torch.tensor(tokens)[torch.randint(len(tokens), (2 * rows,), generator=draw)]
        self._logits[torch.arange(2 * rows), chosen] = 100.0
        self._lap = lap
        self._step = 0
        self._device = torch.device("cpu")

    def forward(self, step: StepInput) -> Tensor:
        started = busy_clock()
        batch = ForwardBatch.of(step, self._device)
        _ = batch.decode  # slots of all contexts, made once a step
        self._lap("batch", busy_clock() - started)
        self._step += 1
        first = self._step % self._rows
        return self._logits[first : first + len(step.logits_rows)]


def plain_tokens(loaded: LoadedModel) -> list[int]:
    """Tokens of English text, of which guards and detokenizer see nothing special; at most some."""
    V, tokenizer = loaded.config.vocab_size, loaded.tokenizer
    if tokenizer is None:
        return list(range(V))
    first = range(min(V, 2 * MAX_PLAIN))
    plain = [t for t in first if (text := tokenizer.decode([t])) and text.isascii()]
    return plain[-MAX_PLAIN:] or list(first)


class StepProbe:
    """An engine whose requests all decode, and the seconds of each stage of its steps.

    batch: requests that run. context: tokens of each. waiting: requests behind them. policy:
    who of them is next. blocked: whether they wait for memory, with a seat free, or for a seat; a
    free seat makes the scheduler look at the head of the queue in every step. steps: that can be
    taken. compute: let the model itself compute the steps; options: fields of `EngineConfig`.

    Contexts are never computed: what KV holds changes no time.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        batch: int,
        context: int,
        *,
        waiting: int = 0,
        policy: str = "fcfs",
        blocked: bool = False,
        steps: int = 8,
        compute: bool = False,
        **options: Any,
    ) -> None:
        blocks = batch * -(-(context + steps + 1) // BLOCK_SIZE)
        config = EngineConfig.from_kwargs(
            **{
                "block_size": BLOCK_SIZE,
                "num_kv_blocks": blocks,
                "max_num_seqs": batch + blocked,
                "max_num_batched_tokens": batch * context + 1,
                "scheduling_policy": policy,
                **options,
            }
        )
        self.computes = compute
        self._clock = time.perf_counter if compute else busy_clock
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._vocab_size = loaded.config.vocab_size
        self._tokens = plain_tokens(loaded)
        silent = SilentRunner(batch, self._vocab_size, self._tokens, self._lap)
        self.engine = self._engine(loaded, config, silent, blocks, compute)
        model: Any = self.engine.runner
        self.engine.runner = silent
        self._draw = torch.Generator().manual_seed(1)
        self._add("r", batch, context, steps)
        self.engine.step()  # the prefill, of which nothing is computed
        if compute:
            for tensor in (*model.kv.keys, *model.kv.values):
                tensor.fill_(0.5)  # memory that was never written costs no read
            self.engine.runner = model
            self._time(model, "forward", "model")
        # A blocked one needs more blocks than are free; of the others nothing is looked at.
        length = min(batch * (steps + 1 + BLOCK_SIZE), batch * context) if blocked else 1
        self._add("w", waiting, length, steps)
        self._time(self.engine.scheduler, "schedule", "schedule")
        self._time(self.engine.kv, "prepare", "prepare")
        self._time(self.engine, "sampler", "sample")

    def _engine(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        silent: SilentRunner,
        blocks: int,
        compute: bool,
    ) -> Engine:
        if compute:
            return Engine.from_loaded(loaded, config)
        capacity = blocks * BLOCK_SIZE
        limits = Limits(
            vocab_size=self._vocab_size,
            max_model_len=capacity,
            kv_capacity=capacity,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            loop=None,
        )
        return Engine(config, silent, limits, tokenizer=loaded.tokenizer)

    def _add(self, name: str, count: int, length: int, steps: int) -> None:
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=steps + 1, output_kind=OutputKind.DELTA
        )
        known = torch.tensor(self._tokens)
        for i in range(count):
            prompt = known[torch.randint(len(known), (length,), generator=self._draw)].tolist()
            self.engine.add_request(f"{name}{i}", prompt, params)

    def _time(self, owner: Any, name: str, stage: str) -> None:
        """Count the seconds of every call of `owner.name`."""
        call = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            started = self._clock()
            result = call(*arguments)
            self._lap(stage, self._clock() - started)
            return result

        setattr(owner, name, timed)

    def _lap(self, stage: str, seconds: float) -> None:
        self.seconds[stage] += seconds

    def step(self) -> dict[str, float]:
        """One step: stage → seconds. What no other stage took is post-processing."""
        self.seconds = dict.fromkeys(STAGES, 0.0)
        started = self._clock()
        self.engine.step()
        whole = self._clock() - started
        self.seconds["postprocess"] = whole - sum(self.seconds.values())
        return self.seconds

    def take(self, steps: int) -> dict[str, float]:
        """Medians over some steps: every stage, `preparation` and the `seconds` of all."""
        taken = [self.step() for _ in range(steps)]
        found = {stage: median(step[stage] for step in taken) for stage in STAGES}
        found["preparation"] = median(sum(step[s] for s in PREPARATION) for step in taken)
        return found | {"seconds": median(sum(step.values()) for step in taken)}
