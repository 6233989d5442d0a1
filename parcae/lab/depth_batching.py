"""How often the core is read when requests of different depth share it: counts, no clock.

A request of depth d that computes n tokens has to pass the core w = d · n times, one after the
other. One application of the core takes every seated request one loop further, so whatever the
order, N requests on S seats that are all there at the start need at least::

    bound = max( ⌈Σ w / S⌉ ,  max w )         the seats' share of the work; the longest request

Three ways to end a step, which is when tokens are sampled and seats change hands:

    continuous     at the first request that is through; the others are suspended
    patient        when half of them are through
    lockstep       when all are through: the shallow wait for the deep

Under `continuous` no seat stands still while a request waits, so every application does all the
work it can, and the count is that of a list schedule: below (2 − 1/S) times the best one
(R. L. Graham, 1969). For what the core costs, ending a step early is never wrong.

But a step also reads what is read once a token: prelude, coda, head. Ending at the first request
makes many steps of few tokens, and where these weights are heavy beside the core it can read more
in all than waiting would. `Count.reads` adds both up, in units of one core. `patient` gives away
some of what `continuous` saves and makes far fewer steps. Of 500 random workloads (up to 60
requests of 1 to 16 loops, 1 to 32 seats) simulated with the weights of parcae-1.3b it read the
least in 29 % and the most in 4 %, then up to 1.14 times the second. Where depths are nearly alike,
`lockstep` reads least. And weights are not all: preparing a step costs time, on a CPU and with a
small model most of it, where `lockstep` was the fastest (`minifer parcae tradeoff` measures it):
it is the engine's default.

A request that arrives in the middle of a step joins at the step's end, seat or no seat. It waits
at most for the loops that the shallowest running request has left under `continuous`, at most
for those of the deepest under `lockstep`. `Count.idle_wait` adds these waits up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from minifer.config import EngineConfig, ModelConfig
from minifer.loops import LOOP_BATCHING
from minifer.parcae.costs import parameters


@dataclass(frozen=True)
class Job:
    """A request: loops of each token, and tokens to compute (the prompt's pass is the first).

    arrival: applications of the core, since the start, after which it is there.
    """

    depth: int
    tokens: int
    arrival: int = 0

    def __post_init__(self) -> None:
        for name, least in (("depth", 1), ("tokens", 1), ("arrival", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


@dataclass(frozen=True)
class Count:
    """What a workload took.

    core_applications: reads of the core's weights. steps: reads of prelude, coda and head.
    token_loops: iterations of all requests. idle_wait: applications that requests waited for the
    end of a step while a seat was free.
    """

    ending: str
    core_applications: int
    steps: int
    token_loops: int
    idle_wait: int = 0

    @property
    def rows(self) -> float:
        """Requests that an application served, on average."""
        return self.token_loops / self.core_applications

    def reads(self, edge: float) -> float:
        """Weights read, in units of the core's; edge: of what a step reads once, see `edge_of`."""
        return self.core_applications + edge * self.steps


def workload(depths: Sequence[int], num_requests: int, tokens: int) -> list[Job]:
    """Requests that take the depths in turn."""
    return [Job(depths[i % len(depths)], tokens) for i in range(num_requests)]


def bound(jobs: Sequence[Job], seats: int) -> int:
    """Applications that no order of work can do without, with all requests there at the start."""
    work = [job.depth * job.tokens for job in jobs]
    return max(-(-sum(work) // seats), max(work, default=0))


def edge_of(config: ModelConfig) -> float:
    """Weights that a step reads once (prelude, coda, readout, head), in units of the core's.

    Rows of value embeddings are looked up, and the injection's matrix is read with the prelude.
    """
    p = parameters(config)
    return (p.wte + p.prelude + p.coda + p.readout + p.adapter) / p.core


def simulate(jobs: Sequence[Job], seats: int, ending: str = "continuous") -> Count:
    """Serve the jobs in their order; seats: `max_num_seqs`. Raises `ValueError` for bad ones."""
    if isinstance(seats, bool) or not isinstance(seats, int) or seats < 1:
        raise ValueError(f"seats must be an integer of at least 1, got {seats!r}")
    if ending not in LOOP_BATCHING:
        raise ValueError(f"ending must be one of {', '.join(LOOP_BATCHING)}, got {ending!r}")
    queue = sorted(jobs, key=lambda job: job.arrival)
    running: list[list[int]] = []  # loops left of the token, tokens left, depth
    now = applications = steps = loops = idle_wait = 0
    free_since = [0] * seats  # when each free seat became free
    while queue or running:
        if not running and queue[0].arrival > now:
            now = queue[0].arrival  # nothing to do until then
        while queue and queue[0].arrival <= now and free_since:
            job = queue.pop(0)
            idle_wait += now - max(job.arrival, free_since.pop(0))
            running.append([job.depth, job.tokens, job.depth])
        steps += 1
        through = 0
        while through < max(1, math.ceil(LOOP_BATCHING[ending] * len(running))):
            looping = [state for state in running if state[0]]
            for state in looping:
                state[0] -= 1
            now, applications, loops = now + 1, applications + 1, loops + len(looping)
            through = sum(not state[0] for state in running)
        for state in running:
            if not state[0]:
                state[1] -= 1
                state[0] = state[2] if state[1] else 0
        left = [state for state in running if state[1]]
        free_since += [now] * (len(running) - len(left))
        running = left
    return Count(ending, applications, steps, loops, idle_wait)


def measure(jobs: Sequence[Job], seats: int, batching: str = "continuous", seed: int = 0) -> Count:
    """The same, counted by an `Engine` on a small random model. Prompts hold one token.

    A request is added before the first step at or after its arrival.
    """
    from minifer.engine import Engine
    from minifer.parcae.lab.models import lab_model
    from minifer.request import SamplingParams

    deepest = max(job.depth for job in jobs)
    length = max(job.tokens for job in jobs) + 1
    model = lab_model(16, width=8, heads=1, length=length, mean_recurrence=deepest, seed=seed)
    loaded = SimpleNamespace(
        model=model,
        config=model.config,
        tokenizer=None,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )
    options = EngineConfig(
        max_num_seqs=seats,
        num_kv_blocks=seats * (length // 16 + 1),
        loop_batching=batching,
        enable_prefix_caching=False,
    )
    queue = sorted(enumerate(jobs), key=lambda pair: pair[1].arrival)
    with Engine.from_loaded(loaded, options) as engine:
        stats = engine.runner.stats  # type: ignore[attr-defined]
        steps = idle = 0
        while queue or engine.has_unfinished_requests:
            now = stats.core_applications + idle
            if not engine.has_unfinished_requests and queue[0][1].arrival > now:
                idle += queue[0][1].arrival - now
                continue
            while queue and queue[0][1].arrival <= now:
                index, job = queue.pop(0)
                params = SamplingParams(
                    temperature=0, max_tokens=job.tokens, num_loops=job.depth, ignore_eos=True
                )
                engine.add_request(str(index), [index % 16], params)
            engine.step()
            steps += 1
    return Count(batching, stats.core_applications, steps, stats.token_loops)


def table(jobs: Sequence[Job], seats: int, edge: float) -> list[dict[str, float | str]]:
    """One row for each way to end a step, then the bound.

    saving: of the applications that lockstep makes above the bound, the share that is avoided.
    reads: `Count.reads(edge)`.
    """
    counts = [simulate(jobs, seats, ending) for ending in LOOP_BATCHING]
    least, most = bound(jobs, seats), counts[-1].core_applications
    rows: list[dict[str, float | str]] = [
        {
            "steps end": count.ending,
            "core applications": count.core_applications,
            "saving": (most - count.core_applications) / (most - least) if most > least else 1.0,
            "rows each": count.rows,
            "steps": count.steps,
            "reads": count.reads(edge),
        }
        for count in counts
    ]
    return [*rows, {"steps end": "(bound)", "core applications": least}]
