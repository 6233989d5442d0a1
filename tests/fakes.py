"""Stand-ins that let a test drive one stage alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from minifer.config import EngineConfig, ModelConfig
from minifer.engine import Engine
from minifer.events import EventBus, ListSink
from minifer.kv.invariants import check_invariants
from minifer.kv.manager import KVCacheManager
from minifer.kv.prefix_key import sha256
from minifer.kv.step_input import StepInput
from minifer.outputs import RequestGroup, RequestOutput
from minifer.request import Request, SamplingParams
from minifer.scheduling.plan import ScheduledRequest, SchedulePlan
from minifer.scheduling.scheduler import Scheduler


def make_request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 16, **params: object
) -> Request:
    """A request as admission would build it, without limits."""
    checked = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    group = RequestGroup(request_id, None, checked.n)
    return Request(request_id, list(prompt), checked, group, forks_pending=checked.n - 1)


class ScheduleDriver:
    """Scheduler and KV manager without a model: whoever has caught up gets token 7.

    Checks every invariant after every step, and that every position a step would read holds the
    KV of exactly the tokens that led to it.
    """

    def __init__(
        self, num_blocks: int, block_size: int = 4, hash_function=sha256, make_tiers=None, **config
    ):
        """make_tiers: called with the configuration and `read_block`; None for no tiers."""
        self.sink = ListSink()
        self.now = 0.0  # seconds
        events = EventBus(self.sink, clock=lambda: self.now)
        self.config = EngineConfig(
            block_size=block_size, num_kv_blocks=num_blocks, **{"max_num_seqs": 16, **config}
        )
        self.kv = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            index=self.config.prefix_index,
            hash_function=hash_function,
            events=events,
            tiers=make_tiers and make_tiers(self.config, self.read_block),
        )
        self.scheduler = Scheduler(self.config, self.kv, events)
        self.requests: list[Request] = []
        self.memory: dict[int, tuple[int, ...]] = {}  # slot → the prefix whose KV it holds

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 16, **params):
        request = make_request(request_id, prompt, max_tokens, **params)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self, token: int | Callable[[Request], int] = 7) -> SchedulePlan:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        computed = self.compute(plan)
        self.scheduler.advance(plan)
        for entry in plan.scheduled:
            if entry.request.num_computed_tokens == entry.request.num_tokens:
                self.reply(entry, token)
        self.kv.store(plan, computed)
        self.check()
        return plan

    def reply(self, entry: ScheduledRequest, token: int | Callable[[Request], int]) -> None:
        """The next token; while it is what was drafted, one more."""
        request, num_right = entry.request, 0
        drafts = list(request.draft_token_ids)
        for place in range(1 + len(drafts)):
            request.token_ids.append(token(request) if callable(token) else token)
            right = request.token_ids[-1:] == drafts[place : place + 1]
            num_right += right
            done = request.num_output_tokens == request.params.max_tokens
            if done or not right:
                break
        if drafts:
            self.scheduler.keep_drafts(entry, num_right)
        if done:
            self.scheduler.finish(request)

    def read_block(self, block_id: int) -> tuple[tuple[int, ...], ...]:
        """What a tier stores of a block: only what was computed can be read."""
        P = self.kv.block_size
        return tuple(self.memory[slot] for slot in range(block_id * P, block_id * P + P))

    def compute(self, plan: SchedulePlan) -> StepInput:
        """A model whose KV is the prefix itself: what attention would read must be right.

        As on a device: all copies, then all loads, then all writes, then all reads.
        """
        step, P = self.kv.prepare(plan), self.kv.block_size
        old = dict(self.memory)
        for source, target in step.block_copies:
            for i in range(P):
                self.memory[target * P + i] = old.get(source * P + i, ())
        for block_id, stored in step.block_loads:
            for i, prefix in enumerate(stored.payload):
                self.memory[block_id * P + i] = prefix
        for (start, end), entry in zip(
            itertools.pairwise(step.query_start), plan.scheduled, strict=True
        ):
            for row in range(start, end):
                tokens = entry.request.token_ids + entry.request.draft_token_ids
                prefix = tuple(tokens[: step.positions[row] + 1])
                assert prefix[-1] == step.token_ids[row]
                self.memory[step.slot_mapping[row]] = prefix
        for table, length, entry in zip(
            step.block_tables, step.seq_lens, plan.scheduled, strict=True
        ):
            tokens = entry.request.token_ids + entry.request.draft_token_ids
            for p in range(length):
                slot = table[p // P] * P + p % P
                assert self.memory.get(slot) == tuple(tokens[: p + 1])
        return step

    def tokens(self) -> dict[str, int]:
        """One step; who computed how many tokens."""
        return self.step().tokens_by_request()

    def run(self, limit: int = 1000) -> list[dict[str, int]]:
        """Steps until nobody is left; fails when `limit` steps are not enough."""
        steps = []
        while self.scheduler.running or self.scheduler.waiting or self.scheduler.loading:
            assert len(steps) < limit, "no end in sight"
            steps.append(self.tokens())
        return steps

    def tables(self) -> list[list[int]]:
        return [list(request.block_table) for request in self.requests]

    @property
    def free_order(self) -> list[int]:
        return list(self.kv.pool.free_queue)

    def check(self) -> None:
        check_invariants(self.kv, self.requests)
        if not self.scheduler.running:
            assert self.kv.pool.num_free == self.kv.pool.num_blocks

    def check_plan(self, plan: SchedulePlan) -> None:
        alone = not self.config.enable_chunked_prefill and len(plan.scheduled) == 1
        assert alone or plan.num_tokens <= self.config.max_num_batched_tokens
        assert self.scheduler.seats_taken <= self.config.max_num_seqs
        ids = [entry.request.request_id for entry in plan.scheduled]
        assert len(ids) == len(set(ids)) <= self.config.max_num_seqs
        assert all(entry.num_new >= 1 for entry in plan.scheduled)
        assert all(entry.start == entry.request.num_computed_tokens for entry in plan.scheduled)
        assert all(e.end - e.num_draft <= e.request.num_tokens for e in plan.scheduled)
        assert all(e.num_draft == len(e.request.draft_token_ids) for e in plan.scheduled)
        if self.scheduler.running or self.scheduler.waiting:
            assert plan.scheduled, "a step that moves nobody"


# -- a real engine on a tiny random model


def tiny_config(**changes) -> ModelConfig:
    """A Llama that forwards in microseconds."""
    sizes = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return ModelConfig(**{**sizes, **changes})


@functools.cache
def tiny_model(config: ModelConfig | None = None, seed: int = 0, std: float = 0.3):
    """Random weights, large enough that the greedy token is clear of the others."""
    import torch

    from minifer.models.registry import build_model

    model = build_model(config or tiny_config(), torch.float32)
    model.init_weights(seed, std)
    return model


def tiny_engine(*, config: ModelConfig | None = None, sinks=(), tokenizer=None, eos=(), **options):
    """An `Engine` on `tiny_model` in debug mode; `run_engine` checks the invariants too."""
    config = config or tiny_config()
    loaded = SimpleNamespace(
        model=tiny_model(config),
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(eos),
        generation_defaults={},
    )
    options = {"block_size": 4, "num_kv_blocks": 64, "debug": True, **options}
    return Engine.from_loaded(loaded, EngineConfig(**options), sinks=sinks)


def step_checked(engine) -> list[RequestOutput]:
    """One step, then every invariant of the pool and the index."""
    outputs = engine.step()
    check_engine(engine)
    return outputs


def check_engine(engine) -> None:
    scheduler = engine.scheduler
    requests = [*scheduler.running, *scheduler.waiting, *scheduler.loading]
    check_invariants(engine.kv, requests)
    if not engine.has_unfinished_requests:
        assert engine.kv.pool.num_free == engine.kv.pool.num_blocks
        assert not engine.postprocessor._groups


def run_engine(engine, limit: int = 5000) -> dict[str, RequestOutput]:
    """Step to the end, checked; the last output of every request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests:
            return last
        last.update((output.request_id, output) for output in step_checked(engine))
    raise AssertionError("no end in sight")
