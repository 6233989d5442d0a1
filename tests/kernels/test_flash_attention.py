"""Prefill attention against float64, on memory that holds NaN wherever nobody wrote."""

from __future__ import annotations

import pytest
import torch
from attention_helpers import assert_attended, forget, requests
from kernel_helpers import Poison

from minifer.execution.attention import dense_attention
from minifer.kernels.flash_attention import (
    Tiles,
    flash_attention,
    flash_attention_cost,
    flash_attention_reference,
    flash_tiles,
    interpreter_tiles,
)
from minifer.kernels.mega.shapes import MODELS
from minifer.perf.costs import attended_pairs, step_cost

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCH = [(3, 3), (1, 9), (5, 8), (17, 17), (4, 33)]  # whole prompts, a decode, cached prefixes


def check(batch, *, window=None, tiles=None, **options):
    with Poison() as memory:
        arguments = requests(memory, batch, **options)
        C = arguments.query.shape[-1]
        most = max(queries for queries, _ in batch)
        out = flash_attention(*arguments, C**-0.5, window, max_query=most, tiles=tiles)
    truth = flash_attention_reference(*arguments.fine(), C**-0.5, window)
    assert out.dtype == arguments.query.dtype
    assert_attended(out, truth, arguments.query, torch.float32)
    return out


def test_the_twin_is_the_definition():
    """One query, head and key at a time, on contiguous keys, is the slow twin's slow twin."""
    with Poison() as memory:
        query, keys, values, tables, *rest = requests(memory, [(4, 9)], P=3, C=6).fine()
    ours = flash_attention_reference(query, keys, values, tables, *rest, 0.4, 3)
    k, v = (cache[tables[0]].flatten(0, 1)[:9] for cache in (keys, values))
    torch.testing.assert_close(ours, dense_attention(query, k, v, 0.4, 3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (8, 1)], ids=str)
def test_groups_of_1_3_and_8_heads(heads, kv_heads, dtype):
    check(BATCH, heads=heads, kv_heads=kv_heads, dtype=dtype)


@pytest.mark.parametrize("tiles", [None, Tiles(16, 16, 1, 1)], ids=["one tile", "many"])
@pytest.mark.parametrize("window", [1, 3, 21])
def test_what_has_left_the_window_is_not_read(window, tiles):
    """Another request may have its blocks by now."""
    with Poison() as memory:
        arguments = requests(memory, [(3, 40), (1, 30), (20, 41)])
    truth = flash_attention_reference(*arguments.fine(), 0.3, window)
    out = flash_attention(*forget(arguments, window), 0.3, window, max_query=20, tiles=tiles)
    assert_attended(out, truth, arguments.query, torch.float32)


@pytest.mark.parametrize("P", [1, 3, 16])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 50])
def test_windows_and_blocks_of_any_size(P, window):
    check(BATCH, P=P, window=window)


def test_lengths_around_multiples_of_the_block_and_of_the_tile():
    tiles = Tiles(rows=8, keys=8, num_stages=1, num_warps=1)
    batch = [(length, length) for length in (7, 8, 9, 15, 16, 17)]
    check(batch, P=8, tiles=tiles)
    check([(3, length) for _, length in batch], P=8, tiles=tiles, window=9)


@pytest.mark.parametrize("C", [2, 24, 64, 80])
def test_head_dims_of_any_size(C):
    check([(5, 9), (3, 3)], C=C)


@pytest.mark.parametrize(("C", "group"), [(64, 4), (64, 3), (128, 4), (80, 1), (16, 2)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_tiles_of_a_gpu(C, group, itemsize):
    """Two tiles of keys and a rest, one of queries and a rest."""
    tiles = flash_tiles(C, group, itemsize)
    queries = tiles.rows // group + 1
    context = max(queries, 2 * tiles.keys) + 3
    check([(queries, context)], heads=group, kv_heads=1, C=C, P=16, tiles=tiles)


def test_large_scores_do_not_overflow():
    """Scores of some thousands: exp of them is infinite, exp of their differences is not."""
    out = check(BATCH, scale=60.0, dtype=torch.float32)
    assert out.abs().max() > 60


def test_equal_scores_give_the_mean():
    with Poison() as memory:
        arguments = requests(memory, [(3, 3)], heads=1, kv_heads=1, P=1)
    zero = arguments._replace(query=torch.zeros(3, 1, 8))
    out = flash_attention(*zero, 1.0, max_query=3)
    values = arguments.value_cache[arguments.block_tables[0], 0, 0]
    means = values.cumsum(0) / torch.arange(1, 4)[:, None]
    torch.testing.assert_close(out[:, 0], means)


def test_rows_beyond_max_query_are_not_written_and_int32_tables_do():
    with Poison() as memory:
        arguments = requests(memory, [(3, 3), (2, 5)])
        integers = [x.int() for x in arguments[3:]]
        out = flash_attention(*arguments[:3], *integers, 0.5, max_query=3)
    truth = flash_attention_reference(*arguments.fine(), 0.5)
    assert_attended(out, truth, arguments.query, torch.float32)
    assert flash_attention(*arguments, 0.5, max_query=0).shape == out.shape


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"query": torch.ones(5, 3, 8)}, "heads of query must be a multiple of the cache's 2, got"),
        ({"query": torch.ones(5, 4, 6)}, r"key_cache must have shape \[any, any, any, 6\]"),
        ({"value_cache": torch.ones(3, 4, 2, 8)}, "value_cache must have shape"),
        ({"block_tables": torch.zeros(3, 2).long()}, r"block_tables must have shape \[2, any\]"),
        ({"seq_lens": torch.ones(2)}, "seq_lens must be one of int64, int32"),
        ({"query_start": torch.zeros(2).long()}, r"query_start must have shape \[3\], got \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes, complaint):
    with Poison() as memory:
        arguments = requests(memory, [(3, 3), (2, 5)])._replace(**changes)
    with pytest.raises(ValueError, match=complaint):
        flash_attention(*arguments, 1.0, max_query=3)


def test_a_window_that_sees_nothing_and_a_tile_below_the_group_are_refused():
    with Poison() as memory:
        arguments = requests(memory, [(3, 3)], heads=6)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        flash_attention(*arguments, 1.0, 0, max_query=3)
    with pytest.raises(ValueError, match="rows of a tile must be at least 3, got 2"):
        flash_attention(*arguments, 1.0, max_query=3, tiles=Tiles(2, 4, 1, 1))
    assert interpreter_tiles(1, 3).rows >= 3


def test_the_cost_is_that_of_the_models_attention_with_keys_and_values_in_one_pass():
    config, batch = MODELS["llama-1b"], [(100, 100), (7, 50)]
    whole = step_cost(config, batch)
    parts = [whole[name] for name in ("attention_scores", "softmax", "attention_values")]
    one = flash_attention_cost(batch, config.num_heads, config.num_kv_heads, config.head_dim)
    assert config.num_layers * one.flops == sum(part.flops for part in parts)
    assert config.num_layers * one.bytes == sum(part.bytes for part in parts)
    narrow = flash_attention_cost([(7, 50)], 1, 1, 2, window=5)
    assert narrow.flops == attended_pairs(7, 50, 5) * 13
    assert narrow.kv_bytes == 2 * 11 * 2 * 2
