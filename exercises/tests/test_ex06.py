"""Tests of exercises 06. The truths: the engine's own steps, a loop over pairs, and attention."""

from __future__ import annotations

import pytest
import torch

from minifer.course import example
from minifer.course.grading import compare, points, probe, unchanged


def random_step(rng, size):
    """(token_ids, num_computed, num_new) of some requests; every second one is a decode."""
    step = []
    for index in range(size):
        computed = rng.choice([0, 0, 1, 7, 8, 16, rng.randrange(40)])
        new = 1 if index % 2 else rng.choice([1, 2, 8, 9, rng.randrange(1, 30)])
        rest = rng.choice([0, 0, 1, 13])
        length = computed + new + rest
        step.append(([rng.randrange(1000) for _ in range(length)], computed, new))
    return step


def layout(step):
    """cu_seqlens and seq_lens of a step, one request after the other."""
    starts = [sum(new for _, _, new in step[:b]) for b in range(len(step) + 1)]
    return starts, [computed + new for _, computed, new in step]


SMALL_STEPS = [
    ([([7], 0, 1)], ([7], [0], [0, 1], [1])),
    ([([5, 6, 7, 8], 1, 2)], ([6, 7], [1, 2], [0, 2], [3])),
    (
        [([7, 8, 9], 0, 3), ([4, 5, 6, 1], 3, 1)],
        ([7, 8, 9, 1], [0, 1, 2, 3], [0, 3, 4], [3, 4]),
    ),
]


@points("6.1", 2)
def test_ex06_1_lays_out_what_the_engine_lays_out(target):
    for requests, expected in SMALL_STEPS:
        compare(target.pack(requests), expected, f"pack({requests})")
    for budget in (5, 16, 64):
        for number, (step, _) in enumerate(
            example.run(max_num_batched_tokens=budget).steps, 1
        ):
            requests = [
                (list(entry.request.token_ids), entry.start, entry.num_new)
                for entry in step.scheduled
            ]
            expected = (step.token_ids, step.positions, step.query_start, step.seq_lens)
            tried = f"pack({requests})  # step {number} of the engine, budget {budget}"
            with unchanged(tried, requests=requests):
                got = target.pack(requests)
            compare(got, expected, tried)


@points("6.1", 1)
def test_ex06_1_rebuilds_every_token_from_its_position(target, rng):
    compare(target.pack([]), ([], [], [0], []), "pack([])")
    for size in (1, 2, 3, 8):
        step = random_step(rng, size)
        tried = f"pack({step})"
        got = target.pack(step)
        starts, lengths = layout(step)
        compare(list(got[2:]), [starts, lengths], tried + " → cu_seqlens, seq_lens")
        for b, (token_ids, computed, new) in enumerate(step):
            rows = slice(starts[b], starts[b + 1])
            there = [token_ids[position] for position in got[1][rows]]
            compare(
                list(got[0][rows]),
                there,
                tried + f" → tokens at request {b}'s positions",
            )
            first_last = [computed, computed + new - 1]
            compare(
                [got[1][rows][0], got[1][rows][-1]],
                first_last,
                tried + " → its positions",
            )


@points("6.1", 1)
@pytest.mark.parametrize(
    "request_",
    [([1, 2], 0, 0), ([1, 2], 0, -1), ([1, 2], -1, 1), ([1, 2], 0, 3), ([1, 2], 2, 1)],
)
def test_ex06_1_refuses_what_does_not_fit(target, request_):
    tried = f"pack([([5], 0, 1), {request_}])"
    compare(target.pack([([5], 0, 1)]), ([5], [0], [0, 1], [1]), "pack([([5], 0, 1)])")
    try:
        got = target.pack([([5], 0, 1), request_])
    except ValueError:
        return
    raise AssertionError(f"tried     {tried}\ngot       {got!r}\nexpected  ValueError")


def pairs_one_by_one(cu_seqlens, seq_lens):
    """The mask by its definition, a pair at a time."""
    rows = []
    for b, length in enumerate(seq_lens):
        count = cu_seqlens[b + 1] - cu_seqlens[b]
        rows += [(b, length - count + i) for i in range(count)]
    columns = [
        (b, position) for b, length in enumerate(seq_lens) for position in range(length)
    ]
    return torch.tensor(
        [[kb == qb and kp <= qp for kb, kp in columns] for qb, qp in rows]
    )


MASKS = [
    ([0, 1], [1]),
    ([0, 2, 3], [3, 1]),
    ([0, 3], [3]),
    ([0, 3], [10]),
    ([0, 1, 2], [5, 4]),
    ([0, 3, 4, 6], [3, 8, 6]),
    ([0, 4, 16], [20, 28]),
]


@points("6.2", 2)
@pytest.mark.parametrize(("cu_seqlens", "seq_lens"), MASKS)
def test_ex06_2_every_pair_is_right(target, cu_seqlens, seq_lens):
    tried = f"packed_mask({cu_seqlens}, {seq_lens})"
    with unchanged(tried, cu_seqlens=cu_seqlens, seq_lens=seq_lens):
        got = target.packed_mask(cu_seqlens, seq_lens)
    compare(got, pairs_one_by_one(cu_seqlens, seq_lens), tried)


@points("6.2", 1)
def test_ex06_2_no_request_sees_another(target, rng):
    for size in (2, 3, 6):
        starts, lengths = layout(random_step(rng, size))
        tried = f"packed_mask({starts}, {lengths})"
        got = target.packed_mask(starts, lengths)
        compare(list(got.shape), [starts[-1], sum(lengths)], tried + ".shape")
        left = 0
        for b, length in enumerate(lengths):
            outside = got[starts[b] : starts[b + 1]].clone()
            outside[:, left : left + length] = False
            where = (
                tried + f" → True entries of request {b}'s rows outside its own keys"
            )
            compare(int(outside.sum()), 0, where)
            left += length


@points("6.2", 2)
def test_ex06_2_attention_under_it_is_that_of_each_request_alone(
    target, rng, generator
):
    for size in (1, 2, 5):
        starts, lengths = layout(random_step(rng, size))
        mask = target.packed_mask(starts, lengths)
        query = torch.randn(starts[-1], 8, generator=generator, dtype=torch.float64)
        keys = torch.randn(sum(lengths), 8, generator=generator, dtype=torch.float64)
        scores = (query @ keys.T).masked_fill(~mask, -torch.inf)
        got = torch.softmax(scores, dim=1) @ keys
        alone, left = [], 0
        for b, length in enumerate(lengths):
            own = keys[left : left + length]
            for row in range(starts[b], starts[b + 1]):
                seen = own[: length - (starts[b + 1] - 1 - row)]
                alone.append(torch.softmax(seen @ query[row], dim=0) @ seen)
            left += length
        tried = f"attention under packed_mask({starts}, {lengths})"
        compare(got, torch.stack(alone), tried, atol=1e-12)


@points("6.2", 1, hidden=True)
def test_ex06_2_larger_steps(target, rng):
    starts, lengths = layout(random_step(rng, 12))
    tried = f"packed_mask({starts}, {lengths})"
    compare(
        target.packed_mask(starts, lengths), pairs_one_by_one(starts, lengths), tried
    )


@points("6.3", 2)
def test_ex06_3_rows_are_those_the_engine_asks_for(target, generator):
    for budget in (16, 5):
        for step, _ in example.run(max_num_batched_tokens=budget).steps:
            hidden = torch.randn(step.query_start[-1], 4, generator=generator)
            totals = [
                entry.end if entry.is_last_chunk else entry.end + 1
                for entry in step.scheduled
            ]
            arguments = (step.query_start, step.seq_lens, totals)
            tried = f"last_hidden(hidden, {', '.join(map(str, arguments))})"
            with unchanged(tried, hidden=hidden, cu_seqlens=step.query_start):
                got = target.last_hidden(hidden, *arguments)
            compare(got, hidden[step.logits_rows], tried)


@points("6.3", 1)
def test_ex06_3_reads_its_own_rows_only_and_returns_a_copy(target, rng):
    decodes = [
        ([1] * length, length - 1, 1) for length in (3, 1, 9)
    ]  # all rows are read
    for step in (*(random_step(rng, size) for size in (1, 2, 7)), decodes):
        size = len(step)
        starts, lengths = layout(step)
        totals = [len(token_ids) for token_ids, _, _ in step]
        complete = [b for b in range(size) if lengths[b] == totals[b]]
        hidden = torch.full((starts[-1], 3), torch.nan, dtype=torch.float64)
        for b in complete:
            hidden[starts[b + 1] - 1] = float(b)  # all other rows are poison
        tried = f"last_hidden(hidden, {starts}, {lengths}, {totals})"
        got = target.last_hidden(hidden, starts, lengths, totals)
        expected = torch.tensor(complete, dtype=torch.float64)[:, None].expand(-1, 3)
        compare(got, expected, tried + "  # row of request b holds b, others NaN")
        compare(str(got.dtype), str(hidden.dtype), tried + ".dtype")
        got.fill_(-1)
        for b in complete:
            compare(
                float(hidden[starts[b + 1] - 1, 0]), float(b), tried + " must be a copy"
            )


def step_costs(rng):
    """Cost functions a chunk is chosen for: flat then linear, with and without a context's share.

    All are multiples of 1/64: sums are exact in any order, and equals are equal.
    """
    base, slope = rng.randint(64, 320) / 64, rng.randint(7, 64) / 64
    share = rng.randint(1, 6) / 64
    return [
        lambda query, context: max(base, slope * query),
        lambda query, context: max(base, slope * query) + share * context,
        lambda query, context: base + (query - 12) ** 2 / 64 + share * context,
    ]


def exhaustive(num_tokens, candidates, step_seconds, target):
    allowed = []
    for chunk in candidates:
        ends = [*range(chunk, num_tokens, chunk), num_tokens]
        sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
        times = [step_seconds(size, end) for size, end in zip(sizes, ends, strict=True)]
        if all(seconds <= target for seconds in times):
            allowed.append((sum(times), chunk))
    return min(allowed)[1] if allowed else None


@points("6.4", 1)
@pytest.mark.parametrize(
    ("target_seconds", "expected"), [(8, 4), (16, 4), (4, 4), (3, None)]
)
def test_ex06_4_the_example(target, target_seconds, expected):
    tried = (
        f"choose_chunk(20, [2, 4, 8, 16], lambda q, c: max(4.0, q), {target_seconds})"
    )
    got = target.choose_chunk(
        20, [2, 4, 8, 16], lambda q, c: max(4.0, q), target_seconds
    )
    compare(got, expected, tried)
    got = target.choose_chunk(
        20, [16, 8, 4, 2], lambda q, c: max(4.0, q), target_seconds
    )
    compare(got, expected, tried.replace("[2, 4, 8, 16]", "[16, 8, 4, 2]"))


@points("6.4", 2)
def test_ex06_4_is_the_best_of_all_candidates(target, rng):
    for _ in range(30):
        num_tokens = rng.choice([1, 5, 16, 33, 100])
        candidates = rng.sample(range(1, 48), 8)
        goal = rng.uniform(2, 30)
        for number, seconds in enumerate(step_costs(rng)):
            tried = (
                f"choose_chunk({num_tokens}, {candidates}, step_seconds, {goal:.3f})"
                f"  # cost function {number} of the tests"
            )
            with unchanged(tried, candidates=candidates):
                got = target.choose_chunk(num_tokens, candidates, seconds, goal)
            compare(got, exhaustive(num_tokens, candidates, seconds, goal), tried)


@points("6.4", 1)
def test_ex06_4_every_step_must_keep_the_target(target):
    """The last step is the shortest and has the longest context: it alone breaks the target."""
    got = target.choose_chunk(10, [4], lambda query, context: float(context), 8.0)
    compare(
        got, None, "choose_chunk(10, [4], lambda query, context: float(context), 8.0)"
    )
    got = target.choose_chunk(10, [4], lambda query, context: float(context), 10.0)
    compare(
        got, 4, "choose_chunk(10, [4], lambda query, context: float(context), 10.0)"
    )


@probe("6.1")
def probe_pack(target):
    return target.pack([([7, 8, 9], 0, 3), ([4, 5, 6, 1, 2], 2, 2), ([3] * 9, 8, 1)])


@probe("6.1")
def probe_too_long(target):
    return target.pack([([1, 2], 1, 2)])


@probe("6.1")
def probe_nothing_new(target):
    return target.pack([([1, 2], 0, 0)])


@probe("6.2")
def probe_mask(target):
    return target.packed_mask([0, 2, 3, 6], [5, 1, 3])


@probe("6.3")
def probe_rows(target):
    hidden = torch.arange(12.0).reshape(6, 2)
    return target.last_hidden(hidden, [0, 3, 4, 6], [3, 8, 6], [3, 8, 7])


@probe("6.3")
def probe_nobody(target):
    return target.last_hidden(torch.ones(2, 2), [0, 2], [2], [5])


@probe("6.3")
def probe_everybody(target):
    hidden = torch.arange(6.0).reshape(3, 2)
    target.last_hidden(hidden, [0, 1, 2, 3], [3, 1, 9], [3, 1, 9]).fill_(-1)
    return hidden


@probe("6.4")
def probe_choices(target):
    costs = (
        lambda q, c: max(4.0, q),
        lambda q, c: max(2.0, q) + 0.5 * c,
        lambda q, c: 3.0 + q * q / 16,  # the larger the slower, from 8 on
    )
    return [
        target.choose_chunk(n, [16, 2, 8, 4], cost, goal)
        for cost in costs
        for n in (3, 20, 21)
        for goal in (3.0, 8.0, 12.0, 20.0)
    ]
