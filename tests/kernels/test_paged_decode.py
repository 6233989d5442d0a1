"""Decode attention in splits against float64, on memory that holds NaN wherever nobody wrote."""

from __future__ import annotations

import pytest
import torch
from attention_helpers import assert_attended, forget, requests
from kernel_helpers import Poison

from minifer.kernels.paged_decode import (
    Tiles,
    decode_partials,
    decode_tiles,
    num_splits,
    paged_decode,
    paged_decode_cost,
    paged_decode_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 2, 15, 16, 17, 33]
SMALL = Tiles(rows=16, keys=8, num_stages=1, num_warps=1)


def decodes(memory, lengths, **options):
    """Arguments of `paged_decode` for requests of these lengths."""
    q, k, v, tables, _, lens = requests(memory, [(1, length) for length in lengths], **options)
    return [q, k, v, tables, lens]


def check(lengths=LENGTHS, *, splits=1, window=None, tiles=None, partials=None, **options):
    with Poison() as memory:
        arguments = decodes(memory, lengths, **options)
        C = arguments[0].shape[-1]
        out = paged_decode(
            *arguments, C**-0.5, window, num_splits=splits, tiles=tiles, partials=partials
        )
    fine = [a.double() if a.is_floating_point() else a for a in arguments]
    truth = paged_decode_reference(*fine, C**-0.5, window)
    assert_attended(out, truth, arguments[0], torch.float32)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (8, 1)], ids=str)
def test_groups_of_1_3_and_8_heads(heads, kv_heads, dtype):
    check(heads=heads, kv_heads=kv_heads, dtype=dtype)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [1, 3, 21])
def test_what_has_left_the_window_is_not_read(window, splits):
    """Another request may have its blocks by now."""
    with Poison() as memory:
        made = requests(memory, [(1, 40), (1, 30), (1, 5)])
    q, k, v, tables, _, lens = made.fine()
    truth = paged_decode_reference(q, k, v, tables, lens, 0.3, window)
    q, k, v, tables, _, lens = forget(made, window)
    out = paged_decode(q, k, v, tables, lens, 0.3, window, num_splits=splits, tiles=SMALL)
    assert_attended(out, truth, q, torch.float32)


@pytest.mark.parametrize("P", [1, 3, 16])
@pytest.mark.parametrize("window", [None, 1, 16, 50])
def test_windows_and_blocks_of_any_size_in_one_split_and_in_three(P, window):
    for splits in (1, 3):
        check([1, 17, 33], P=P, window=window, splits=splits)


@pytest.mark.parametrize("splits", [2, 5, 8])
def test_splits_without_tokens_weigh_nothing(splits):
    """Tiles of 8: a context of 9 fills two splits, the others have none."""
    partials = decode_partials(3, 4, splits, 8)
    for part in partials:
        part.fill_(torch.nan)
    check([1, 9, 33], splits=splits, tiles=SMALL, partials=partials)
    out, lse = partials
    assert (lse[0, :, 1:] == -torch.inf).all() and torch.isfinite(lse[0, :, 0]).all()
    assert (out[0, :, 1:] == 0).all() and torch.isfinite(out).all()


def test_the_log_sum_exp_of_the_parts_is_that_of_the_scores():
    partials = decode_partials(1, 2, 3, 8)
    with Poison() as memory:
        q, k, v, tables, lens = decodes(memory, [21], heads=2, kv_heads=1)
        paged_decode(q, k, v, tables, lens, 0.3, num_splits=3, partials=partials, tiles=SMALL)
    keys = k[tables[0]].flatten(0, 1)[:21, 0].double()
    scores = q[0].double() @ keys.T * 0.3
    expected = torch.stack([part.logsumexp(-1) for part in scores.split(8, dim=1)], dim=1)
    logarithm = partials[1][0].double() * torch.log(torch.tensor(2.0).double())
    torch.testing.assert_close(logarithm, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_request_without_context_gets_zeros(splits):
    """What pads a batch to the size of a captured graph."""
    with Poison() as memory:
        arguments = decodes(memory, [5, 3, 7])
        arguments[4][1] = 0
        out = paged_decode(*arguments, 1.0, num_splits=splits)
        memory._buffers.pop()  # the length was changed here
    assert (out[1] == 0).all() and torch.isfinite(out).all()


@pytest.mark.parametrize("C", [2, 24, 80])
def test_head_dims_of_any_size(C):
    check([5, 9], C=C, splits=2, tiles=SMALL)


@pytest.mark.parametrize(("C", "group"), [(64, 4), (64, 3), (128, 8), (80, 1)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_tiles_of_a_gpu(C, group, itemsize):
    tiles = decode_tiles(C, group, itemsize)
    lengths = [2 * tiles.keys + 3]
    check(lengths, heads=group, kv_heads=1, C=C, P=16, tiles=tiles)
    check(lengths, heads=group, kv_heads=1, C=C, P=16, tiles=tiles, splits=2)


def test_large_scores_do_not_overflow():
    assert check(scale=60.0, splits=3, tiles=SMALL).abs().max() > 60


def test_lengths_are_read_from_the_tensor_at_every_launch():
    """A captured graph replays with other numbers in the same tensors."""
    with Poison() as memory:
        q, k, v, tables, lens = decodes(memory, [33, 33])
        memory._buffers.pop()
        for length in (33, 8, 1):
            lens.fill_(length)
            out = paged_decode(q, k, v, tables, lens, 0.4, num_splits=4, tiles=SMALL)
            truth = paged_decode_reference(q.double(), k.double(), v.double(), tables, lens, 0.4)
            assert_attended(out, truth, q, torch.float32)


def test_splits_by_hand():
    """An H100 has 132 SMs."""
    assert num_splits(16, 8, 8192, 132) == 1, "128 programs are more than 80 % of 132"
    assert num_splits(13, 8, 8192, 132) == 5, (
        "104, 208, … 416 fill 79 % of their waves, 520 fill 98 %"
    )
    assert num_splits(1, 4, 64 * 33, 132) == 29, "116 of 132, 85 % of the best, which is 132"
    assert num_splits(1, 8, 512, 132) == 7, (
        "at most 8, of 64 tokens each; 56 programs are 85 % of 64"
    )
    assert num_splits(1, 8, 64, 132) == 1 == num_splits(1, 1, 100_000, 1)
    assert num_splits(1, 1, 10**6, 132) <= 64


@pytest.mark.parametrize("sms", [1, 78, 132, 148])
def test_splits_are_the_fewest_whose_waves_are_nearly_as_full_as_any(sms):
    for programs in range(1, 2 * sms, 7):
        chosen = num_splits(programs, 1, 64 * 40, sms)
        fill = {}
        for splits in range(1, min(40, sms) + 1):
            work = programs * splits
            fill[splits] = work / (-(-work // sms) * sms)
        if 10 * programs >= 8 * sms:
            assert chosen == 1
        else:
            good = [s for s in fill if fill[s] >= 0.85 * max(fill.values()) - 1e-12]
            assert chosen == good[0]


def test_what_does_not_fit_is_refused():
    with Poison() as memory:
        arguments = decodes(memory, [5, 3])
        for splits in (0, 65):
            with pytest.raises(ValueError, match=f"num_splits must be from 1 to 64, got {splits}"):
                paged_decode(*arguments, 1.0, num_splits=splits)
        with pytest.raises(ValueError, match=r"partials\[0\] must have shape \[2, 4, 3, 8\]"):
            paged_decode(*arguments, 1.0, num_splits=3, partials=decode_partials(2, 4, 2, 8))
        arguments[0] = arguments[0][:1]
        with pytest.raises(ValueError, match=r"seq_lens must have shape \[1\], got \[2\]"):
            paged_decode(*arguments, 1.0)
    empty = [arguments[0][:0], *arguments[1:3], arguments[3][:0], arguments[4][:0]]
    assert paged_decode(*empty, 1.0).shape == (0, 4, 8)


def test_the_cost_of_splitting_is_its_parts():
    whole = paged_decode_cost([100, 50], 4, 2, 8)
    split = paged_decode_cost([100, 50], 4, 2, 8, num_splits=3)
    assert split.kv_bytes == whole.kv_bytes == 2 * 150 * 2 * 8 * 2
    assert split.activation_bytes - whole.activation_bytes == 2 * 4 * 2 * 4 * 3 * 9
