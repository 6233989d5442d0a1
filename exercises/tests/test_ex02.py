"""Tests of exercises 02: the mask, the rotation, attention over a cache, and latencies.

The truth is the engine's slow twins, float64, and numbers computed by hand with 40 digits.
"""

from __future__ import annotations

import pytest
import torch

import minifer.execution.attention as engine
from minifer.config import RopeConfig
from minifer.course.grading import compare, points, probe, unchanged
from minifer.execution.backend import TorchBackend
from minifer.models.rope import RotaryEmbedding
from minifer.outputs import RequestMetrics

# (num_cached, num_new), the smallest first.
MASKS = [
    (0, 1),
    (1, 1),
    (0, 2),
    (1, 2),
    (2, 1),
    (5, 3),
    (3, 5),
    (7, 1),
    (0, 8),
    (4, 0),
    (0, 0),
]


def check_masks(target, shapes):
    for num_cached, num_new in shapes:
        tried = f"causal_mask({num_cached}, {num_new})"
        expected = engine.causal_mask(num_new, num_cached + num_new, None)
        compare(target.causal_mask(num_cached, num_new), expected, tried)


@points("2.1", 2)
def test_ex02_1_a_row_sees_its_own_position_and_all_before(target):
    check_masks(target, MASKS)


@points("2.1", 1)
def test_ex02_1_refuses_negative_counts(target):
    check_masks(target, MASKS[:2])  # and nothing else
    for counts in ((-1, 1), (1, -1)):
        with pytest.raises(ValueError):
            target.causal_mask(*counts)


@points("2.1", 1, hidden=True)
def test_ex02_1_chunks_of_any_size(target, rng):
    check_masks(
        target, [(rng.randrange(200), rng.randrange(1, 100)) for _ in range(20)]
    )


@probe("2.1")
def probe_masks(target):
    return [target.causal_mask(*shape) for shape in MASKS]


# From the formula, with 40 digits: (head, position, theta, half, interleaved).
VECTORS = [
    ([1.0, 0.0], 1, 1e4, [0.5403023058681398, 0.8414709848078965], None),
    (
        [1.0, 2.0, 3.0, 4.0],
        1,
        1e4,
        [-1.9841106485555495, 1.959900667496664, 2.4623779024123156, 4.019799668334994],
        [-1.1426396637476532, 1.922075596544176, 2.9598506679133294, 4.029799501669161],
    ),
    (
        [1.0, 2.0, 3.0, 4.0],
        7,
        1e4,
        [
            -1.2170575418130625,
            1.7153306111564282,
            2.9186933617487028,
            4.130089695688184,
        ],
        [
            -0.5600709430942735,
            2.1647911074053985,
            2.7128816114097076,
            4.200032543025717,
        ],
    ),
    (
        [1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0],
        1000,
        5e5,
        [
            *(-3.5720186263693098, -2.5490215617774834, -6.4465305376530253),
            *(-3.5690813443385036, 3.6387749219855175, -5.7881334709553372),
            *(4.0549037013358279, -8.2013205252260968),
        ],
        [
            *(2.2161381573547081, -0.29787861204940342, 2.6152270533211017),
            *(-4.2615240770852659, 6.7063141497832855, 4.0031675613714308),
            *(7.4153659727963799, -7.6165837151240975),
        ],
    ),
]

# The head [1, 2, 3, 4] at position 100,000, theta 10,000, likewise.
FAR_HALF = [-1.10660720135, -2.18276000955, -2.96233362434, 3.90327538623]
FAR_INTERLEAVED = [-1.07085840338, -1.9629728169, -1.62038093326, 4.73015492676]


def rotated(target, x, positions, theta, layout, tried):
    """What the answer returns, when it is a tensor of x's shape and dtype; x stays as it is."""
    with unchanged(tried, x=x, positions=positions):
        got = target.rope(x, positions, theta, layout)
    assert isinstance(got, torch.Tensor), (
        f"tried     {tried}\nexpected a tensor, got {got!r}"
    )
    compare(list(got.shape), list(x.shape), f"the shape of {tried}")
    compare(str(got.dtype), str(x.dtype), f"the dtype of {tried}")
    return got


def check_vectors(target, layout):
    for head, position, theta, half, interleaved in VECTORS:
        expected = half if layout == "half" or interleaved is None else interleaved
        x, positions = (
            torch.tensor([[head]], dtype=torch.float64),
            torch.tensor([position]),
        )
        tried = f"rope(x, positions=[{position}], theta={theta:g}, {layout!r}) with the head {head}"
        got = rotated(target, x, positions, theta, layout, tried)
        # An angle of 1,000 radians is known to 1e-13, the numbers are below 10.
        compare(got, torch.tensor([[expected]], dtype=torch.float64), tried, atol=1e-11)


@points("2.2", 1)
def test_ex02_2_half_split_as_computed_by_hand(target):
    check_vectors(target, "half")


@points("2.2", 1)
def test_ex02_2_interleaved_as_computed_by_hand(target):
    check_vectors(target, "interleaved")


def by_engine(x, positions, theta, layout):
    """The engine's rotation in float32; interleaved pairs are moved to halves and back."""
    C = x.shape[-1]
    cos, sin = RotaryEmbedding(RopeConfig(theta=theta), C)(positions)
    if layout == "half":
        return TorchBackend().rope(x, cos, sin)
    order = torch.arange(C).view(-1, 2).T.flatten()  # 0 2 4 … 1 3 5 …
    turned = TorchBackend().rope(x[..., order], cos, sin)
    return turned[..., order.argsort()]


@points("2.2", 1)
@pytest.mark.parametrize(
    "shape", [(0, 1, 2), (1, 1, 4), (3, 2, 6), (5, 3, 16), (8, 1, 64)]
)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_ex02_2_many_tokens_heads_and_positions(target, generator, shape, layout):
    x = torch.randn(shape, generator=generator)
    starts = torch.randint(0, 200, (shape[0],), generator=generator)
    for positions in (
        torch.arange(shape[0]) + 17,
        starts,
    ):  # a later chunk; gaps and repeats
        tried = f"rope(x of shape {list(shape)}, positions={positions.tolist()}, 1e4, {layout!r})"
        got = rotated(target, x, positions, 1e4, layout, tried)
        # The engine's float32 angles, up to 217 radians, are off by up to 2e-5; x is below 6.
        compare(got, by_engine(x, positions, 1e4, layout), tried, atol=5e-4)


@points("2.2", 1)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_ex02_2_far_positions_are_exact(target, generator, layout):
    head, far, near = (
        torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]),
        torch.tensor([100_000]),
        torch.tensor([0]),
    )
    by_hand = FAR_HALF if layout == "half" else FAR_INTERLEAVED
    tried = f"rope([1, 2, 3, 4] in float32, positions=[100000], 1e4, {layout!r})"
    got = rotated(target, head, far, 1e4, layout, tried)
    compare(
        got, torch.tensor([[by_hand]]), tried, atol=1e-6
    )  # rounding of numbers below 5
    query, key = torch.randn(2, 1, 1, 32, generator=generator)

    def turned(x, positions):
        tried = f"rope(x in {x.dtype}, positions={positions.tolist()}, 1e4, {layout!r})"
        return rotated(target, x, positions, 1e4, layout, tried).double()

    score, same = (
        (turned(query, at + 3) * turned(key, at)).sum() for at in (far, near)
    )
    # Rounding to float32, once a number: 32 products of numbers below 5, 6e-8 each.
    tried = f"the score of a query at 100003 and a key at 100000, float32, {layout!r}"
    compare(float(score), float(same), f"{tried}; expected: that at 3 and 0", atol=5e-5)
    coarse = query.bfloat16()
    tried = f"rope(x in bfloat16, positions=[100000], 1e4, {layout!r})"
    fine = turned(coarse.double(), far).bfloat16().double()
    compare(
        turned(coarse, far),
        fine,
        f"{tried}; expected: float64, rounded once at the end",
    )


@points("2.2", 1)
def test_ex02_2_refuses_odd_heads_wrong_layouts_and_lengths(target):
    for layout in ("half", "interleaved"):  # nothing that is right
        check_vectors(target, layout)
    x = torch.ones(2, 1, 4)
    for bad in (
        (torch.ones(2, 1, 3), torch.arange(2), 1e4, "half"),
        (x, torch.arange(2), 1e4, "halves"),
        (x, torch.arange(3), 1e4, "half"),
        (x, torch.arange(1), 1e4, "interleaved"),
    ):
        with pytest.raises(ValueError):
            target.rope(*bad)


@probe("2.2")
def probe_rope(target):
    x = torch.arange(24.0).reshape(3, 1, 8)
    at = torch.tensor([3, 4, 100_000])
    return [target.rope(x, at, 1e4, layout) for layout in ("half", "interleaved")]


def tokens(generator, T, H, K, C, size=1.0):
    """Random query [T, H, C], key and value [T, K, C] in float64."""
    return tuple(
        size * torch.randn(T, heads, C, generator=generator, dtype=torch.float64)
        for heads in (H, K, K)
    )


def attended(target, query, key, value, past, tried):
    """What the answer returns, when it is of the form (tensor, (tensor, tensor))."""
    held = () if past is None else past
    with unchanged(tried, query=query, key=key, value=value, past=held):
        got = target.cached_attention(query, key, value, past)
    form = f"tried     {tried}\nexpected (out, (keys, values)), got "
    assert isinstance(got, (tuple, list)) and len(got) == 2, (
        f"{form}{type(got).__name__}"
    )
    out, cache = got
    assert isinstance(cache, (tuple, list)) and len(cache) == 2, (
        f"{form}(out, {cache!r})"
    )
    for tensor in (out, *cache):
        assert isinstance(tensor, torch.Tensor), (
            f"{form}a {type(tensor).__name__} in it"
        )
        compare(
            str(tensor.dtype), str(query.dtype), f"the dtype of what {tried} returns"
        )
    compare(list(out.shape), list(query.shape), f"the shape of out: {tried}")
    return out, tuple(cache)


def attend_in_chunks(target, query, key, value, chunks):
    """What the answer says of all tokens when they come in these chunks, and the last cache."""
    past, outs, start = None, [], 0
    for size in chunks:
        q, k, v = (x[start : start + size] for x in (query, key, value))
        before = 0 if past is None else past[0].shape[0]
        tried = (
            f"cached_attention(query {list(q.shape)}, key and value {list(k.shape)}, "
            f"past of {before} tokens)"
        )
        out, past = attended(target, q, k, v, past, tried)
        compare(past[0], key[: start + size], f"the keys returned by {tried}")
        compare(past[1], value[: start + size], f"the values returned by {tried}")
        outs.append(out)
        start += size
    return torch.cat(outs)


def check_attention(target, generator, T, H, K, C, chunks, size=1.0):
    query, key, value = tokens(generator, T, H, K, C, size)
    got = attend_in_chunks(target, query, key, value, chunks)
    expected = engine.dense_attention(query, key, value, C**-0.5)
    tried = f"cached_attention, {T} tokens in chunks of {chunks}, H={H}, K={K}, C={C}"
    # float64: sums of at most 80 products; scores of 10,000 lose four digits more.
    compare(got, expected, tried, atol=1e-9 * size)


@points("2.3", 1)
@pytest.mark.parametrize(
    ("T", "H", "K", "C"),
    [(1, 1, 1, 1), (2, 1, 1, 2), (3, 2, 2, 4), (5, 4, 2, 8), (4, 6, 1, 3)],
)
def test_ex02_3_prefill_without_a_past(target, generator, T, H, K, C):
    check_attention(target, generator, T, H, K, C, [T])


@points("2.3", 2)
@pytest.mark.parametrize(
    "chunks", [[1, 1], [2, 2], [1, 2], [5, 3], [3, 5], [1, 7], [4, 1, 3], [8, 8, 8]]
)
@pytest.mark.parametrize(("H", "K"), [(1, 1), (4, 2), (4, 1)])
def test_ex02_3_however_the_tokens_are_cut(target, generator, chunks, H, K):
    check_attention(target, generator, sum(chunks), H, K, 4, chunks)


@points("2.3", 1)
def test_ex02_3_decode_token_by_token(target, generator):
    check_attention(target, generator, 4, 1, 1, 2, [1] * 4)
    check_attention(target, generator, 12, 6, 3, 8, [5] + [1] * 7)
    query, key, value = tokens(generator, 2, 2, 1, 4)
    empty = (key[:0], value[:0])
    tried = "cached_attention with a past of 0 tokens"
    out, _ = attended(target, query, key, value, empty, tried)
    expected = engine.dense_attention(query, key, value, 0.5)
    compare(out, expected, tried, atol=1e-9)


@points("2.3", 1)
def test_ex02_3_large_scores_stay_finite(target, generator):
    # Numbers of size 70 make scores of several thousand: exp of one overflows.
    check_attention(target, generator, 6, 2, 1, 4, [4, 2], size=70.0)
    query, key, value = tokens(generator, 3, 2, 2, 4)
    single = (x.float() for x in (query, key, value))
    attended(target, *single, None, "cached_attention in float32")


@points("2.3", 0.5)
def test_ex02_3_refuses_heads_that_do_not_divide(target):
    query, key, value = (
        torch.ones(1, 4, 2),
        torch.ones(1, 2, 2),
        torch.full((1, 2, 2), 3.0),
    )
    tried = "cached_attention with 4 query heads, 2 key heads and one token"
    out, _ = attended(target, query, key, value, None, tried)
    compare(out, torch.full((1, 4, 2), 3.0), tried)
    with pytest.raises(ValueError):
        target.cached_attention(
            torch.ones(1, 3, 2), torch.ones(1, 2, 2), torch.ones(1, 2, 2), None
        )


@points("2.3", 0.5, hidden=True)
def test_ex02_3_longer_texts_and_more_heads(target, generator, rng):
    for _ in range(3):
        chunks = [rng.randrange(1, 30) for _ in range(4)]
        check_attention(target, generator, sum(chunks), 8, 4, 16, chunks)


def attend_twice(target, sizes, size=1.0):
    generator = torch.Generator().manual_seed(5)
    past, seen = None, []
    for count in sizes:
        out, past = target.cached_attention(
            *tokens(generator, count, 4, 2, 4, size), past
        )
        seen += [out, *past]
    return seen


@probe("2.3")
def probe_equal_chunks(target):
    return attend_twice(target, (2, 2))


@probe("2.3")
def probe_decode(target):
    return attend_twice(target, (3, 1))


@probe("2.3")
def probe_large_scores(target):
    return attend_twice(target, (2, 2), size=70.0)


def by_metrics(arrival, times):
    """The engine's own numbers; the gaps and the whole by the definition of the table."""
    metrics = RequestMetrics(
        arrival_time=arrival,
        first_token_time=times[0] if times else None,
        last_token_time=times[-1] if times else None,
        num_output_tokens=len(times),
    )
    return metrics.ttft, metrics.tpot


@points("2.4", 1)
def test_ex02_4_latencies_of_one_request(target, rng):
    cases = [
        (0.0, []),
        (1.0, [1.5]),
        (1.0, [1.5, 1.75]),
        (2.0, [2.5, 2.5, 2.5, 4.0]),
        (3.0, [3.0]),
    ]
    for count in (3, 8, 40):
        arrival = rng.uniform(0, 9)
        cases.append(
            (arrival, sorted(arrival + rng.uniform(0, 5) for _ in range(count)))
        )
    for arrival, times in cases:
        tried = f"latency({arrival}, {times})"
        with unchanged(tried, token_times=times):
            got = target.latency(arrival, times)
        ttft, tpot = by_metrics(arrival, times)
        assert isinstance(got, dict), (
            f"tried     {tried}\nexpected a dictionary, got {got!r}"
        )
        keys = sorted(map(str, got))
        compare(keys, ["e2e", "itl", "tpot", "ttft"], f"the keys of {tried}")
        itl = got["itl"]
        assert isinstance(itl, (list, tuple)), (
            f"{tried}['itl'] must be a list, got {itl!r}"
        )
        compare(got["ttft"], ttft, f"{tried}['ttft']", atol=1e-9)
        compare(got["tpot"], tpot, f"{tried}['tpot']", atol=1e-9)
        compare(len(itl), max(0, len(times) - 1), f"the length of {tried}['itl']")
        if not times:
            compare(got["e2e"], None, f"{tried}['e2e']")
            continue
        compare(got["e2e"], times[-1] - arrival, f"{tried}['e2e']", atol=1e-9)
        gaps = torch.tensor(times, dtype=torch.float64).diff().tolist()
        compare(itl, gaps, f"{tried}['itl']", atol=1e-9)


@points("2.4", 1)
def test_ex02_4_throughput_of_a_run(target, rng):
    cases = [
        ([(0.0, [2.0])], 0.5),
        ([(1.0, [1.5, 1.6, 2.0]), (0.0, [1.0])], 2.0),
        ([(5.0, [6.0, 7.0]), (4.0, []), (6.0, [8.0, 8.0])], 1.0),  # the run begins at 4
        ([(0.0, [1.0, 8.0]), (3.0, [4.0, 4.0])], 0.5),  # the last request ends early
    ]
    start = rng.uniform(0, 9)
    cases.append(([(start, [start + 0.5, start + 2.0])], 1.0))
    for requests, expected in cases:
        tried = f"throughput({requests})"
        with unchanged(tried, requests=requests):
            got = target.throughput(requests)
        compare(got, expected, tried, rtol=1e-9)


@points("2.4", 1)
def test_ex02_4_edges_and_refusals(target):
    compare(target.throughput([]), 0.0, "throughput([])")
    compare(
        target.throughput([(1.0, []), (2.0, [])]),
        0.0,
        "throughput([(1.0, []), (2.0, [])])",
    )
    compare(target.throughput([(1.0, [1.0])]), None, "throughput([(1.0, [1.0])])")
    for arrival, times in ((1.0, [0.5]), (0.0, [1.0, 0.5]), (0.0, [1.0, 2.0, 1.5])):
        with pytest.raises(ValueError):
            target.latency(arrival, times)


@probe("2.4")
def probe_latency(target):
    runs = [(1.0, [1.5, 1.625, 2.0]), (0.5, [1.0]), (0.25, [])]
    return [target.latency(*one) for one in runs] + [target.throughput(runs)]


@probe("2.4")
def probe_time_going_back(target):
    return target.latency(0.0, [1.0, 0.5])
