"""Tests of exercises 07. The truths: float64 one request at a time, the engine's attention, exact laws."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch

from minifer.course.grading import compare, points, probe, unchanged
from minifer.execution.attention import dense_attention

POISON = (math.nan, math.inf, 1e30)


def ragged(generator, lengths, heads, kv_heads, width, *, spread=1.0, poison=math.nan):
    """A decode step in float64: query, keys, values and lengths; poison beyond each length."""
    S, B = max(lengths), len(lengths)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * spread

    keys, values = rand(B, S, kv_heads, width), rand(B, S, kv_heads, width)
    for b, length in enumerate(lengths):
        keys[b, length:] = values[b, length:] = poison
    return rand(B, heads, width), keys, values, torch.tensor(lengths)


def one_by_one(query, keys, values, lengths):
    """The slow twin of the engine, a request at a time."""
    scale = query.shape[-1] ** -0.5
    rows = [
        dense_attention(query[b : b + 1], keys[b, :n], values[b, :n], scale)
        for b, n in enumerate(lengths.tolist())
    ]
    return torch.cat(rows)


def call(lengths, heads, kv_heads, width, note=""):
    return f"decode_attention({heads} heads on {kv_heads} of {width}, lengths={lengths}{note})"


SHAPES = [
    ([1], 1, 1, 4),
    ([3], 2, 1, 4),
    ([1, 3], 2, 2, 4),
    ([5, 5], 4, 2, 8),
    ([2, 9, 1, 16], 6, 3, 8),
    ([33, 7, 64], 12, 4, 16),
]


@points("7.1", 3)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "width"), SHAPES)
def test_ex07_1_each_request_as_if_alone(
    target, generator, lengths, heads, kv_heads, width
):
    for poison in (0.0, *POISON):
        step = ragged(generator, lengths, heads, kv_heads, width, poison=poison)
        tried = call(lengths, heads, kv_heads, width, f", {poison} beyond them")
        with unchanged(tried, query=step[0], lengths=step[3]):
            got = target.decode_attention(*step)
        compare(got, one_by_one(*step), tried, atol=1e-10)


@points("7.1", 1)
def test_ex07_1_large_scores_do_not_overflow(target, generator):
    step = ragged(generator, [4, 9], 4, 2, 8, spread=30.0)
    tried = call([4, 9], 4, 2, 8, ", scores in the thousands")
    compare(target.decode_attention(*step), one_by_one(*step), tried, atol=1e-8)


@points("7.1", 1)
def test_ex07_1_float32_stays_float32_and_inputs_stay(target, generator):
    step = ragged(generator, [2, 6], 4, 2, 8)
    truth = one_by_one(*step)
    single = [x.float() for x in step[:3]]
    before = [x.clone() for x in single]
    got = target.decode_attention(*single, step[3])
    tried = call([2, 6], 4, 2, 8, ", float32")
    compare(str(got.dtype), "torch.float32", tried + ".dtype")
    compare(got, truth, tried, atol=1e-5)
    for name, a, b in zip(("query", "keys", "values"), single, before, strict=True):
        same = torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        compare(bool(same), True, f"{tried} leaves {name} unchanged")


@points("7.1", 1)
def test_ex07_1_is_one_batched_computation(target, generator):
    """The count of torch's calls must not grow with requests, heads or tokens."""

    def calls(lengths, heads, kv_heads):
        step = ragged(generator, lengths, heads, kv_heads, 8)
        tried = call(lengths, heads, kv_heads, 8)

        class Counter(torch.overrides.TorchFunctionMode):
            count = 0

            def __torch_function__(self, function, types, args=(), kwargs=None):
                Counter.count += 1
                return function(*args, **(kwargs or {}))

        with Counter():
            got = target.decode_attention(*step)
        compare(got, one_by_one(*step), tried, atol=1e-10)
        return Counter.count

    few, many = calls([2], 2, 1), calls([3, 9, 5, 17, 20, 1, 8, 2], 8, 4)
    compare(
        many <= few + 4,
        True,
        f"calls of torch: {few} for 1 request, {many} for 8 requests",
    )


def parts_of(generator, counts, heads, width, spread=1.0, shift=0.0):
    """Attention of one query a head over all keys, and over parts of them: float64."""
    S = sum(counts)
    scores = (
        torch.randn(S, heads, generator=generator, dtype=torch.float64) * spread + shift
    )
    values = torch.randn(S, heads, width, generator=generator, dtype=torch.float64)
    outputs, lses, left = [], [], 0
    for count in counts:
        s, v = scores[left : left + count], values[left : left + count]
        if count:
            outputs.append((torch.softmax(s, 0)[:, :, None] * v).sum(0))
            lses.append(torch.logsumexp(s, 0))
        else:
            outputs.append(torch.full((heads, width), torch.nan, dtype=torch.float64))
            lses.append(torch.full((heads,), -torch.inf, dtype=torch.float64))
        left += count
    truth = (
        (torch.softmax(scores, 0)[:, :, None] * values).sum(0),
        torch.logsumexp(scores, 0),
    )
    return torch.stack(outputs), torch.stack(lses), truth


COUNTS = [[1], [1, 1], [3, 1], [5, 2, 9], [0, 4], [4, 0, 0, 7], [1] * 16]


@points("7.2", 2)
@pytest.mark.parametrize("counts", COUNTS)
def test_ex07_2_parts_give_the_whole(target, generator, counts):
    outputs, lses, truth = parts_of(generator, counts, 3, 4)
    tried = f"merge(outputs, lses) of parts with {counts} keys"
    before = outputs.clone()
    with unchanged(tried, lses=lses):
        got = target.merge(outputs, lses)
    compare(bool(torch.equal(outputs.nan_to_num(7.0), before.nan_to_num(7.0))), True,
            tried + " leaves outputs unchanged")  # fmt: skip
    compare(got[0], truth[0], tried + " → output", atol=1e-12)
    compare(got[1], truth[1], tried + " → lse", atol=1e-12)


@points("7.2", 1)
def test_ex07_2_large_scores(target, generator):
    for shift in (1000.0, -1000.0):
        outputs, lses, truth = parts_of(
            generator, [3, 2, 6], 2, 4, spread=5.0, shift=shift
        )
        tried = f"merge(outputs, lses) with scores around {shift:g}"
        got = target.merge(outputs, lses)
        compare(got[0], truth[0], tried + " → output", atol=1e-12)
        compare(got[1], truth[1], tried + " → lse", atol=1e-9)


@points("7.2", 1)
def test_ex07_2_merging_in_any_grouping_is_the_same(target, generator):
    outputs, lses, truth = parts_of(generator, [2, 5, 1, 8], 3, 4, spread=3.0)

    def pair(a, b):
        return target.merge(torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]]))

    one, two, three, four = zip(outputs, lses, strict=True)
    left = pair(pair(pair(one, two), three), four)
    halves = pair(pair(four, two), pair(three, one))
    for name, got in (
        ("from left to right", left),
        ("in two halves, other order", halves),
    ):
        compare(got[0], truth[0], f"merging four parts {name} → output", atol=1e-12)
        compare(got[1], truth[1], f"merging four parts {name} → lse", atol=1e-12)


@points("7.2", 2)
def test_ex07_2_parts_without_keys(target, generator):
    outputs, lses, _ = parts_of(generator, [0, 0], 2, 3)
    got = target.merge(outputs, lses)
    compare(
        got[0],
        torch.zeros(2, 3, dtype=torch.float64),
        "merge of two parts without keys",
    )
    compare(got[1].tolist(), [-math.inf] * 2, "merge of two parts without keys → lse")
    outputs, lses, truth = parts_of(
        generator, [4, 3], 2, 3
    )  # one head has keys in one part only
    outputs[1, 0], lses[1, 0] = torch.nan, -torch.inf
    got = target.merge(outputs, lses)
    tried = "merge(outputs, lses) where part 1 has no key of head 0"
    compare(got[0][0], outputs[0, 0], tried + " → head 0", atol=1e-12)
    compare(got[0][1], truth[0][1], tried + " → head 1", atol=1e-12)
    single = target.merge(outputs.float(), lses.float())
    compare(str(single[0].dtype), "torch.float32", tried + " in float32: dtype")


def random_rows(rng, B):
    lengths = [rng.randrange(1, 30) for _ in range(B)]
    tables = [[rng.randrange(99) for _ in range(-(-n // 8))] for n in lengths]
    slots = [rng.randrange(800) for _ in range(B)]
    return (
        [rng.randrange(500) for _ in range(B)],
        [n - 1 for n in lengths],
        slots,
        lengths,
        tables,
    )


@points("7.3", 2)
def test_ex07_3_active_rows_stay_and_inactive_rows_write_nothing(target, rng):
    example = [7], [9], [21], [10], [[5, 2]]
    expected = [7, 0], [9, 0], [21, -1], [10, 1], [[5, 2], [0, 0]]
    tried = "pad_batch([7], [9], [21], [10], [[5, 2]], 2)"
    compare(target.pad_batch(*example, 2), expected, tried)
    for B, size in ((1, 1), (1, 4), (3, 4), (5, 8), (8, 8)):
        rows = random_rows(rng, B)
        tried = f"pad_batch({', '.join(map(str, rows))}, {size})"
        with unchanged(tried, rows=rows):
            got = target.pad_batch(*rows, size)
        width = max(map(len, rows[4]))
        for index, (name, inactive) in enumerate(
            (("token_ids", 0), ("positions", 0), ("slots", -1), ("lengths", 1))
        ):
            compare(
                list(got[index][:B]),
                rows[index],
                f"{tried} → {name} of the active rows",
            )
            rest = [inactive] * (size - B)
            compare(
                list(got[index][B:]), rest, f"{tried} → {name} of the inactive rows"
            )
        compare(
            [len(row) for row in got[4]],
            [width] * size,
            f"{tried} → width of block_tables",
        )
        cut = [list(row[: len(own)]) for row, own in zip(got[4], rows[4], strict=False)]
        compare(cut, rows[4], f"{tried} → block_tables of the active rows")
        padding = sum(
            sum(row[len(own) :]) for row, own in zip(got[4], rows[4], strict=False)
        )
        compare(
            padding + sum(map(sum, got[4][B:])),
            0,
            f"{tried} → sum of padded table entries",
        )


@points("7.3", 1)
def test_ex07_3_nothing_is_shared(target):
    rows = [1, 2], [3, 4], [5, 6], [4, 5], [[1], [2]]
    before = deepcopy(rows)
    got = target.pad_batch(*rows, 4)
    got[4][2][0] = 77  # an inactive row's
    for size in (4, 2):  # 2: nothing is padded
        result = target.pad_batch(*rows, size)
        result[4][0][0] = 99
        for column in result:
            column[0] = 99
        compare(
            rows,
            before,
            f"writing to the result of pad_batch(…, {size}) must not change the inputs",
        )
    compare(
        list(got[4][3]), [0], "writing to inactive row 2 must not change inactive row 3"
    )


@points("7.3", 1)
@pytest.mark.parametrize(("B", "size"), [(2, 1), (3, 0), (0, 4), (0, 0)])
def test_ex07_3_refuses_what_cannot_be_padded(target, B, size):
    one = target.pad_batch([1], [0], [1], [1], [[0]], 1)
    compare(one, ([1], [0], [1], [1], [[0]]), "pad_batch([1], [0], [1], [1], [[0]], 1)")
    rows = [1] * B, [0] * B, [1] * B, [1] * B, [[0]] * B
    try:
        got = target.pad_batch(*rows, size)
    except ValueError:
        return
    raise AssertionError(f"tried     pad_batch of {B} rows to {size}\ngot       {got!r}\n"
                         "expected  ValueError")  # fmt: skip


def random_law(generator, V, zeros=False):
    law = torch.rand(V, generator=generator, dtype=torch.float64) ** 3
    if zeros:
        law[torch.rand(V, generator=generator) < 0.4] = 0
        law[0] += 0.1
    return law / law.sum()


def kept_with(target, p, q, draft):
    """The acceptance probability of a draft, found by bisection over u."""
    low, high = 0.0, 1.0
    if target.accept(p, q, draft, math.nextafter(1.0, 0.0)):
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if target.accept(p, q, draft, middle) else (low, middle)
        )
    return high


@points("7.4", 2)
def test_ex07_4_tokens_have_the_large_models_law(target, generator):
    for V, zeros in ((2, False), (5, False), (5, True), (17, True)):
        p, q = random_law(generator, V, zeros), random_law(generator, V)
        tried = (
            f"the law of accept and residual together, p={p.tolist()}, q={q.tolist()}"
        )
        with unchanged(tried, p=p, q=q):
            keep = torch.tensor(
                [kept_with(target, p, q, x) for x in range(V)], dtype=torch.float64
            )
            replace = target.residual(p, q)
        law = q * keep + (q * (1 - keep)).sum() * replace
        compare(law, p, tried, atol=1e-12)


@points("7.4", 1)
def test_ex07_4_accepts_exactly_below_the_ratio(target):
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    q = torch.tensor([0.75, 0.125, 0.125], dtype=torch.float64)
    cases = [(0, 0.6, True), (0, 0.7, False), (1, 0.999, True), (2, 0.0, False)]
    exact = torch.tensor([0.25, 0.75], dtype=torch.float64), torch.tensor([0.5, 0.5])
    for draft, u, expected in cases:
        tried = f"accept(p={p.tolist()}, q={q.tolist()}, draft={draft}, u={u})"
        compare(target.accept(p, q, draft, u), expected, tried)
    tried = "accept(p=[0.25, 0.75], q=[0.5, 0.5], draft=0, u=0.5)  # u is not below 0.5"
    compare(target.accept(exact[0], exact[1].double(), 0, 0.5), False, tried)


@points("7.4", 1)
def test_ex07_4_residual_of_equal_laws_and_of_its_own(target, generator):
    p = random_law(generator, 6)
    got = target.residual(p, p.clone())
    compare(got, p, "residual(p, p)", atol=1e-15)
    got.zero_()
    compare(
        float(p.sum()),
        1.0,
        "residual(p, p) must be a tensor of its own: sum of p",
        atol=1e-12,
    )
    q = random_law(generator, 6)
    tried = f"residual(p={p.tolist()}, q={q.tolist()})"
    got = target.residual(p, q)
    compare(float(got.sum()), 1.0, tried + ".sum()", atol=1e-12)
    compare(str(got.dtype), "torch.float64", tried + ".dtype")


@probe("7.1")
def probe_ragged(target):
    step = ragged(torch.Generator().manual_seed(1), [2, 5], 4, 2, 4, poison=0.5)
    return target.decode_attention(*step)


@probe("7.1")
def probe_poison(target):
    step = ragged(torch.Generator().manual_seed(2), [1, 3], 2, 2, 4)
    return target.decode_attention(*step)


@probe("7.1")
def probe_large(target):
    step = ragged(
        torch.Generator().manual_seed(3), [2, 3], 2, 1, 4, spread=60.0, poison=0.0
    )
    return target.decode_attention(*step)


@probe("7.2")
def probe_merge(target):
    outputs, lses, _ = parts_of(torch.Generator().manual_seed(4), [2, 5, 1], 2, 3)
    return list(target.merge(outputs, lses))


@probe("7.2")
def probe_merge_large(target):
    outputs, lses, _ = parts_of(
        torch.Generator().manual_seed(5), [2, 3], 1, 2, shift=1000.0
    )
    return list(target.merge(outputs, lses))


@probe("7.2")
def probe_merge_empty(target):
    outputs, lses, _ = parts_of(torch.Generator().manual_seed(6), [0, 3], 1, 2)
    return list(target.merge(outputs, lses))


@probe("7.2")
def probe_merge_nothing(target):
    outputs, lses, _ = parts_of(torch.Generator().manual_seed(6), [0, 0], 1, 2)
    return list(target.merge(outputs, lses))


@probe("7.3")
def probe_pad(target):
    return target.pad_batch([7, 8], [9, 1], [21, 3], [10, 2], [[5, 2], [1]], 4)


@probe("7.3")
def probe_pad_shares(target):
    tables = [[1], [2]]
    got = target.pad_batch([1, 2], [3, 4], [5, 6], [4, 5], tables, 4)
    got[4][2][0] = 77
    got[4][0][0] = 99
    return [got[4], tables]


@probe("7.3")
def probe_pad_too_small(target):
    return target.pad_batch([1, 2], [0, 0], [1, 2], [1, 1], [[0], [0]], 1)


@probe("7.4")
def probe_law(target):
    generator = torch.Generator().manual_seed(8)
    p, q = random_law(generator, 5), random_law(generator, 5)
    kept = [target.accept(p, q, x, u / 16) for x in range(5) for u in range(16)]
    return [kept, target.residual(p, q)]


@probe("7.4")
def probe_equal(target):
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    return [
        target.residual(p, p),
        target.accept(p, torch.tensor([0.5, 0.5]).double(), 0, 0.5),
    ]
