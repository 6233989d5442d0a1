"""RoPE and the append to the paged cache against float64."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import Poison, assert_rounded, random_tensor

from minifer.execution.backend import TorchBackend
from minifer.execution.kv_storage import write_kv
from minifer.kernels.mega.shapes import MODELS
from minifer.kernels.rope_append import (
    rope_append,
    rope_append_cost,
    rope_append_reference,
    rope_tiles,
)
from minifer.perf.costs import decode_cost

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(T, H, K, C, dtype=torch.float32, *, blocks=5, P=9, gap=0, memory=None):
    """Arguments of `rope_append`: q, k, v as views of one product, every third slot negative."""
    memory = memory or Poison()
    product = memory.place(random_tensor(T, (H + 2 * K) * C, seed=1, dtype=dtype), gap=gap)
    q, k, v = product.unflatten(-1, (-1, C)).split((H, K, K), dim=1)
    angles = torch.arange(T)[:, None] * 0.7 ** torch.arange(C // 2)
    slots = torch.randperm(blocks * P, generator=torch.Generator().manual_seed(2))[:T]
    slots[::3] = -1
    caches = [
        memory.place(torch.full((blocks, P, K, C), torch.nan, dtype=dtype), writable=True)
        for _ in "kv"
    ]
    return [q, k, v, memory.place(angles.cos()), memory.place(angles.sin()), *caches,
            memory.place(slots)]  # fmt: skip


def check(arguments, **options):
    fine = [a.double() if a.is_floating_point() else a for a in arguments]
    out = rope_append(*arguments, **options)
    assert_rounded(out, rope_append_reference(*fine), terms=4.0)
    for cache, truth in ((arguments[5], fine[5]), (arguments[6], fine[6])):
        written = ~truth.isnan()
        assert torch.equal(cache.isnan(), truth.isnan()), "written where no slot is, or not at all"
        assert_rounded(cache[written], truth[written], terms=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "H", "K", "C"), [(1, 1, 1, 2), (31, 3, 1, 6), (33, 8, 8, 16), (5, 9, 3, 64)]
)
def test_views_of_one_product_in_poisoned_memory(T, H, K, C, dtype):
    with Poison() as memory:
        check(operands(T, H, K, C, dtype, memory=memory, gap=3))


@pytest.mark.parametrize("P", [1, 8, 16])
def test_blocks_of_any_size(P):
    with Poison() as memory:
        check(operands(7, 4, 2, 8, blocks=17, P=P, memory=memory))


@pytest.mark.parametrize("C", [64, 80, 128])
def test_the_tiles_of_a_gpu(C):
    check(operands(13, 9, 3, C), tiles=rope_tiles(C))


def test_a_slot_below_zero_names_no_block():
    arguments = operands(3, 2, 1, 4)
    arguments[7].fill_(-1)
    rope_append(*arguments)
    assert arguments[5].isnan().all() and arguments[6].isnan().all()


def test_is_what_the_torch_back_end_does():
    q, k, v, cos, sin, keys, values, slots = operands(11, 4, 2, 16, torch.bfloat16)
    torch_keys, torch_values, backend = keys.clone(), values.clone(), TorchBackend()
    write_kv(torch_keys, slots, backend.rope(k, cos, sin))
    write_kv(torch_values, slots, v)
    out = rope_append(q, k, v, cos, sin, keys, values, slots.int())
    assert torch.equal(out, backend.rope(q, cos, sin))
    assert torch.equal(keys.nan_to_num(), torch_keys.nan_to_num())
    assert torch.equal(values.nan_to_num(), torch_values.nan_to_num())


def test_a_cache_of_another_dtype():
    arguments = operands(5, 2, 1, 8)
    arguments[5], arguments[6] = arguments[5].bfloat16(), arguments[6].half()
    check(arguments)


def test_no_tokens():
    assert rope_append(*operands(0, 2, 1, 4)).shape == (0, 2, 4)


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (1, torch.ones(3, 1, 6), r"key must have shape \[3, any, 4\]"),
        (2, torch.ones(3, 2, 4), r"value must have shape \[3, 1, 4\]"),
        (3, torch.ones(3, 2).double(), "cos must be one of float32"),
        (4, torch.ones(3, 4), r"sin must have shape \[3, 2\]"),
        (5, torch.ones(5, 9, 2, 4), r"key_cache must have shape \[any, any, 1, 4\]"),
        (6, torch.ones(5, 9, 1, 8)[..., :4], "value_cache must be contiguous"),
        (7, torch.ones(3), "slot_mapping must be one of int64, int32"),
        (7, torch.ones(4, dtype=torch.int64), r"slot_mapping must have shape \[3\], got \[4\]"),
    ],
)
def test_what_does_not_fit_is_refused(place, value, complaint):
    arguments = operands(3, 2, 1, 4)
    arguments[place] = value
    with pytest.raises(ValueError, match=complaint):
        rope_append(*arguments)


def test_a_head_without_halves_is_refused():
    x, angles, slots = torch.ones(1, 1, 3), torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    cache = torch.ones(1, 1, 1, 3)
    with pytest.raises(ValueError, match="must be even and at least 2, got 3"):
        rope_append(x, x, x, angles, angles, cache, cache, slots)


def test_the_cost_is_that_of_the_models_rope_and_writes_without_the_steps_between():
    config = MODELS["smollm2-135m"]
    L, H, K, C = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
    whole, one = decode_cost(config, 3, 10), rope_append_cost(3, H, K, C)
    assert L * one.flops == whole["rope"].flops
    assert L * one.kv_bytes == whole["kv_write"].kv_bytes
    moved = whole["rope"].activation_bytes + whole["kv_write"].activation_bytes
    cosines, keys_between = 3 * C * 4, 2 * 3 * K * C * 2
    assert L * (one.activation_bytes - cosines + keys_between) == moved
