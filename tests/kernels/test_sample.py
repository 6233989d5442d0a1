"""The sampling kernel: the same tokens as the sampler's, drawn with the same noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from execution import sampling_helpers as sampler  # its `draw` runs the `Sampler`
from kernel_helpers import Poison, random_tensor

from minifer.execution.noise import vocabulary_noise
from minifer.kernels.sample import (
    GPU_TILES,
    Tiles,
    sample,
    sample_cost,
    sample_reference,
)

FIELDS = ("temperature", "top_k", "top_p")


def drawn(logits, settings: Sequence[dict], seeds: Sequence[int], indices=None, tiles=None):
    """Tokens of the kernel; settings[i] are `SamplingParams` of row i, temperature 1 by default."""
    rows = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0} | s for s in settings]
    with Poison() as memory:
        temperature, k, p = (torch.tensor([row[name] for row in rows]) for name in FIELDS)
        columns = [temperature.float(), k.int(), p.double(), torch.tensor(seeds),
                   torch.tensor(indices or [0] * len(rows))]  # fmt: skip
        table = memory.place(torch.as_tensor(logits), gap=3)
        tokens = sample(table, *map(memory.place, columns), tiles=tiles)
    return tokens.tolist()


def expected(logits, settings, seeds, indices=None) -> list[int]:
    """Tokens of the sampler."""
    outputs = [[0] * index for index in indices or [0] * len(settings)]
    requests = [
        sampler.make_request(output=output, **{"temperature": 1.0, **s})
        for s, output in zip(settings, outputs, strict=True)
    ]
    return [s.token_id for s in sampler.draw(torch.as_tensor(logits), *requests, seeds=seeds)]


def random_settings(choose: random.Random, V: int) -> dict:
    return {
        "temperature": choose.choice([0.0, 0.3, 1.0, 1.7]),
        "top_k": choose.choice([0, 0, 1, 2, 7, V, V + 5]),
        "top_p": choose.choice([1.0, 1.0, 0.95, 0.5, 0.01, 1e-6]),
    }


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("V", [1, 31, 288])
def test_tokens_are_those_of_the_sampler(V, rounded):
    choose = random.Random(V)
    rows = 12
    logits = random_tensor(rows, V, seed=V, scale=2.0)
    logits = logits.round() if rounded else logits
    settings = [random_settings(choose, V) for _ in range(rows)]
    seeds = [choose.randrange(-(2**63), 2**63) for _ in range(rows)]
    indices = [choose.randrange(1000) for _ in range(rows)]
    tokens = drawn(logits, settings, seeds, indices)
    assert tokens == expected(logits, settings, seeds, indices)
    noise = torch.cat([vocabulary_noise([s], [i], V) for s, i in zip(seeds, indices, strict=True)])
    columns = [torch.tensor([row[name] for row in settings]) for name in FIELDS]
    assert tokens == sample_reference(logits, *columns, noise).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("V", [7, 100, 2049, 49152])
def test_many_tokens_are_those_of_the_sampler(V):
    choose = random.Random(V)
    rows = 200 if V < 10_000 else 40
    logits = random_tensor(rows, V, seed=V, scale=3.0)
    logits[1::2] = (logits[1::2] * 4).round() / 4
    settings = [random_settings(choose, V) for _ in range(rows)]
    seeds = [choose.randrange(2**63) for _ in range(rows)]
    assert drawn(logits, settings, seeds) == expected(logits, settings, seeds)


def test_rows_longer_than_a_tile():
    """Ties, ranks and noise go on from one tile to the next; the last is a rest."""
    V, seeds = 77, list(range(8))
    logits = random_tensor(8, V, seed=1).round()
    settings = [
        {}, {"top_k": 30}, {"top_p": 0.7}, {"top_k": 30, "top_p": 0.7},
        {"temperature": 0.0}, {"top_k": 76}, {"top_p": 0.999}, {"top_k": 1},
    ]  # fmt: skip
    tokens = drawn(logits, settings, seeds, tiles=Tiles(16, 1))
    assert tokens == expected(logits, settings, seeds) == drawn(logits, settings, seeds)


def test_the_tile_of_a_gpu():
    V = GPU_TILES.tokens + 1000
    logits, seeds = random_tensor(3, V, seed=1), [1, 2, 3]
    settings = [{}, {"top_k": 50, "top_p": 0.9}, {"temperature": 0.0}]
    tokens = drawn(logits, settings, seeds, tiles=GPU_TILES)
    assert tokens == expected(logits, settings, seeds)


def test_greedy_takes_the_lowest_id_among_equals_and_ignores_the_rest():
    logits = [[1.0, 3.0, 3.0, 2.0], [0.0, -0.0, 0.0, -1.0], [-math.inf, -5.0, -5.0, -math.inf]]
    greedy = {"temperature": 0.0, "top_k": 1, "top_p": 0.1}
    assert drawn(logits, [greedy] * 3, [1, 2, 3]) == [1, 0, 1]


def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_equals():
    """Six equal tokens and one above them: k = 3 leaves tokens 4, 0 and 1."""
    logits = [[1.0, 1, 1, 1, 2, 1, 1]] * 16
    tokens = drawn(logits, [{"top_k": 3}] * 16, range(16))
    assert set(tokens) == {0, 1, 4}


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.3}, {"top_k": 3, "top_p": 0.5}])
def test_a_negative_zero_is_no_less_than_zero(settings):
    """Zeros of either sign are equal, and so are scores that a division makes zero."""
    zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -9.0], [-1.4e-45, 0.0, -1.4e-45, 0.0, -9.0]])
    rows, seeds = [settings | {"temperature": 2.0}] * 8, list(range(8))
    logits = zeros.repeat_interleave(4, 0)
    tokens = drawn(logits, rows, seeds)
    assert tokens == expected(logits, rows, seeds)
    assert set(tokens) == {0, 1}


@pytest.mark.parametrize("k", [2**32 + 1, 2**63 - 1, -(2**63), 2**31, -(2**32) + 1])
def test_a_k_of_64_bits_is_off_and_not_cut_down(k):
    logits, seeds = random_tensor(8, 50, seed=1), torch.arange(8)
    ones = torch.ones(8)
    tokens = sample(logits, ones, torch.full((8,), k), ones, seeds, torch.zeros_like(seeds))
    assert tokens.tolist() == drawn(logits, [{}] * 8, range(8))


def one_draw_of_each(p):
    """A row of logits a token, and seeds with which the whole distribution p gives each token."""
    logits = sampler.log(p)
    tokens = expected(logits.repeat(64, 1), [{}] * 64, list(range(64)))
    return logits.repeat(len(p), 1), [tokens.index(token) for token in range(len(p))]


def test_top_p_keeps_the_token_that_crosses_and_equality_adds_none():
    """Of [.5, .3, .2], p = .8 keeps two, and one more than that all three."""
    logits, seeds = one_draw_of_each([0.5, 0.3, 0.2])
    for p, kept in ((0.8, {0, 1}), (0.81, {0, 1, 2}), (0.5, {0}), (0.51, {0, 1})):
        assert set(drawn(logits, [{"top_p": p}] * 3, seeds)) == kept


def test_a_tiny_p_keeps_one_of_many_equals():
    for p in (1e-9, 0.0):  # 0: what is left of 1e-60 in float32
        assert set(drawn([[2.0] * 33] * 4, [{"top_p": p}] * 4, range(4))) == {0}


def test_top_p_renormalises_over_what_top_k_left():
    """Of [.4, .3, .2, .1] k = 2 leaves 4/7 and 3/7: p = .57 keeps one, .58 both."""
    logits, seeds = one_draw_of_each([0.4, 0.3, 0.2, 0.1])
    for p, kept in ((0.57, {0}), (0.58, {0, 1})):
        assert set(drawn(logits, [{"top_k": 2, "top_p": p}] * 4, seeds)) == kept


def test_large_logits_and_small_temperatures_do_not_overflow():
    logits = torch.tensor([[3e38, 3e38, -3e38, 0.0], [1e4, 9999.0, 0.0, -1e4]]).repeat(2, 1)
    settings = [{"temperature": t, "top_p": 0.9} for t in (1.0, 0.01)] * 2
    assert drawn(logits, settings, range(4)) == expected(logits, settings, list(range(4)))


def test_masked_tokens_are_never_drawn_even_where_k_asks_for_more():
    logits = torch.full((15, 40), -math.inf)
    logits[:, [3, 17, 38]] = 0.5
    settings = [{}, {"top_k": 20}, {"top_p": 0.99}] * 5
    assert set(drawn(logits, settings, range(15))) == {3, 17, 38}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_drawn_from_fail_alone(temperature):
    rows = [[1.0, math.nan, 0.0], [math.inf, 0.0, 0.0], [-math.inf] * 3, [0.0, -math.inf, -90.0]]
    settings = [{"temperature": temperature}] * 4
    assert drawn(rows, settings, [7] * 4) == [-1, -1, -1, 0] == expected(rows, settings, [7] * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_floats(dtype):
    logits, seeds = random_tensor(6, 100, seed=2, dtype=dtype), list(range(6))
    settings = [{}, {"top_k": 5}, {"top_p": 0.8}] * 2
    assert drawn(logits, settings, seeds) == expected(logits.float(), settings, seeds)


@pytest.mark.slow
def test_frequencies_are_the_probabilities():
    p = [0.5, 0.25, 0.15, 0.1]
    tokens = drawn(sampler.log(p).repeat(1000, 1), [{}] * 1000, range(1000))
    counts = [tokens.count(i) for i in range(4)]
    assert sampler.chi_square(counts, [1000 * x for x in p]) < sampler.chi_square_limit(3)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_the_noise_is_that_of_the_counter(seed):
    logits = torch.zeros(1, 96)  # of equals the smallest noise wins
    noise = vocabulary_noise([seed], [5], 96)
    assert drawn(logits, [{}], [seed], [5]) == [int(noise.argmin())]


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (0, torch.zeros(6), r"logits must have shape \[any, any\], got \[6\]"),
        (0, torch.zeros(2, 0), "vocabulary of logits must be from 1"),
        (1, torch.ones(2, dtype=torch.float64), "temperature must be one of float32"),
        (2, torch.ones(2), "top_k must be one of int64, int32"),
        (3, torch.ones(3), r"top_p must have shape \[2\], got \[3\]"),
        (4, torch.zeros(2, dtype=torch.int32), "seeds must be one of int64"),
        (5, torch.zeros(2), "output_indices must be one of int64, int32"),
    ],
)
def test_what_does_not_fit_is_refused(place, value, complaint):
    integers = torch.zeros(2, dtype=torch.int64)
    arguments = [torch.zeros(2, 3), torch.ones(2), integers, torch.ones(2), integers, integers]
    arguments[place] = value
    with pytest.raises(ValueError, match=complaint):
        sample(*arguments)


def test_no_rows_and_the_cost():
    empty, integers = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert sample(torch.zeros(0, 3), empty, integers, empty, integers, integers).shape == (0,)
    plain, cut = sample_cost(2, 100), sample_cost(2, 100, top_k=True, top_p=True)
    assert (
        plain.activation_bytes == cut.activation_bytes == 816 and cut.flops > 60 * plain.flops / 4
    )
