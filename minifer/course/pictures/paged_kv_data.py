"""Numbers behind the pictures of paged KV: who holds what, and what is wasted. Plain values.

`reservations` is a model, not the engine: requests that always wait at the door of a cache, one
token a step each, and four ways to hand out memory. The rest is read off runs of the engine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minifer.course.figure_data import block_map_data
from minifer.perf.load.workload import Distribution

DRAWN = "•"  # stands for a token that the model drew

# Lengths in tokens, capped: short questions, answers of very different lengths.
PROMPTS, OUTPUTS, LONGEST = "lognormal:4.6:0.9:1024", "lognormal:5:1:1024", 2048


@dataclass(frozen=True)
class PoolState:
    """The cache during one step, token by token.

    tables: request id → block table. text: request id → one character for each of its tokens whose
    KV is there after the step (`DRAWN` for those the model drew). written: slots of this step.
    cached: blocks that a look-up can find.
    """

    step: int
    block_size: int
    num_blocks: int
    tables: Mapping[str, tuple[int, ...]]
    text: Mapping[str, str]
    written: frozenset[int]
    cached: frozenset[int]

    def holders(self, block_id: int) -> tuple[str, ...]:
        """The requests whose tables hold a block."""
        return tuple(name for name, table in self.tables.items() if block_id in table)

    def slot(self, name: str, position: int) -> int:
        """Where a token of a request lies."""
        place, offset = divmod(position, self.block_size)
        return self.tables[name][place] * self.block_size + offset

    def slots(self) -> dict[int, str]:
        """Slot → the character of the token that lies there."""
        return {
            self.slot(name, position): character
            for name, text in self.text.items()
            for position, character in enumerate(text)
        }

    @property
    def words(self) -> str:
        """The state in a sentence, for those who do not see it."""
        tables = "; ".join(
            f"{name} has {len(self.text[name])} tokens in blocks {', '.join(map(str, table))}"
            for name, table in self.tables.items()
        )
        used = len({block for table in self.tables.values() for block in table})
        return f"Step {self.step}: {tables}. {self.num_blocks - used} blocks are free."


def pool_states(run: Any) -> list[PoolState]:
    """One state a step of an `example.run`."""
    prompts = {name: out.prompt_token_ids for name, out in run.outputs.items()}
    columns = {column.step: column for column in block_map_data(run.events)}
    lengths: dict[str, int] = {}
    states = []
    for number, (step, _) in enumerate(run.steps, start=1):
        for entry, length in zip(step.scheduled, step.seq_lens, strict=True):
            lengths[entry.request.request_id] = length
        column = columns[number]
        states.append(
            PoolState(
                number,
                step.block_size,
                run.engine.kv.pool.num_blocks,
                {name: column.tables[name] for name in prompts if name in column.tables},
                {n: _text(prompts[n], lengths[n]) for n in prompts if n in column.tables},
                frozenset(step.slot_mapping),
                column.cached,
            )
        )
    return states


def _text(prompt: Sequence[int], length: int) -> str:
    characters = [chr(token) if 32 < token < 127 else "␣" for token in prompt]
    return "".join(characters[:length]) + DRAWN * (length - len(prompt))


def empty_slots(run: Any) -> float:
    """Slots that a block table holds and no token fills, mean over all requests and steps."""
    empty = [
        len(state.tables[name]) * state.block_size - len(state.text[name])
        for state in pool_states(run)
        for name in state.tables
    ]
    return sum(empty) / len(empty)


@dataclass(frozen=True)
class ScatteredStep:
    """A step of several requests whose context lies on shuffled blocks among NaN.

    query: float64 [T, H, C]. keys, values: [N, P, K, C], NaN where no request has a token. batch:
    the engine's `ForwardBatch`. requests: (block table, context length, rows of `query`) of each.
    """

    block_size: int
    query: Any
    keys: Any
    values: Any
    batch: Any
    requests: tuple[tuple[list[int], int, slice], ...]


def scattered_step(rng: random.Random, *, heads: int = 4, kv_heads: int = 2) -> ScatteredStep:
    """One to four requests with contexts of 1, P, P + 1, 2 · P or any number of tokens.

    Each computes its last token, all of them, or some number between: decode, prompt, chunk.
    """
    import torch

    from minifer.execution.forward_batch import ForwardBatch

    P, C, num_blocks = rng.choice([1, 2, 4, 7]), 8, 99
    lengths = [
        rng.choice([1, P, P + 1, 2 * P, rng.randint(1, 20)]) for _ in range(rng.randint(1, 4))
    ]
    new = [rng.choice([1, length, rng.randint(1, length)]) for length in lengths]
    blocks = rng.sample(range(num_blocks), num_blocks)
    tables = [[blocks.pop() for _ in range(-(-length // P))] for length in lengths]
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    caches = torch.full((2, num_blocks, P, kv_heads, C), torch.nan, dtype=torch.float64)
    for table, length in zip(tables, lengths, strict=True):
        for p in range(length):
            here = torch.randn(2, kv_heads, C, generator=generator, dtype=torch.float64)
            caches[:, table[p // P], p % P] = here
    start = [sum(new[:b]) for b in range(len(new) + 1)]
    query = torch.randn(start[-1], heads, C, generator=generator, dtype=torch.float64)
    unused = [0] * start[-1]  # attention asks for neither tokens nor positions nor slots
    batch = ForwardBatch.build(unused, unused, unused, start, lengths, tables, [], P)
    rows = [slice(a, b) for a, b in itertools.pairwise(start)]
    requests = tuple(zip(tables, lengths, rows, strict=True))
    return ScatteredStep(P, query, caches[0], caches[1], batch, requests)


def random_requests(count: int, seed: int = 4) -> dict[str, tuple[str, int]]:
    """{id: (prompt, tokens wanted)} of many lengths, for `example.run`; no common beginnings."""
    rng = random.Random(seed)
    return {
        f"r{i}": (f"{i:02}" + "x" * rng.randint(3, 60), rng.randint(4, 28)) for i in range(count)
    }


# -- four ways to hand out memory


@dataclass(frozen=True)
class Shares:
    """Where a full cache's slots are, as shares of it, means over the steps of a run.

    stored: hold a token. later: kept for a token that will come. never: kept for one that will not
    come. gaps: in nobody's hands, yet of no use to the next request. running: requests at a time.
    recomputed: of all tokens computed, those computed again because their blocks were taken away.
    """

    policy: str
    stored: float
    later: float
    never: float
    gaps: float
    running: float
    recomputed: float = 0.0


@dataclass
class _Running:
    start: int  # first slot of a contiguous reservation
    held: int  # slots
    tokens: int
    final: int


def draw_lengths(count: int, seed: int = 4) -> list[tuple[int, int]]:
    """(prompt, output) lengths from `PROMPTS` and `OUTPUTS`."""
    rng = random.Random(seed)
    prompts, outputs = Distribution.parse(PROMPTS), Distribution.parse(OUTPUTS)
    return [(prompts.draw_length(rng), outputs.draw_length(rng)) for _ in range(count)]


def reservations(
    lengths: Sequence[tuple[int, int]],
    *,
    capacity: int = 8 * LONGEST,
    block_size: int = 16,
    headroom: float = 0.04,
    steps: int = 1500,
    warm_up: int = 500,
) -> list[Shares]:
    """A cache of `capacity` slots under four policies, with requests that wait in line for it.

    Reserve the longest; reserve the prompt and the answer's length, known, rounded up to a power of
    two; reserve exactly what will be needed, known; take blocks as tokens come. The first three are
    Orca (Max), (Pow2) and (Oracle) of Kwon et al. 2023, arXiv:2309.06180, section 6.1. headroom:
    with blocks, the share of the cache that must stay free when a request is let in.
    """
    kept: dict[str, Callable[[int, int], int]] = {
        "longest": lambda prompt, output: LONGEST,
        "power of two": lambda prompt, output: prompt + (1 << (output - 1).bit_length()),
        "exact, known": lambda prompt, output: prompt + output,
    }
    found = [
        _contiguous(name, lengths, capacity, keep, steps, warm_up) for name, keep in kept.items()
    ]
    return [*found, _paged(lengths, capacity // block_size, block_size, headroom, steps, warm_up)]


def with_blocks(
    lengths: Sequence[tuple[int, int]], *, headroom: float, capacity: int = 8 * LONGEST
) -> Shares:
    """The last of `reservations` alone: blocks of 16, `headroom` of the cache kept free."""
    return _paged(lengths, capacity // 16, 16, headroom, 1500, 500)


def _contiguous(
    policy: str,
    lengths: Sequence[tuple[int, int]],
    capacity: int,
    keep: Callable[[int, int], int],
    steps: int,
    warm_up: int,
) -> Shares:
    line, running = itertools.cycle(lengths), list[_Running]()
    prompt, output = next(line)
    seen = []
    for step in range(steps):
        while (start := _first_gap(running, keep(prompt, output), capacity)) is not None:
            running.append(_Running(start, keep(prompt, output), prompt, prompt + output))
            prompt, output = next(line)
        if step >= warm_up:
            seen.append(_count(running, capacity))
        for request in running:
            request.tokens += 1
        running = [request for request in running if request.tokens < request.final]
    return _shares(policy, seen)


def _first_gap(running: Sequence[_Running], size: int, capacity: int) -> int | None:
    """Where `size` slots in a row are free: the first place, None for nowhere."""
    start = 0
    for request in sorted(running, key=lambda request: request.start):
        if request.start - start >= size:
            return start
        start = request.start + request.held
    return start if capacity - start >= size else None


def _paged(
    lengths: Sequence[tuple[int, int]],
    num_blocks: int,
    P: int,
    headroom: float,
    steps: int,
    warm_up: int,
) -> Shares:
    """Blocks as tokens come; when none is free, the youngest gives its own back and starts over."""
    line, running, again = itertools.cycle(lengths), list[_Running](), list[_Running]()
    waiting, free, spare = _waiting(line, again), num_blocks, int(headroom * num_blocks)
    seen, computed, recomputed = [], 0, 0
    for step in range(steps):
        while (need := -(-(waiting.tokens + 1) // P)) <= free - spare:
            waiting.held, free = need * P, free - need
            running.append(waiting)
            computed += waiting.tokens
            waiting = _waiting(line, again)
        if step >= warm_up:
            seen.append(_count(running, num_blocks * P))
        for request in list(running):
            if request not in running:
                continue  # lost its blocks a moment ago
            if request.tokens == request.held:
                if not free:
                    again.append(waiting)
                    waiting = running.pop()
                    recomputed += waiting.tokens
                    free += waiting.held // P
                    if waiting is request:
                        continue
                request.held, free = request.held + P, free - 1
            request.tokens += 1
            computed += 1
        for request in running:
            free += request.held // P if request.tokens >= request.final else 0
        running = [request for request in running if request.tokens < request.final]
    return _shares("blocks", seen, recomputed / computed)


def _waiting(line: Any, again: list[_Running]) -> _Running:
    """The next in line; those that were sent back come first."""
    if again:
        return again.pop()
    prompt, output = next(line)
    return _Running(0, 0, prompt, prompt + output)


def _count(running: Sequence[_Running], capacity: int) -> tuple[float, float, float, float, int]:
    tokens = sum(request.tokens for request in running)
    later = sum(min(request.held, request.final) - request.tokens for request in running)
    never = sum(max(0, request.held - request.final) for request in running)
    gaps = capacity - sum(request.held for request in running)
    return tokens / capacity, later / capacity, never / capacity, gaps / capacity, len(running)


def _shares(
    policy: str, rows: Sequence[tuple[float, float, float, float, int]], recomputed: float = 0.0
) -> Shares:
    stored, later, never, gaps, running = (
        sum(column) / len(rows) for column in zip(*rows, strict=True)
    )
    return Shares(policy, stored, later, never, gaps, running, recomputed)
