"""What the engine makes of a text that is known: its losses, tokens and loops, token by token.

The engine runs as it does for users: admission, scheduling, KV blocks, the loop runner. Its sampler
alone is another one: it scores the token that comes next in the text, and returns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.execution.sampler import Picked, Sampled, Sampler, SampleRow
from minifer.sampling_params import OutputKind, SamplingParams


@dataclass(frozen=True)
class Forced:
    """B rows of S + 1 tokens, read one by one after a prompt of n: G = S + 1 − n tokens are scored.

    losses: float64 [B, G], nats of each token. top: int64 [B, G], the likeliest token instead.
    loops: int64 [B, G], iterations behind each of these predictions. core_applications,
    token_loops: `LoopStats` of the whole run. prompt_tokens: computed in all rows together.
    """

    losses: Tensor
    top: Tensor
    loops: Tensor
    core_applications: int
    token_loops: int
    prompt_tokens: int

    @property
    def loss(self) -> float:
        """Mean nats a token."""
        return float(self.losses.mean())

    @property
    def mean_loops(self) -> float:
        """Of the tokens behind the predictions; the first of a row's is its prompt's last."""
        return float(self.loops.double().mean())

    def same_top(self, other: Forced) -> float:
        """Share of the predictions whose likeliest token is the other's."""
        return float((self.top == other.top).double().mean())

    def excess(self, other: Forced) -> tuple[float, float]:
        """Mean loss above the other's on the same rows, and its standard error over rows (0 for
        a single one)."""
        rows = (self.losses - other.losses).mean(1)
        error = float(rows.std() / len(rows) ** 0.5) if len(rows) > 1 else 0.0
        return float(rows.mean()), error


def force(
    loaded: Any,
    rows: Tensor,
    *,
    prompt_len: int = 1,
    num_loops: int | None = None,
    exit_threshold: float | None = None,
    **options: Any,
) -> Forced:
    """Read rows int64 [B, S + 1] through an engine of its own, all rows at once.

    loaded: a `LoadedModel` of a loop model. prompt_len: leading tokens that are given as a prompt.
    num_loops, exit_threshold: of every request. options: further fields of `EngineConfig`; prefix
    caching is off unless asked for. Raises `ValueError` for rows without a token to score, and
    what the engine refuses.
    """
    B, length = rows.shape
    if not 1 <= prompt_len < length:
        raise ValueError(
            f"prompt_len must be in [1, {length}) for rows of {length} tokens, got {prompt_len}"
        )
    texts = {f"row-{b}": rows[b].tolist() for b in range(B)}
    options = {"enable_prefix_caching": False, "guards": "off", "max_num_seqs": B, **options}
    block_size = options.setdefault("block_size", EngineConfig.block_size)
    options.setdefault("num_kv_blocks", B * -(-length // block_size))
    params = SamplingParams(
        temperature=0,
        max_tokens=length - prompt_len,
        ignore_eos=True,
        detokenize=False,
        num_loops=num_loops,
        exit_threshold=exit_threshold,
        output_kind=OutputKind.FINAL_ONLY,
    )
    loops: dict[str, list[int]] = {}
    with Engine.from_loaded(loaded, EngineConfig.from_kwargs(**options)) as engine:
        engine.sampler = teacher = Teacher(texts)
        for name, text in texts.items():
            engine.add_request(name, text[:prompt_len], params)
        while engine.has_unfinished_requests:
            for output in engine.step():
                (answer,) = output.outputs
                if answer.finish_reason != "length":
                    raise RuntimeError(f"{output.request_id} ended early: {answer.stop_reason}")
                loops[output.request_id] = answer.num_loops or []
        stats = engine.runner.stats  # type: ignore[attr-defined]
    return Forced(
        losses=torch.tensor([teacher.losses[name] for name in texts], dtype=torch.float64),
        top=torch.tensor([teacher.top[name] for name in texts]),
        loops=torch.tensor([loops[name] for name in texts]),
        core_applications=stats.core_applications,
        token_loops=stats.token_loops,
        prompt_tokens=B * prompt_len,
    )


class Teacher(Sampler):
    """A sampler that always takes the next token of the text, and notes what it would have cost.

    texts: request id → all of its tokens, the prompt among them.
    """

    def __init__(self, texts: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.texts = texts
        self.losses: dict[str, list[float]] = {name: [] for name in texts}
        self.top: dict[str, list[int]] = {name: [] for name in texts}

    @torch.inference_mode()
    def __call__(self, logits: Tensor | Picked, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Logits [R, V] → the true token of every row. Raises `TypeError` for a pick alone."""
        if not rows:
            return []
        if isinstance(logits, Picked):
            raise TypeError("a teacher needs a back end that gives logits, got the picked tokens")
        requests = [row.request for row in rows]
        names = [request.request_id for request in requests]
        following = [self.texts[r.request_id][r.num_tokens] for r in requests]
        scores = logits[[row.logits_row for row in rows]].double()
        losses = F.cross_entropy(scores, torch.tensor(following), reduction="none")
        for name, loss, top in zip(names, losses.tolist(), scores.argmax(-1).tolist(), strict=True):
            self.losses[name].append(loss)
            self.top[name].append(top)
        return [Sampled(token) for token in following]
