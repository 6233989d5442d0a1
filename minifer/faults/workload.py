"""A small day at the office, on which every detector is tried.

Users share a system prompt, tenants do not share; prompts come in chunks; the cache is too small,
so that requests are preempted, and blocks evicted to DRAM and loaded from there; some clients
leave; replies are greedy and sampled, in one and in several sequences, with stop strings and
beyond ASCII; and one client has a tool. Nothing here is made for one fault, but each of the
registry's has its chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from minifer.faults.scenes import OTHER, QUESTIONS, SHARED
from minifer.faults.tools import converse
from minifer.faults.watch import Watch
from minifer.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_blocks": 40,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 256,
    "max_prefill_chunk": 96,
    "kv_dram_bytes": 16 * 2**20,
    "kv_load_policy": "always",
    "guards": "report",
}


@dataclass(frozen=True)
class Arrival:
    """A request, the step it comes in, and the step its client leaves, if it does."""

    step: int
    name: str
    prompt: str
    params: SamplingParams
    leaves: int | None = None


def arrivals() -> Iterator[Arrival]:
    """All requests, in the order of their steps."""

    def greedy(tokens: int, **fields: Any) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=tokens, **fields)

    def sampled(tokens: int, seed: int, **fields: Any) -> SamplingParams:
        return SamplingParams(temperature=0.8, max_tokens=tokens, seed=seed, **fields)

    first, second, third = QUESTIONS
    yield Arrival(0, "shared-0", SHARED + first, greedy(24))
    yield Arrival(0, "shared-1", SHARED + second, greedy(24))
    yield Arrival(0, "leaves", SHARED + third, greedy(24), leaves=9)
    yield Arrival(0, "alice", SHARED + OTHER, greedy(8, cache_salt="alice"))
    yield Arrival(1, "bob", SHARED + OTHER, greedy(8, cache_salt="bob"))
    yield Arrival(1, "three", first, sampled(12, 1, n=3))
    yield Arrival(2, "short", second, greedy(4))
    yield Arrival(3, "seed-early", first, sampled(12, 7))
    yield Arrival(8, "letter", "T", greedy(12))
    yield Arrival(10, "blocks", OTHER, greedy(12))
    yield Arrival(10, "stop", second, greedy(40, stop=["expression list"]))
    yield Arrival(11, "end", third, sampled(120, 1))
    yield Arrival(12, "section", f"{'Section 1.':<16}{OTHER}", greedy(8))
    for i in range(9):
        prompt = f"Section {i}. {(OTHER if i % 2 else SHARED)}{QUESTIONS[i % 3]}"
        yield Arrival(14 + i, f"section-{i}", prompt, greedy(8))
    yield Arrival(24, "long", SHARED + third, greedy(84))
    yield Arrival(26, "seed-late", first, sampled(12, 7))
    yield Arrival(28, "other-place", f"{'Section 1.':<16}{SHARED}", greedy(8))
    yield Arrival(40, "again", SHARED + first, greedy(8))


def serve(watch: Watch) -> None:
    """The whole workload, a conversation with a tool, and then the idle time."""
    coming, step = list(arrivals()), 0
    leaving = {a.leaves: a.name for a in coming if a.leaves is not None}
    while coming or watch.engine.has_unfinished_requests:
        while coming and (coming[0].step <= step or not watch.engine.has_unfinished_requests):
            arrival = coming.pop(0)
            watch.add_request(arrival.name, arrival.prompt, arrival.params)
        if step in leaving:
            watch.abort(leaving[step])
        watch.step()
        step += 1
    converse(watch.engine, watch.conversation)
    watch.idle()
