"""What memory and arithmetic a loop model can save, and the loss that it costs.

Three knobs of the engine, each measured on the same held-out text by teacher forcing
(`teacher_forcing`): the depth of all tokens, early exit by a threshold, and which iterations keep
their keys and values (`minifer.loops.LoopKVPolicy`).

What each of them loses:

- Depth below the trained mean: the state has not settled. Depth beyond it: nothing was trained to
  use the further loops; with a stable injection they change little, in either direction.
- Early exit: a token that has left makes no keys and values in the iterations it skips; later
  tokens, which may run deeper, read those of its last one instead. `exact_exits` runs every token
  to the end for its keys and values alone and reads the answer where it would have left: the
  difference between the two is what that approximation costs, the rest is the shallower readout.
- `first-m`: from iteration m on a token sees the others as they were at iteration m − 1. Written
  once: prompts may be cached, cut in chunks, shared.
- `terminal` and `cyclic-m`: iterations see what later iterations of earlier tokens left. KV depends
  on the order in which it was computed, so a prompt is computed in one pass and never shared:
  `shared_prompt` counts what that costs where prompts have a common beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.execution.backends.dense import RowsBackend, row_batch
from minifer.loops import LoopKVPolicy
from minifer.parcae.costs import kv_bytes_per_token
from minifer.parcae.lab.tradeoff.teacher_forcing import Forced, force
from minifer.parcae.model import turned_by
from minifer.sampling_params import SamplingParams

POLICIES = ("full", "first-4", "first-2", "first-1", "cyclic-4", "cyclic-2", "terminal")
THRESHOLDS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Row:
    """One way to decode, and what it makes of the held-out text.

    loss: nats a token. excess: above the reference, on the same rows; error: its standard error
    over rows. same_top: share of tokens whose likeliest successor is the reference's.
    core_applications, token_loops: counted over the whole run. kv_bytes: of a token.
    """

    name: str
    loss: float
    excess: float
    error: float
    same_top: float
    mean_loops: float
    core_applications: int
    token_loops: int
    kv_bytes: float


def policy_table(loaded: Any, rows: Tensor, policies: Sequence[str] = POLICIES) -> list[Row]:
    """Each policy at the model's mean depth; the first one is the reference."""
    depth = loaded.config.loop.mean_recurrence
    found = [force(loaded, rows, loop_kv_policy=name) for name in policies]
    return [
        _row(loaded, name, forced, found[0], depth, name)
        for name, forced in zip(policies, found, strict=True)
    ]


@dataclass(frozen=True)
class Exit:
    """Early exit at one threshold, against full depth: as the engine does it, and with the keys
    and values of all iterations. approximation: engine − exact in nats a token, and its standard
    error over rows: what the keys and values that an exited token lacks cost."""

    threshold: float
    engine: Row
    exact: Row
    approximation: float
    error: float


def exit_table(loaded: Any, rows: Tensor, thresholds: Sequence[float] = THRESHOLDS) -> list[Exit]:
    """Early exit from the model's mean depth, one entry a threshold."""
    depth = loaded.config.loop.mean_recurrence
    whole = force(loaded, rows)
    table = []
    for x, exact in zip(thresholds, exact_exits(loaded.model, rows, thresholds), strict=True):
        engine = force(loaded, rows, exit_threshold=x)
        found, truth = (
            _row(loaded, f"exit {x:g}", forced, whole, depth) for forced in (engine, exact)
        )
        table.append(Exit(x, found, truth, *engine.excess(exact)))
    return table


def depth_table(loaded: Any, rows: Tensor, depths: Sequence[int] = DEPTHS) -> list[Row]:
    """All tokens at one depth, against the model's mean depth."""
    deepest = max(depths)
    mean = loaded.config.loop.mean_recurrence
    found = {t: force(loaded, rows, num_loops=t, max_num_loops=deepest) for t in depths}
    reference = found.get(mean) or force(loaded, rows)
    return [_row(loaded, f"depth {t}", found[t], reference, t) for t in depths]


def _row(
    loaded: Any, name: str, forced: Forced, reference: Forced, depth: int, policy: str = "full"
) -> Row:
    excess, error = forced.excess(reference)
    return Row(
        name,
        forced.loss,
        excess,
        error,
        forced.same_top(reference),
        forced.mean_loops,
        forced.core_applications,
        forced.token_loops,
        kv_bytes_per_token(loaded.config, depth, policy),
    )


@torch.inference_mode()
def dense_losses(model: Any, rows: Tensor) -> Tensor:
    """float64 [B, S]: nats of every token after the first of rows int64 [B, S + 1], from whole
    rows without any cache. The slow twin of `force`."""
    batch, backend = _batch(rows), RowsBackend()
    hidden = model(batch, None, backend)
    return _losses(model.logits(hidden, backend), rows)[0]


@torch.inference_mode()
def exact_exits(model: Any, rows: Tensor, thresholds: Iterable[float]) -> list[Forced]:
    """Early exit where every token runs to the end for its keys and values, one result a threshold.

    The state of each token at each iteration is then that of full depth, whatever the threshold;
    only where it is read differs. As in the engine the first token of a row, its prompt, is read
    at full depth.
    """
    batch, backend = _batch(rows), RowsBackend()
    wanted = list(thresholds)
    e, p = model.encode(batch, None, backend)
    term, h = model.input_term(e), model.initial_state(e)
    depth = model.loop.mean_recurrence
    read = [h.clone() for _ in wanted]
    loops = torch.full((len(wanted), len(h)), depth)
    eligible = batch.positions > 0
    open_ = torch.ones_like(loops, dtype=torch.bool)
    for t in range(1, depth + 1):
        before, h = h, model.step(h, term, model.core_pass(p, batch, t - 1))
        turned = turned_by(before, h)
        for i, threshold in enumerate(wanted):
            leaves = open_[i] & ((eligible & (turned < threshold)) | (t == depth))
            read[i][leaves], loops[i][leaves] = h[leaves], t
            open_[i] &= ~leaves
    found = []
    for i, state in enumerate(read):
        logits = model.logits(model.finish(state, model.coda_pass(p, batch)), backend)
        losses, top = _losses(logits, rows)
        own = loops[i].view(len(rows), -1)
        found.append(Forced(losses, top, own, depth, depth * own.numel(), len(rows)))
    return found


def _batch(rows: Tensor) -> Any:
    B, S = rows.shape[0], rows.shape[1] - 1
    return replace(row_batch(B, S), token_ids=rows[:, :-1].flatten())


def _losses(logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B · S, V] → losses float64 [B, S] and the likeliest tokens int64 [B, S]."""
    losses = F.cross_entropy(logits.double(), rows[:, 1:].flatten(), reduction="none")
    return losses.view(len(rows), -1), logits.argmax(-1).view(len(rows), -1)


@dataclass(frozen=True)
class SharedPrompt:
    """Requests whose prompts begin alike, one after the other: their tokens, and those computed."""

    policy: str
    requests: int
    prompt_tokens: int
    computed_tokens: int


def shared_prompt(
    loaded: Any, prefix: Sequence[int], tails: Sequence[Sequence[int]], policy: str
) -> SharedPrompt:
    """Count what the prompts `prefix` + tail cost under a policy, with prefix caching where it can
    be had."""
    caching = not LoopKVPolicy(policy).overwrites
    config = EngineConfig(loop_kv_policy=policy, enable_prefix_caching=caching, guards="off")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    prompts = [[*prefix, *tail] for tail in tails]
    computed = 0
    with Engine.from_loaded(loaded, config) as engine:
        for number, prompt in enumerate(prompts):
            engine.add_request(f"request-{number}", prompt, params)
            while engine.has_unfinished_requests:
                engine.step()
                computed += engine.num_step_tokens
    return SharedPrompt(policy, len(prompts), sum(map(len, prompts)), computed)
