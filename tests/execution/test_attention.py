"""Paged attention against its dense slow twin in float64, on memory that holds NaN."""

from __future__ import annotations

import pytest
import torch
from scattered import C, scattered

from minifer.execution.attention import causal_mask, dense_attention, paged_attention
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage, write_kv


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (8, 1)])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize(
    ("lengths", "new"),
    [([1, 3, 4, 5, 17, 12, 9], [1, 3, 1, 2, 17, 1, 5]), ([7, 7], [1, 1]), ([6], [1])],
    ids=["mixed", "decode of one length", "decode alone"],
)
def test_paged_equals_dense_with_nan_in_every_unwritten_slot(
    lengths, new, block_size, heads, kv_heads, window
):
    query, kv, batch, keys, values = scattered(
        lengths, new, block_size=block_size, heads=heads, kv_heads=kv_heads
    )
    out = paged_attention(query, kv.keys[0], kv.values[0], batch, C**-0.5, window)
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(batch.query_start_host[b], batch.query_start_host[b + 1])
        truth = dense_attention(query[rows], k, v, C**-0.5, window)
        torch.testing.assert_close(out[rows], truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_short_floats_stay_near_float64(dtype, tolerance):
    query, kv, batch, keys, values = scattered(
        [9, 6], [1, 6], block_size=4, heads=4, kv_heads=2, dtype=dtype
    )
    out = paged_attention(query, kv.keys[0], kv.values[0], batch, C**-0.5)
    assert out.dtype == dtype
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(batch.query_start_host[b], batch.query_start_host[b + 1])
        k, v = k.to(dtype).double(), v.to(dtype).double()
        truth = dense_attention(query[rows].double(), k, v, C**-0.5)
        torch.testing.assert_close(out[rows].double(), truth, rtol=0, atol=tolerance)


def test_dense_attention_is_the_definition():
    """Softmax by hand: two keys with scores ln 3 and 0 weigh 3/4 and 1/4."""
    query = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    keys = torch.tensor([[[torch.log(torch.tensor(3.0)).item(), 0.0]], [[0.0, 5.0]]]).double()
    values = torch.tensor([[[4.0, 0.0]], [[0.0, 8.0]]], dtype=torch.float64)
    out = dense_attention(query, keys, values, 1.0)
    torch.testing.assert_close(out[0, 0], torch.tensor([3.0, 2.0], dtype=torch.float64))


def test_case_131_window_three_sees_three():
    mask = causal_mask(5, 5, 3).int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert causal_mask(2, 5, None).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_case_023_a_padding_slot_writes_nothing():
    cache = torch.zeros(2, 2, 1, 1)
    write_kv(cache, torch.tensor([2, -1]), torch.tensor([[[5.0]], [[9.0]]]))
    assert cache.flatten().tolist() == [0, 0, 5, 0], "-1 must not name the last slot"


def test_copies_read_before_they_write():
    kv = KVStorage(2, 3, 1, 1, 1, torch.float32)
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1))
    kv.copy_blocks([(0, 1), (1, 2)])
    for tensor in (*kv.keys, *kv.values):
        assert tensor.flatten().tolist() == [1, 1, 2]
    kv.copy_blocks([])


def test_a_batch_whose_lengths_disagree_is_refused():
    with pytest.raises(ValueError, match=r"query_start\[-1\]=2 entries, got 1, 2 and 2"):
        ForwardBatch.build([1], [0, 1], [0, 1], [0, 2], [2], [[0]], [1], 4)
