"""The simulator's node against the engine it stands for: the same plans, step by step.

A real engine serves some requests with a real model; a simulated node gets their lengths, the
names of their blocks, and the steps at which they came. Both have the same scheduler, so what is
tested is everything around it: counted tokens, made-up keys, hits, publications, ends.
"""

from __future__ import annotations

import random

import pytest
from fakes import tiny_engine

from minifer.config import POLICIES, EngineConfig
from minifer.events import EventBus, ListSink
from minifer.request import SamplingParams
from minifer.simulation.cluster import NodeSpec
from minifer.simulation.keys import KeyTree
from minifer.simulation.replica import Replica
from minifer.simulation.result import RequestRecord
from minifer.simulation.sim_request import SimRequest
from minifer.simulation.steps.times import FittedSteps, PrefillPrices

SECOND_A_TOKEN = FittedSteps(PrefillPrices(0.0, 1.0))


def traffic(seed: int, count: int = 24):
    """(step, name, prompt, params) of requests that share beginnings, and some that follow up."""
    rng = random.Random(seed)
    systems = [[rng.randrange(40) for _ in range(n)] for n in (9, 17)]
    step, rows = 0, []
    for i in range(count):
        step += rng.choice([0, 0, 1, 2, 5])
        prompt = [rng.randrange(40) for _ in range(rng.randrange(1, 30))]
        if rng.random() < 0.6:
            prompt = rng.choice(systems) + prompt[:9]
        if rng.random() < 0.2 and rows:
            prompt = (rng.choice(rows)[2] + prompt)[:44]
        params = SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=rng.randrange(1, 14),
            priority=rng.randrange(3),
            tenant=rng.choice("ab"),
        )
        rows.append((step, str(i), prompt, params))
    return rows


class Watched:
    """What a scheduler did: its plans, whom it preempted, what was evicted."""

    def __init__(self, scheduler, sink: ListSink) -> None:
        self.steps, self._sink = [], sink
        schedule = scheduler.schedule

        def watch():
            plan = schedule()
            preempted = [request.request_id for request in plan.preempted]
            self.steps.append((plan.tokens_by_request(), preempted))
            return plan

        scheduler.schedule = watch

    @property
    def evicted(self) -> int:
        events = self._sink.events
        return sum(len(e.data["blocks"]) for e in events if e.name == "kv.block_evicted")


def really(rows, options) -> tuple[Watched, dict[str, list[int]], object]:
    sink = ListSink()
    engine = tiny_engine(sinks=[sink], **options)
    watched, tokens, step = Watched(engine.scheduler, sink), {}, 0
    rows = list(rows)
    while rows or engine.has_unfinished_requests:
        while rows and rows[0][0] <= step:
            _, name, prompt, params = rows.pop(0)
            engine.add_request(name, prompt, params)
        for output in engine.step():
            tokens[output.request_id] = output.prompt_token_ids + output.outputs[0].token_ids
        step += 1
    return watched, tokens, engine.kv.stats


def simulated(rows, options, tokens) -> tuple[Watched, Replica, list[RequestRecord]]:
    config = EngineConfig(**{"num_kv_blocks": 64, "block_size": 4, **options})
    sink, P = ListSink(), config.block_size
    replica = Replica(NodeSpec("n", SECOND_A_TOKEN, config), coast=False, events=EventBus(sink))
    watched, tree = Watched(replica.scheduler, sink), KeyTree(P)
    names: dict[tuple[int, ...], int] = {}
    records, step, rows = [], 0, list(rows)
    while rows or replica.scheduler.running or replica.scheduler.waiting:
        while rows and rows[0][0] <= step:
            _, name, prompt, params = rows.pop(0)
            whole = tokens[name]
            prefixes = [tuple(whole[: i + P]) for i in range(0, len(whole) - P + 1, P)]
            chain = [names.setdefault(prefix, len(names)) for prefix in prefixes]
            arrived = float(sum(sum(plan.values()) for plan, _ in watched.steps))  # a second each
            record = RequestRecord(name, arrived, len(prompt), len(whole) - len(prompt))
            request = SimRequest(record, tree.keys(P, chain, len(whole)))
            request.params = params
            records.append(record)
            replica.add(request)
        if replica.begin(step) is not None:
            for request in replica.end(step):
                replica.finish(request)
        step += 1
    return watched, replica, records


OPTIONS = [
    {"num_kv_blocks": 12},
    {"num_kv_blocks": 12, "max_num_batched_tokens": 7, "prefix_index": "radix"},
    {"num_kv_blocks": 12, "max_num_batched_tokens": 24, "max_prefill_chunk": 5, "max_num_seqs": 4},
    {"num_kv_blocks": 14, "block_size": 16, "max_num_batched_tokens": 20},
    {"num_kv_blocks": 12, "enable_prefix_caching": False, "max_num_batched_tokens": 9},
    {"num_kv_blocks": 12, "enable_chunked_prefill": False, "max_num_batched_tokens": 30},
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plans_hits_preemptions_and_evictions_are_the_engines(options, policy):
    options = {**options, "scheduling_policy": policy, "mlfq_quantum": 8}
    options["priority_ageing_steps"] = 5
    rows = traffic(POLICIES.index(policy))
    real, tokens, stats = really(rows, options)
    sim, replica, records = simulated(rows, options, tokens)
    assert sim.steps == real.steps
    assert sim.evicted == real.evicted == replica.close(1.0).num_evictions
    assert replica.kv.stats == stats
    assert sum(record.cached_len for record in records) == stats.num_hits
    assert sum(r.num_preemptions for r in records) == sum(len(p) for _, p in real.steps)
    for record in records:
        assert len(record.token_times) == record.output_len


def test_the_comparison_covers_what_it_is_for():
    """With these caches there are hits, preemptions and evictions to compare."""
    real, _, stats = really(traffic(1), {"num_kv_blocks": 12})
    assert stats.num_hits > 50 and real.evicted > 50
    assert sum(len(preempted) for _, preempted in real.steps) >= 3
    assert len({frozenset(plan.items()) for plan, _ in real.steps}) > 30
