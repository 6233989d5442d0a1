"""The plan of a step, laid out flat for the model: still plain Python.

Three requests that compute tokens [0, 3), [7, 8) and [4, 6), blocks of 4 tokens::

    query_start     0           3    4        6
    token_ids     | a0  a1  a2 | b7 | c4  c5  |
    positions     |  0   1   2 |  7 |  4   5  |
    slot_mapping  | block 5    | 2  | block 9 |     slot = block · P + position mod P
                  | 20 21 22   | 11 | 36  37  |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minifer.kv.tiers.dram import StoredBlock

if TYPE_CHECKING:
    from minifer.scheduling.plan import ScheduledRequest, SchedulePlan


@dataclass
class StepInput:
    """Arguments of `ForwardBatch.build`, and who reads which logits.

    logits_rows: token rows that go through the head, in the order of the logits tensor.
    sampled: (scheduled request, its row of the logits) for whoever gets a token this step; the
    rows of its drafts, if it has any, follow that one.
    prompt_rows: (scheduled request, first position, rows of the logits) for log-probabilities of
    the prompt: the row of position p scores the token at p + 1.
    block_copies: (source, destination) blocks of copy-on-write, made before anything is written.
    block_poison: in debug mode, blocks that hold nothing any more; not those just copied to.
    block_loads: (block, what a tier has for it), written after these two and before the model
    runs; load_seconds: how long that took, filled in by the runner.
    blocks_moved: have copies, poison and loads been carried out? The runner says so.
    scheduled: the plan's entries, one for each of `seq_lens`.
    greedy: nobody reads more of the logits than the largest of each row; said by the engine.
    work: what a runner counted, for whoever watches: of a loop model its iterations, of several
    ranks the microseconds in collectives.
    """

    block_size: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    query_start: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    block_poison: list[int] = field(default_factory=list)
    block_loads: list[tuple[int, StoredBlock]] = field(default_factory=list)
    load_seconds: float = 0.0
    blocks_moved: bool = False
    logits_rows: list[int] = field(default_factory=list)
    sampled: list[tuple[ScheduledRequest, int]] = field(default_factory=list)
    prompt_rows: list[tuple[ScheduledRequest, int, range]] = field(default_factory=list)
    greedy: bool = False
    work: dict[str, int] = field(default_factory=dict)

    def keep_completed(self) -> None:
        """Drop the logits of entries that are not completed; those left move up."""
        place: dict[int, int] = {}  # row of the logits → what it becomes
        kept: list[int] = []
        entry = 0
        for row, token_row in enumerate(self.logits_rows):  # ascending
            while token_row >= self.query_start[entry + 1]:
                entry += 1
            if self.scheduled[entry].completed:
                place[row] = len(kept)
                kept.append(token_row)
        self.logits_rows = kept
        self.sampled = [(e, place[row]) for e, row in self.sampled if e.completed]
        self.prompt_rows = [
            (e, position, range(place[rows[0]], place[rows[-1]] + 1))
            for e, position, rows in self.prompt_rows
            if e.completed
        ]


def prepare(plan: SchedulePlan, block_size: int) -> StepInput:
    """Flatten a plan. Slots come from the block tables that scheduling has filled."""
    step = StepInput(block_size, plan.scheduled)
    for entry in plan.scheduled:
        request, table = entry.request, entry.request.block_table
        first_row = len(step.token_ids)
        step.token_ids += request.token_ids[entry.start : entry.end] + request.draft_token_ids
        step.positions += range(entry.start, entry.end)
        step.slot_mapping += [
            table[p // block_size] * block_size + p % block_size
            for p in range(entry.start, entry.end)
        ]
        step.query_start.append(first_row + entry.num_new)
        step.seq_lens.append(entry.end)
        step.block_tables.append(table)
        step.block_copies += entry.allocation.copies
        step.block_loads += entry.allocation.loads
        _select_rows(step, entry, first_row)
    return step


def _select_rows(step: StepInput, entry: ScheduledRequest, first_row: int) -> None:
    """Logits are computed only where somebody reads them: at most places nobody does."""
    request = entry.request
    rows = step.logits_rows
    if request.wants_prompt_logprobs:
        # A prefill that was preempted half-way has scored its beginning already.
        start = max(entry.start, request.num_scored_tokens - 1)
        end = min(entry.end, request.num_prompt_tokens - 1)
        if end > start:
            step.prompt_rows.append((entry, start, range(len(rows), len(rows) + end - start)))
            rows += range(first_row + start - entry.start, first_row + end - entry.start)
    if entry.is_last_chunk:
        step.sampled.append((entry, len(rows)))
        end = first_row + entry.num_new
        rows += range(end - 1 - entry.num_draft, end)
