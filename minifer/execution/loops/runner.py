"""The runner of loop models: continuous depth batching and early exit.

Tokens of different depth and at different iterations go through the core together: its weights
are read once for all of them. What differs is which KV slot each attends through, so rows are
grouped by iteration for attention alone. Four requests, two of depth 2 and two of depth 4::

    application of the core    1    2    3    4    5    6    7    8
    depth 2                    a0   a1 | b0   b1 | c0   c1 | d0   d1     four tokens
    depth 4                    a0   a1   a2   a3 | b0   b1   b2   b3     two tokens

A step ends as soon as a token is through (`loop_batching="continuous"`): its request gets the next
one, the others are suspended and go on in the next step. With "lockstep" a step ends with its
deepest token, and those of depth 2 would wait: 16 applications for the four tokens instead of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifer.config import EngineConfig, ModelConfig
from minifer.execution.loops.rows import RowGroup, Rows
from minifer.execution.loops.state import SuspendedLoops
from minifer.execution.runner import ModelRunner
from minifer.kv.step_input import StepInput
from minifer.parcae.layers import Pass
from minifer.parcae.model import turned_by


@dataclass
class LoopStats:
    """Counted since the start. core_applications: times the core's weights were read.
    token_loops: iterations of all tokens together, which is the arithmetic that was done."""

    core_applications: int = 0
    token_loops: int = 0


class LoopedRunner(ModelRunner):
    """A loop model (`minifer.parcae`), its KV storage and a back end."""

    def __init__(
        self, model: Any, config: ModelConfig, engine: EngineConfig, num_blocks: int
    ) -> None:
        assert config.loop is not None  # `make_runner` has looked
        self.loop = config.loop
        self.continuous = engine.loop_batching == "continuous"
        self.stats = LoopStats()
        super().__init__(model, config, engine, num_blocks)

    def _logits(self, step: StepInput) -> Tensor:
        rows = Rows(step, self.device)
        self._enter(rows)
        while self._iterate(rows):
            pass
        return self._leave(rows)

    def _enter(self, rows: Rows) -> None:
        """New tokens pass the prelude; suspended ones come back with what they had."""
        cos, sin = self.model.rotary(rows.batch.positions)
        rows.cos, rows.sin = cos, sin
        if rows.new:
            p = rows.cut(
                rows.new, [(rows.new, rows.part(tuple(rows.new)), 0)], self.kv, self.backend
            )
            e = self.model.prelude_pass(self.model.embed(p.token_ids), p)
            h, term = self.model.initial_state(e), self.model.input_term(e)
            D = h.shape[1]
            rows.h = h.new_empty(len(rows.loops), D)
            rows.term = term.new_empty(len(rows.loops), D)
            rows.h[rows.new], rows.term[rows.new] = h, term
        for span, state in rows.suspended:
            if rows.h is None or rows.term is None:
                D = state.h.shape[1]
                rows.h = state.h.new_empty(len(rows.loops), D)
                rows.term = state.term.new_empty(len(rows.loops), D)
            rows.h[span.start : span.stop], rows.term[span.start : span.stop] = state.h, state.term

    def _iterate(self, rows: Rows) -> bool:
        """One application of the core to every token that still loops; is there to be another?"""
        active = [row for row, looping in enumerate(rows.looping) if looping]
        p = self._pass(rows, active, self._groups(rows, active))
        assert rows.h is not None and rows.term is not None
        before = rows.h[active]
        after = self.model.step(before, rows.term[active], p)
        rows.h[active] = after
        self.stats.core_applications += 1
        self.stats.token_loops += len(active)
        for row in active:
            rows.loops[row] += 1
        for row in self._exits(rows, active, before, after):
            rows.looping[row] = False
            self._fill(rows, row)
        for row in active:
            if rows.loops[row] == rows.depth[row]:
                rows.looping[row] = False
        done = [entry for entry in range(len(rows.spans)) if rows.done(entry)]
        return not done if self.continuous else len(done) < len(rows.spans)

    def _pass(self, rows: Rows, members: list[int], groups: list[RowGroup]) -> Pass:
        return rows.cut(members, groups, self.kv, self.backend)

    def _groups(self, rows: Rows, active: list[int]) -> list[RowGroup]:
        """(rows, their batch, KV slot) for each iteration that some of the rows are at."""
        groups = []
        for t in sorted({rows.loops[row] for row in active}):
            members = [row for row in active if rows.loops[row] == t]
            batch = rows.part(tuple(members), self.loop.policy.writes(t))
            groups.append((members, batch, self.loop.core_slot(t)))
        return groups

    def _exits(self, rows: Rows, active: list[int], before: Tensor, after: Tensor) -> list[int]:
        """Tokens that leave early: their state has all but stopped turning."""
        asked = [i for i, row in enumerate(active) if rows.threshold[row] is not None]
        asked = [i for i in asked if rows.loops[active[i]] < rows.depth[active[i]]]
        if not asked:
            return []
        turned = turned_by(before[asked], after[asked])
        return [
            active[i]
            for i, change in zip(asked, turned.tolist(), strict=True)
            if change < (rows.threshold[active[i]] or 0.0)
        ]

    def _fill(self, rows: Rows, row: int) -> None:
        """A token has left: in the iterations it does not run, later tokens see the keys and
        values of its last one."""
        place, last = rows.step.slot_mapping[row], rows.loops[row] - 1
        source, policy = self.loop.core_slot(last), self.loop.policy
        later = range(last + 1, rows.depth[row])
        targets = {self.loop.core_slot(t) for t in later if policy.writes(t)} - {source}
        block, offset = divmod(place, rows.step.block_size)
        for caches in (self.kv.keys, self.kv.values):
            for layer in range(self.loop.core):
                kept = caches[source + layer][block, offset]
                for target in targets:
                    caches[target + layer][block, offset] = kept

    def _leave(self, rows: Rows) -> Tensor:
        """Tokens that are through pass the coda, the others are suspended. Logits [R, V]."""
        assert rows.h is not None and rows.term is not None
        done: list[int] = []
        for index, (entry, span) in enumerate(zip(rows.step.scheduled, rows.spans, strict=True)):
            request, own = entry.request, slice(span.start, span.stop)
            entry.completed = rows.done(index)
            if not entry.completed:
                request.suspended = SuspendedLoops(
                    rows.h[own].clone(),
                    rows.term[own].clone(),
                    tuple(rows.loops[own]),
                    tuple(rows.looping[own]),
                )
                continue
            request.suspended = None
            done += span
            for row in span:
                if rows.step.positions[row] >= request.num_prompt_tokens - 1:
                    request.loops_run[rows.step.positions[row]] = rows.loops[row]
        rows.step.keep_completed()
        if not done:
            return rows.h.new_empty(0, self.model.config.vocab_size, dtype=torch.float32)
        p = rows.cut(
            done, [(done, rows.part(tuple(done)), self.loop.coda_slot)], self.kv, self.backend
        )
        hidden = self.model.finish(rows.h[done], p)
        place = {row: i for i, row in enumerate(done)}
        wanted = hidden[[place[row] for row in rows.step.logits_rows]]
        return self.model.logits(wanted, self.backend, float32=self._float32_logits)
