"""The runner of loop models: continuous depth batching and early exit.

Tokens of different depth and at different iterations go through the core together: its weights
are read once for all of them. What differs is which KV slot each attends through, so rows are
grouped by iteration for attention alone. Four requests, two of depth 2 and two of depth 4::

    application of the core    1    2    3    4    5    6    7    8
    depth 2                    a0   a1 | b0   b1 | c0   c1 | d0   d1     four tokens
    depth 4                    a0   a1   a2   a3 | b0   b1   b2   b3     two tokens

A step ends as soon as a request is through (`loop_batching="continuous"`): it gets its next token,
the others are suspended and go on in the next step. With "lockstep" a step ends with its deepest
request, and 12 applications do the same. But every step also reads prelude, coda and head and
costs the machine its preparation, so fewer and longer steps can be the faster ones: "lockstep" is
the default, "patient" ends when half of the requests are through, and
`minifer.parcae.lab.depth_batching` counts both kinds of reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minifer.config import EngineConfig, ModelConfig
from minifer.execution.loops.rows import Members, RowGroup, Rows, rows_of
from minifer.execution.loops.state import Span, SuspendedLoops
from minifer.execution.runner import ModelRunner
from minifer.kv.step_input import StepInput
from minifer.loops import LOOP_BATCHING
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
        self._through = LOOP_BATCHING[engine.loop_batching]
        self._blanks = engine.has_kv_tiers
        self.stats = LoopStats()
        super().__init__(model, config, engine, num_blocks)

    def _logits(self, step: StepInput) -> Tensor:
        rows = Rows(step, self.device)
        before = replace(self.stats)
        self._enter(rows)
        while self._iterate(rows):
            pass
        step.work = {
            "core_applications": self.stats.core_applications - before.core_applications,
            "token_loops": self.stats.token_loops - before.token_loops,
        }
        return self._leave(rows)

    @torch.inference_mode()
    def draft(self, step: StepInput, num_loops: int) -> Tensor:
        """Logits float32 [R, V] after at most `num_loops` iterations, for rows of a step that will
        be computed in full: nothing is suspended, and nobody is told."""
        rows = Rows(step, self.device)
        starts = pairwise(step.query_start)
        rows.spans = [
            [Span(range(*bounds), min(num_loops, entry.request.num_loops or 1))]
            for entry, bounds in zip(step.scheduled, starts, strict=True)
        ]
        self._enter(rows)
        while not all(rows.done(entry) for entry in range(len(rows.spans))):
            self._iterate(rows)
        hidden = self._finish(rows, rows_of(span for spans in rows.spans for span in spans))
        wanted = hidden[step.logits_rows]
        return self.model.logits(wanted, self.backend, float32=self._float32_logits)

    def _enter(self, rows: Rows) -> None:
        """New tokens pass the prelude; suspended ones come back with what they had."""
        rows.cos, rows.sin = self.model.rotary(rows.batch.positions)
        new: list[Span] = []
        for entry, spans in zip(rows.step.scheduled, rows.spans, strict=True):
            if (state := entry.request.suspended) is None:
                new += spans
                continue
            members = rows_of(spans)
            rows.h = rows.put(rows.h, members, state.h)
            rows.term = rows.put(rows.term, members, state.term)
        if new:
            members = rows_of(new)
            p = rows.cut(members, [(members, True, 0)], self.kv, self.backend)
            e = self.model.prelude_pass(self.model.embed(p.token_ids), p)
            rows.h = rows.put(rows.h, members, self.model.initial_state(e))
            rows.term = rows.put(rows.term, members, self.model.input_term(e))

    def _iterate(self, rows: Rows) -> bool:
        """One application of the core to every token that still loops; is there to be another?"""
        active = [span for spans in rows.spans for span in spans if span.looping]
        members = rows_of(active)
        p = self._pass(rows, members, self._groups(active))
        before = rows.take(rows.h, members)
        after = self.model.step(before, rows.take(rows.term, members), p)
        rows.h = rows.put(rows.h, members, after)
        self.stats.core_applications += 1
        self.stats.token_loops += len(members)
        for span in active:
            span.loops += 1
            span.looping = span.loops < span.depth
        left = self._exits(active, before, after)
        for span in left:
            span.looping = False
        self._fill(rows.step, left)
        through = sum(rows.done(entry) for entry in range(len(rows.spans)))
        return through < max(1, math.ceil(self._through * len(rows.spans)))

    def _pass(self, rows: Rows, members: Members, groups: list[RowGroup]) -> Pass:
        return rows.cut(members, groups, self.kv, self.backend)

    def _groups(self, active: list[Span]) -> list[RowGroup]:
        """(rows, do they write, KV slot) for each iteration that some of the rows are at."""
        return [
            (
                rows_of(span for span in active if span.loops == t),
                self.loop.policy.writes(t),
                self.loop.core_slot(t),
            )
            for t in sorted({span.loops for span in active})
        ]

    def _exits(self, active: list[Span], before: Tensor, after: Tensor) -> list[Span]:
        """Tokens that leave early: their state has all but stopped turning."""
        place, asked, spans = 0, [], []
        for span in active:
            if span.threshold is not None and span.looping:
                asked.append(place)
                spans.append(span)
            place += len(span.rows)
        if not asked:
            return []
        changes = turned_by(before[asked], after[asked]).tolist()
        return [s for s, change in zip(spans, changes, strict=True) if change < (s.threshold or 0)]

    def _fill(self, step: StepInput, left: list[Span]) -> None:
        """Tokens have left: in the iterations they do not run, later tokens see the keys and
        values of their last one."""
        for last, depth in {(span.loops - 1, span.depth) for span in left}:
            alike = (span for span in left if (span.loops - 1, span.depth) == (last, depth))
            places = [step.slot_mapping[span.rows.start] for span in alike]
            source, policy = self.loop.core_slot(last), self.loop.policy
            later = range(last + 1, depth)
            targets = {self.loop.core_slot(t) for t in later if policy.writes(t)} - {source}
            for caches in (self.kv.keys, self.kv.values):
                for layer in range(self.loop.core):
                    kept = caches[source + layer].flatten(0, 1)[places]
                    for target in targets:
                        caches[target + layer].flatten(0, 1)[places] = kept

    def _blank(self, step: StepInput, spans: list[Span]) -> None:
        """Tiers keep whole blocks, and only finite ones: what iterations that a shallow request
        does not run have in its blocks must not be what happened to be there."""
        used = self.loop.policy.num_slots(spans[0].depth) * self.loop.core
        places = [step.slot_mapping[row] for row in rows_of(spans)]
        for slot in range(self.loop.prelude + used, self.loop.coda_slot):
            for cache in (self.kv.keys[slot], self.kv.values[slot]):
                cache.flatten(0, 1)[places] = 0

    def _leave(self, rows: Rows) -> Tensor:
        """Tokens that are through pass the coda, the others are suspended. Logits [R, V]."""
        step, done = rows.step, list[Span]()
        for index, (entry, spans) in enumerate(zip(step.scheduled, rows.spans, strict=True)):
            entry.completed = rows.done(index)
            entry.request.suspended = None if entry.completed else self._suspend(rows, spans)
            if entry.completed:
                done += spans
                if self._blanks:
                    self._blank(step, spans)
                for span in spans:
                    for row in span.rows:
                        if step.positions[row] >= entry.request.num_prompt_tokens - 1:
                            entry.request.loops_run[step.positions[row]] = span.loops
        members = rows_of(done)
        step.keep_completed()
        hidden = self._finish(rows, members)
        place = {row: i for i, row in enumerate(members)}
        wanted = hidden[[place[row] for row in step.logits_rows]]
        return self.model.logits(wanted, self.backend, float32=self._float32_logits)

    def _finish(self, rows: Rows, members: Members) -> Tensor:
        """The coda for rows that are through: hidden states [members, D]."""
        p = rows.cut(members, [(members, True, self.loop.coda_slot)], self.kv, self.backend)
        hidden: Tensor = self.model.finish(rows.take(rows.h, members), p)
        return hidden

    def _suspend(self, rows: Rows, spans: list[Span]) -> SuspendedLoops:
        own = slice(spans[0].rows.start, spans[-1].rows.stop)
        return SuspendedLoops(
            rows.h[own].clone(),
            rows.term[own].clone(),
            tuple(span.loops for span in spans),
            tuple(span.looping for span in spans),
        )
