"""A request whose tokens are counted and not listed: what scheduler and KV manager see of one."""

from __future__ import annotations

from functools import cache

from minifer.kv.prefix_key import PrefixKey
from minifer.outputs import RequestGroup
from minifer.request import Request
from minifer.sampling_params import SamplingParams
from minifer.simulation.result import RequestRecord


class SimRequest(Request):
    """One request on one node. It has the engine's fields, and numbers where those are lists.

    keys: of all blocks that it will ever fill, or none where prefixes are not cached. num_tokens:
    prompt and output so far. goal: how many it will have when it is done on this node. received:
    leading tokens whose KV came with it from another node. stored_len: leading tokens that the
    store holds by assumption.

    prefill_tokens, prefill_seconds: what is left until its first token, with a node to itself.
    """

    num_prompt_tokens = 0  # attributes where `Request` has properties that count a list
    num_tokens = 0
    num_suspended_tokens = 0
    overwrites_kv = False
    wants_prompt_logprobs = False

    def __init__(
        self,
        record: RequestRecord,
        keys: list[PrefixKey],
        *,
        num_tokens: int | None = None,
        goal: int | None = None,
        received: int = 0,
        stored_len: int = 0,
    ) -> None:
        self.record = record
        self.request_id = record.request_id
        self.params = _params(record.tenant)
        self.group = RequestGroup(record.request_id, None)
        self.num_prompt_tokens = record.prompt_len
        self.num_tokens = record.prompt_len if num_tokens is None else num_tokens
        self.goal = record.prompt_len + record.output_len if goal is None else goal
        self.received = received
        self.stored_len = stored_len
        self.prefill_tokens = 0
        self.prefill_seconds = 0.0
        self.prefix_keys = list(keys)
        self.block_table = []
        self.draft_token_ids = []

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_shareable_tokens(self) -> int:
        return self.num_tokens


@cache
def _params(tenant: str) -> SamplingParams:
    return SamplingParams(tenant=tenant, max_tokens=None)
