"""Traffic made from a seed alone: single requests, sessions, tenants.

==================  ===============================================================================
`open_loop`         single requests, at times that do not wait for answers
`Sessions`          chats of several turns, of tenants with a system prompt each: open loop (the
                    next turn comes so long after the one before) or closed (so long after its
                    answer)
`cold_warm`         long contexts of which one in ten is new: the base case of cache-aware routing
==================  ===============================================================================

Lengths, arrivals and everything else draw from streams of their own: another rate brings the same
requests, closer together. That is what makes two rates, or two policies, comparable (common random
numbers). `trace_like.py` makes traffic with a real trace's statistics.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from minifer.perf.load.arrivals import arrival_times
from minifer.simulation.workloads.arrivals import BLOCK, Arrival, Conversation
from minifer.simulation.workloads.lengths import Lengths, Lognormal


def open_loop(
    lengths: Lengths, count: int, rate: float, *, cv: float = 1.0, seed: int = 0
) -> list[Arrival]:
    """`count` requests that share nothing.

    rate: requests a second. cv: coefficient of variation of the gaps: 1 is a Poisson process, 4
    comes in bursts, 0 is a metronome (gamma process). Raises `ValueError` for a rate that is not
    above 0, a negative cv or count.
    """
    rng = random.Random(f"{seed}/lengths")
    times = arrivals_at(count, rate, cv, seed)
    pairs = (lengths.draw(rng) for _ in range(count))
    return [
        Arrival(f"r{i}", time, prompt, output, session=i)
        for i, (time, (prompt, output)) in enumerate(zip(times, pairs, strict=True))
    ]


@dataclass(frozen=True)
class Sessions:
    """Chats. A later prompt is all that was said before, and `added` tokens.

    first: tokens of a first prompt, without the system prompt, and of every answer. turns: mean;
    their number is geometric, or with `fixed_turns` always the mean. think: seconds a user takes.
    tenants, system_len: each session belongs to one of them and begins with the tenant's system
    prompt; 0 for none. skew: tenant k gets a share of 1 ÷ (k + 1)^skew; 0: all the same. max_len:
    a session ends before a prompt and its answer are longer.

    Raises `ValueError` when the numbers make no sense.
    """

    first: Lengths
    added: Lognormal
    turns: float = 10.0
    fixed_turns: bool = False
    think: Lognormal = field(default_factory=lambda: Lognormal.of_quantiles(10.0, 60.0))
    tenants: int = 0
    system_len: int = 0
    skew: float = 0.0
    max_len: int | None = None

    def __post_init__(self) -> None:
        if not self.turns >= 1 or (self.fixed_turns and self.turns != int(self.turns)):
            raise ValueError(f"turns must be at least 1, whole if fixed, got {self.turns}")
        if bool(self.tenants) != bool(self.system_len) or min(self.tenants, self.system_len) < 0:
            raise ValueError(
                f"tenants and system_len belong together, got {self.tenants} and {self.system_len}"
            )
        if self.skew < 0:
            raise ValueError(f"skew must be at least 0, got {self.skew}")

    def closed_loop(
        self, count: int, rate: float, *, cv: float = 1.0, seed: int = 0
    ) -> list[Conversation]:
        """`count` sessions that begin `rate` times a second; a turn waits for the one before."""
        starts = arrivals_at(count, rate, cv, seed)
        draws = self._draws(count, seed)
        return [
            Conversation((replace(turns[0], time=start), *turns[1:]))
            for start, turns in zip(starts, draws, strict=True)
        ]

    def open_loop(
        self, count: int, rate: float, *, cv: float = 1.0, seed: int = 0
    ) -> list[Arrival]:
        """The same sessions; a turn comes its think time after the *arrival* of the one before."""
        rows = []
        for conversation in self.closed_loop(count, rate, cv=cv, seed=seed):
            times = itertools.accumulate(turn.time for turn in conversation.turns)
            rows += list(zip(times, conversation.turns, strict=True))
        return _numbered(rows)

    def _draws(self, count: int, seed: int) -> Iterator[tuple[Arrival, ...]]:
        rng, think = random.Random(f"{seed}/lengths"), random.Random(f"{seed}/think")
        tenants = random.Random(f"{seed}/tenants")
        turns = geometric(self.turns, random.Random(f"{seed}/turns"))
        weights = [1 / (k + 1) ** self.skew for k in range(self.tenants)]
        for session in range(count):
            number = int(self.turns) if self.fixed_turns else next(turns)
            tenant = tenants.choices(range(self.tenants), weights)[0] if weights else None
            yield tuple(self._session(session, tenant, number, rng, think))

    def _session(
        self, session: int, tenant: int | None, turns: int, rng: random.Random, think: random.Random
    ) -> Iterator[Arrival]:
        prompt, output = self.first.draw(rng)
        prompt += self.system_len
        shared = self.system_len // BLOCK
        for turn in range(turns):
            if turn:
                prompt += output + self.added.draw_length(rng)
                output = self.first.draw(rng)[1]
            if turn and self.max_len is not None and prompt + output > self.max_len:
                return
            yield Arrival(
                f"s{session}.{turn}",
                self.think.draw(think) if turn else 0.0,
                prompt,
                output,
                block_names(session, prompt, shared, tenant or 0),
                tenant="" if tenant is None else f"tenant{tenant}",
                session=session,
                turn=turn,
            )


def cold_warm(
    rate: float,
    seconds: float,
    *,
    seed: int = 0,
    cold_share: float = 0.10,
    ramp: float = 30.0,
    cached_cold: int = 8_000,
) -> list[Arrival]:
    """Chats with long contexts, of which the share `cold_share` has not been seen before.

    A context is lognormal(11.3, 0.35) in [20,000, 200,000], about 84,000 tokens. Of a cold prompt
    only the system prompt of `cached_cold` tokens is stored; of a warm one all but the newest turn
    of about 3,000 tokens (exponential, at least 200). `turn` is 0 of cold prompts and 1 of warm
    ones. In the first `ramp` seconds the rate grows in a straight line, from 5 % of it. One output
    token: the study ends with the prefill. Modelled on the workload of "Cache-aware disaggregated
    inference" (together.ai/blog/cache-aware-disaggregated-inference).

    Raises `ValueError` for a rate that is not above 0 or a share outside [0, 1].
    """
    if not rate > 0 or not 0 <= cold_share <= 1:
        raise ValueError(
            f"rate must be above 0 and cold_share in [0, 1], got {rate} and {cold_share}"
        )
    gaps, lengths = random.Random(f"{seed}/arrivals"), random.Random(f"{seed}/lengths")
    context_length = Lognormal(11.3, 0.35, 20_000, 200_000)
    out: list[Arrival] = []
    now = 0.0
    while now < seconds + ramp:
        now += gaps.expovariate(1.0) / (rate if now > ramp else rate * max(0.05, now / ramp))
        cold = lengths.random() < cold_share
        context = context_length.draw_length(lengths)
        new = max(200, int(lengths.expovariate(1 / 3_000)))
        prompt, stored = (cached_cold + context, cached_cold) if cold else (context + new, context)
        out.append(
            Arrival(
                f"r{len(out)}",
                now,
                prompt,
                1,
                stored_len=stored,
                session=len(out),
                turn=0 if cold else 1,
            )
        )
    return out


# -- parts


def arrivals_at(count: int, rate: float, cv: float, seed: int) -> list[float]:
    """Seconds from 0 on; a rate of another size stretches them and changes nothing else."""
    if not cv >= 0 or count < 0:
        raise ValueError(f"cv and count must be at least 0, got {cv} and {count}")
    return arrival_times(count, rate, math.inf if cv == 0 else 1 / cv**2, seed)


def geometric(mean: float, rng: random.Random) -> Iterator[int]:
    """Whole numbers from 1 on, of this mean."""
    if mean == 1:
        return itertools.repeat(1)
    stop = math.log(1 - 1 / mean)
    return (1 + int(math.log(1.0 - rng.random()) / stop) for _ in itertools.count())


def block_names(session: int, prompt_len: int, shared: int, tenant: int = 0) -> tuple[int, ...]:
    """Of a prompt's full blocks: the first `shared` are its tenant's, the others its session's."""
    full = prompt_len // BLOCK
    first, own = -(tenant + 1) << 32, session << 32
    return (
        *range(first, first + min(shared, full)),
        *range(own + shared, own + max(shared, full)),
    )


def _numbered(rows: Sequence[tuple[float, Arrival]]) -> list[Arrival]:
    """In order of time, ties in the order they were made, with ids and absolute times."""
    ordered = sorted(rows, key=lambda row: row[0])
    return [replace(row, request_id=f"r{i}", time=time) for i, (time, row) in enumerate(ordered)]
