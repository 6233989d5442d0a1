"""One request's state: what travels through the house.

Every stage reads a `Request`, and each of its fields has one stage that writes it. What the caller
asked for is `SamplingParams`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from minifer.loops import LoopKVPolicy
from minifer.sampling_params import MAX_SEED, OutputKind, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from minifer.execution.grammar import GrammarState
    from minifer.execution.loops.state import SuspendedLoops
    from minifer.kv.prefix_key import PrefixKey
    from minifer.outputs import RequestGroup

__all__ = ["MAX_SEED", "OutputKind", "Request", "RequestStatus", "SamplingParams"]


class RequestStatus(Enum):
    WAITING = "waiting"  # in the queue; owns no blocks
    RUNNING = "running"  # owns blocks
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence: a prompt and what has been generated for it.

    The token axis, and who is responsible for each part::

        0            num_computed_tokens          num_prompt_tokens      num_tokens
        | KV is in the cache  |  still to be computed (prefill or decode)  |
        | prompt_token_ids ..............................| output_token_ids |

    There is no phase: a request that is one token behind decodes, one further behind prefills.
    `request_id` is unique to the sequence; the n sequences of one call share a `group`.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    group: RequestGroup
    index: int = 0  # which of the group's n sequences
    seed: int = 0  # of this sequence's noise, in [0, 2**64)
    eos_token_ids: frozenset[int] = frozenset()  # that end this request; empty with ignore_eos
    max_total_tokens: int = 0  # prompt + output limit: model length and KV capacity
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # bad_words as token sequences
    num_loops: int | None = None  # of each of its tokens; None: the model is no loop model
    loop_kv_policy: str = "full"

    # written by scheduling
    arrival: int = 0  # order of arrival
    arrival_step: int = 0
    arrival_work: int = 0  # tokens that had been computed by then, for all requests together
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    forks_pending: int = 0  # sequences of the group that will copy this one after its prefill
    # written by kv
    block_table: list[int] = field(default_factory=list)
    prefix_keys: list[PrefixKey] = field(default_factory=list)  # of its full blocks
    num_published_blocks: int = 0  # leading blocks of the table offered to the prefix index
    # written by decode and postprocessing
    token_ids: list[int] = field(default_factory=list)  # prompt + output
    grammar: GrammarState | None = None  # where the output is in `params.structured`
    # written by execution, for loop models
    suspended: SuspendedLoops | None = None  # tokens between two of their iterations
    loops_run: dict[int, int] = field(default_factory=dict)  # position → iterations its logits took
    # written by speculation: tokens that may follow, until a step has judged them
    draft_token_ids: list[int] = field(default_factory=list)
    draft_probs: Tensor | None = None  # [drafts, V], what each was drawn from; None: just guessed

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    def fork(self, request_id: str, group: RequestGroup, index: int = 0) -> Request:
        """A sequence that continues from the same tokens; seed + index is its noise."""
        return replace(
            self,
            request_id=request_id,
            group=group,
            index=index,
            seed=(self.seed + index) % MAX_SEED,
            status=RequestStatus.WAITING,
            num_computed_tokens=0,
            num_preemptions=0,
            forks_pending=0,
            block_table=[],
            prefix_keys=list(self.prefix_keys),
            num_published_blocks=0,
            token_ids=list(self.token_ids),
            grammar=None if self.grammar is None else self.grammar.copy(),
            suspended=None,
            loops_run=dict(self.loops_run),
            draft_token_ids=[],
            draft_probs=None,
        )

    def with_drafts(self, count: int) -> Request:
        """This request as it would be had its first `count` drafts been accepted, for the rules
        that look at its tokens. A draft that the grammar does not allow ends its grammar: its own
        row of logits has no such token, so none after it is looked at."""
        if count == 0:
            return self
        drafts = self.draft_token_ids[:count]
        grammar = None if self.grammar is None else self.grammar.after(drafts)
        return replace(self, token_ids=self.token_ids + drafts, grammar=grammar)

    def drop_drafts(self) -> None:
        self.draft_token_ids, self.draft_probs = [], None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens it can get before its length ends it."""
        left, most = self.max_total_tokens - self.num_tokens, self.params.max_tokens
        return left if most is None else min(left, most - self.num_output_tokens)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_suspended_tokens(self) -> int:
        """Tokens that have their blocks and are not computed yet."""
        return 0 if self.suspended is None else self.suspended.num_tokens

    @property
    def overwrites_kv(self) -> bool:
        return self.num_loops is not None and LoopKVPolicy(self.loop_kv_policy).overwrites

    @property
    def num_shareable_tokens(self) -> int:
        """Leading tokens whose KV another request may have: after early exits it is approximate."""
        return self.num_tokens if self.params.exit_threshold is None else self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def num_scored_tokens(self) -> int:
        """Leading prompt tokens whose log-probabilities are known (None for the first)."""
        return len(self.group.prompt_logprobs or ())

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while log-probabilities of prompt tokens are still missing."""
        asked = self.params.prompt_logprobs is not None and self.index == 0
        return asked and self.num_scored_tokens < self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt {self.num_prompt_tokens}, "
            f"output {self.num_output_tokens}, computed {self.num_computed_tokens})"
        )
