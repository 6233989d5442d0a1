"""What the bug clinic's pictures show of one request, as plain values: by layer, step and slot.

Everything is the real engine with minifer-tiny; a fault is one of `minifer.faults`, or one layer
that is made ill here, so that there is a layer to look for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifer.course import example
from minifer.engine import Engine
from minifer.faults.matrix import build_engine
from minifer.faults.memory import off_by_one_length
from minifer.faults.registry import patched
from minifer.faults.scenes import OTHER, QUESTIONS, ask
from minifer.sampling_params import SamplingParams

Ill = Callable[[Engine], AbstractContextManager[None]]
WELL, WRONG, NAN = "well", "wrong", "NaN"
VISIBLE = 1e-4  # relative difference from which a layer's output counts as another one


@dataclass(frozen=True)
class Trace:
    """What one request saw. layers [steps, L, D]: of its newest row, after each layer.

    logits [steps, V]: what its token was drawn from. tokens: drawn. finish_reason: why it ended.
    """

    layers: Tensor
    logits: Tensor
    tokens: list[int]
    finish_reason: str


def trace(
    prompt: str,
    *,
    ill: Ill | None = None,
    forced: Sequence[int] = (),
    max_tokens: int = 24,
    memory: Callable[[Engine], None] | None = None,
) -> Trace:
    """Serve one prompt greedily on an engine of its own, and keep what every layer says.

    ill: what is wrong with the engine. forced: tokens that are drawn whatever the logits say, so
    that two runs read the same text. memory: changes the KV memory before the request comes.
    """
    loaded = example.tiny()
    engine = build_engine(loaded, block_size=16, num_kv_blocks=16)
    if memory is not None:
        memory(engine)
    seen: list[Tensor] = []
    rows: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, given, out: seen.append(out[-1].clone()))
        for layer in loaded.model.layers
    ]
    params = SamplingParams(
        temperature=0, max_tokens=len(forced) or max_tokens, ignore_eos=True, logprobs=0
    )
    try:
        with ill(engine) if ill else nullcontext(), _recorded(engine, rows, forced):
            engine.add_request("traced", prompt, params)
            last: Any = None
            while engine.has_unfinished_requests:
                last = next(iter(engine.step()), last)
    finally:
        for hook in hooks:
            hook.remove()
    answer = last.outputs[0]
    num_layers = len(loaded.model.layers)
    layers = torch.stack(seen).unflatten(0, (-1, num_layers))
    return Trace(layers, torch.stack(rows), list(answer.token_ids), str(answer.finish_reason))


@contextmanager
def _recorded(engine: Engine, rows: list[Tensor], forced: Sequence[int]) -> Iterator[None]:
    runner: Any = engine.runner
    forward = runner.forward

    def recorded(step: Any) -> Tensor:
        logits: Tensor = forward(step).clone()
        (entry, row) = step.sampled[0]
        rows.append(logits[row].clone())
        place = entry.request.num_output_tokens
        if place < len(forced):
            logits[row, forced[place]] = logits[row].nan_to_num(0).max() + 1
        return logits

    with patched(runner, forward=recorded):
        yield


def gaps(well: Trace, ill: Trace) -> Tensor:
    """[L + 1, steps]: the largest difference after each layer and in the logits, over the largest
    number there. NaN where the ill run holds NaN."""
    steps = min(len(well.logits), len(ill.logits))
    rows = [
        (a[:steps] - b[:steps]).abs().amax(-1) / a[:steps].abs().amax(-1)
        for a, b in [
            *zip(well.layers.unbind(1), ill.layers.unbind(1), strict=True),
            (well.logits, ill.logits),
        ]
    ]
    return torch.stack(rows)


def health(differences: Tensor) -> list[list[str]]:
    """Rows of "well", "wrong" and "NaN" for what `gaps` gives."""
    return [
        [NAN if math.isnan(x) else WRONG if x > VISIBLE else WELL for x in row]
        for row in differences.tolist()
    ]


def turned_key(layer: int, after: int) -> Ill:
    """An engine whose layer loses the sign of one key once `after` tokens are drawn."""

    @contextmanager
    def ill(engine: Engine) -> Iterator[None]:
        runner: Any = engine.runner
        forward = runner.forward

        def faulty(step: Any) -> Tensor:
            logits: Tensor = forward(step)
            for entry, _ in step.sampled:
                if entry.request.num_output_tokens == after:
                    runner.kv.keys[layer][entry.request.block_table[0], 0] *= -1
            return logits

        with patched(runner, forward=faulty):
            yield

    return ill


Cell = tuple[int, int]  # step, row


def hunt(
    grid: Sequence[Sequence[str]],
    first_bad: Callable[[int, Callable[[int], bool]], tuple[int, list[int]]],
) -> tuple[Cell, list[Cell]]:
    """Where it began, and all cells that were looked at: the step on top, then the row below it.

    first_bad(count, is_bad) → (place, places it looked at): a search along one line.
    """
    top = len(grid) - 1
    step, steps = first_bad(len(grid[0]), lambda s: grid[top][s] != WELL)
    row, rows = first_bad(top + 1, lambda r: grid[r][step] != WELL)
    return (step, row), [(s, top) for s in steps] + [(step, r) for r in rows]


# -- one slot too many


@dataclass(frozen=True)
class Content:
    """What lies in the slot that nobody should read. kl: of the worst step, in nats, None when
    the logits are not finite. changed: steps whose likeliest token is another one, of `steps`."""

    name: str
    kl: float | None
    changed: int
    steps: int


def slot_contents(max_tokens: int = 24) -> list[Content]:
    """The off-by-one of `minifer.faults` over memory with different contents, on one text."""
    well = trace(QUESTIONS[0], max_tokens=max_tokens)
    contents: Mapping[str, Callable[[Engine], None]] = {
        "zeros": lambda engine: _fill(engine, lambda t: t.zero_()),
        "another reply": lambda engine: _leftovers(engine, 1),
        "the same, 4 times as large": lambda engine: _leftovers(engine, 4),
        "the same, 16 times as large": lambda engine: _leftovers(engine, 16),
        "NaN": lambda engine: _fill(engine, lambda t: t.fill_(math.nan)),
    }
    return [_content(name, well, memory) for name, memory in contents.items()]


def _content(name: str, well: Trace, memory: Callable[[Engine], None]) -> Content:
    ill = trace(QUESTIONS[0], ill=off_by_one_length, forced=well.tokens, memory=memory)
    steps = len(well.tokens) - 1  # the first token is the prefill's
    if not bool(ill.logits.isfinite().all()):
        return Content(name, None, steps, steps)
    p, q = (run.logits.log_softmax(-1) for run in (well, ill))
    kl = (p.exp() * (p - q)).sum(-1).max()
    changed = (ill.logits.argmax(-1) != well.logits.argmax(-1)).sum()
    return Content(name, float(kl), int(changed), steps)


def _fill(engine: Engine, change: Callable[[Tensor], object]) -> None:
    runner: Any = engine.runner
    for tensor in (*runner.kv.keys, *runner.kv.values):
        change(tensor)


def _leftovers(engine: Engine, factor: float) -> None:
    """Every block holds what somebody else's reply has left there, times a factor."""
    ask(engine, OTHER, max_tokens=1, cache_salt="before")
    _fill(engine, lambda tensor: tensor.copy_(tensor[1:2] * factor))
