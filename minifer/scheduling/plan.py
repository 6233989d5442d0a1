"""What one step will do: who computes how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from minifer.kv.manager import Allocation
from minifer.request import Request


@dataclass
class ScheduledRequest:
    """One request's share of a step: its tokens [start, start + num_new).

    num_draft: how many of them, at the end, are drafts: tokens that may follow the newest one.
    is_last_chunk: the step computes the request's newest token, so a next one is sampled.
    completed: False when a loop model has not taken them through all iterations yet; the runner
    says so, and the next step goes on with them.
    """

    request: Request
    start: int
    num_new: int
    allocation: Allocation
    completed: bool = True
    num_draft: int = field(init=False)
    is_last_chunk: bool = field(init=False)  # said now: the step will make the request longer

    def __post_init__(self) -> None:
        self.num_draft = len(self.request.draft_token_ids)  # of a step that was suspended
        self.is_last_chunk = self.end - self.num_draft == self.request.num_tokens

    def add_drafts(self, count: int) -> None:
        """Compute `count` drafts behind the newest token."""
        self.num_draft += count
        self.num_new += count

    @property
    def end(self) -> int:
        return self.start + self.num_new

    @property
    def is_decode(self) -> bool:
        """Does it compute one generated token, the newest, and drafts? Everything else is
        prefill."""
        generated = self.start >= self.request.num_prompt_tokens
        return generated and self.num_new == 1 + self.num_draft and self.is_last_chunk


@dataclass
class SchedulePlan:
    """One step: `scheduled` in batch order, and who had to give up its blocks for it."""

    step: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new for entry in self.scheduled)

    @property
    def num_completed_tokens(self) -> int:
        """Tokens that the step brings to an end: each counts in one step alone."""
        return sum(entry.num_new for entry in self.scheduled if entry.completed)

    @property
    def counts(self) -> dict[str, int]:
        """How many tokens that the step completes are prefill and how many decode, drafts too."""
        done = (entry for entry in self.scheduled if entry.completed)
        decode = sum(entry.num_new for entry in done if entry.is_decode)
        return {
            "num_prefill_tokens": self.num_completed_tokens - decode,
            "num_decode_tokens": decode,
        }

    @property
    def is_decode(self) -> bool:
        """Does the step nothing but decode?"""
        return all(entry.is_decode for entry in self.scheduled)

    def tokens_by_request(self) -> dict[str, int]:
        """request id → tokens this step, in batch order."""
        return {entry.request.request_id: entry.num_new for entry in self.scheduled}

    def __bool__(self) -> bool:
        return bool(self.scheduled)
