"""One layer of the CPU step over long, scattered, half-written KV, against float64.

The truth is the layer's formula written out for one row at a time; whatever no row may read holds
NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from cpu_steps import SIZES, config, dense_attention, num_threads, product_step
from torch import Tensor

from minifer.kernels.cpu.build import load
from minifer.kernels.cpu.pack import interleave, pack
from minifer.kernels.cpu.step import CpuStep, LayerWeights, Rows, Weights

K, D, F, V = 2, 48, 40, 37
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 1000, 2999]  # contexts of the rows
EPS = 0.01  # so large that no norm can do without it
F32, BF16 = torch.float32, torch.bfloat16
# head_dim, query heads a KV head, type. 32 divides 64: there bfloat16 has products of its own.
KINDS = {"float32": (*SIZES, F32), "bfloat16": (*SIZES, BF16), "wide bfloat16": (64, 3, BF16)}
by_kind = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Layer:
    """Random weights, float32 [out, in] and [out], on bfloat16's grid so that both types fit."""

    qkv: Tensor
    qkv_bias: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    head: Tensor
    norms: list[Tensor]  # before attention, before the MLP, before the head
    inv_freq: Tensor


def random_layer(C: int, H: int) -> Layer:
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int, scale: float = 1.0, around: float = 0.0) -> Tensor:
        return (around + scale * torch.randn(shape, generator=draw)).bfloat16().float()

    return Layer(
        normal((H + 2 * K) * C, D, scale=0.3),
        normal((H + 2 * K) * C, scale=0.3),
        normal(C, scale=0.2, around=1.0),
        normal(C, scale=0.2, around=1.0),
        normal(D, H * C, scale=0.3),
        normal(F, D, scale=0.3),
        normal(F, D, scale=0.3),
        normal(D, F, scale=0.3),
        normal(V, D, scale=0.5),
        [normal(D, scale=0.2, around=1.0) for _ in range(3)],
        500.0 ** (-torch.arange(C // 2) / (C // 2)),
    )


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def rotate(x: Tensor, position: int, inv_freq: Tensor) -> Tensor:
    angle = (position * inv_freq).double()  # float32's product, as in every engine
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def exact(
    layer: Layer, x: Tensor, position: int, keys: Tensor, values: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One row x [D] after keys and values [position, K, C] → logits [V], its key, its value."""
    x = x.double()
    qkv = layer.qkv.double() @ norm(x, layer.norms[0]) + layer.qkv_bias.double()
    q, k, v = qkv.view(-1, len(layer.q_norm)).tensor_split((-2 * K, -K))
    q = rotate(norm(q, layer.q_norm), position, layer.inv_freq)
    k = rotate(norm(k, layer.k_norm), position, layer.inv_freq)
    first = 0 if window is None else max(0, position + 1 - window)
    keys = torch.cat((keys.double(), k[None]))[first:]
    values = torch.cat((values.double(), v[None]))[first:]
    x = x + layer.o.double() @ dense_attention(q, keys, values).flatten()
    h = norm(x, layer.norms[1])
    gate = layer.gate.double() @ h
    x = x + layer.down.double() @ (gate / (1 + (-gate).exp()) * (layer.up.double() @ h))
    return layer.head.double() @ norm(x, layer.norms[2]), k, v


class Scene:
    """Requests of `lengths` tokens with the KV of all but the last. What is not KV is NaN."""

    def __init__(self, kind="float32", lengths=LENGTHS, block_size=16, window=None) -> None:
        draw = torch.Generator().manual_seed(3)
        C, group, dtype = KINDS[kind]
        self.layer, self.window, self.lengths = random_layer(C, group * K), window, lengths
        counts = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=draw)
        width = max(counts)
        self.tables = torch.zeros(len(lengths), width, dtype=torch.int32)
        for row, ids in enumerate(order[: sum(counts)].split(counts)):
            self.tables[row, : len(ids)] = ids
        shape = (len(order), block_size, K, C)
        self.keys, self.values = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        self.slots = []
        for table, n in zip(self.tables, lengths, strict=True):
            places = torch.arange(n)
            slots = table[places // block_size].long() * block_size + places % block_size
            for cache in (self.keys, self.values):
                new = torch.randn(n - 1, K, C, generator=draw)
                cache.view(-1, K, C)[slots[:-1]] = new.to(dtype)
            self.slots.append(slots)
        self.x = torch.randn(len(lengths), D, generator=draw)
        weights = self.layer

        def packed(weight: Tensor, bias: Tensor | None = None):
            return pack(weight.to(dtype), bias)

        own = LayerWeights(
            weights.norms[0], weights.norms[1], weights.q_norm, weights.k_norm,
            packed(weights.qkv, weights.qkv_bias), packed(weights.o),
            interleave(packed(weights.gate), packed(weights.up)), packed(weights.down), window,
        )  # fmt: skip
        whole = Weights([own], weights.norms[2], packed(weights.head), weights.inv_freq, 1.0)
        sizes = config(
            vocab_size=V, hidden_size=D, intermediate_size=F, num_heads=group * K,
            num_kv_heads=K, head_dim=C, rms_norm_eps=EPS,
        )  # fmt: skip
        self.step = CpuStep(load(C, group), sizes, whole, [self.keys], [self.values])

    def rows(self, chosen=None, written=True) -> Rows:
        chosen = list(range(len(self.lengths))) if chosen is None else chosen
        return Rows(
            self.x[chosen],
            [self.lengths[i] - 1 for i in chosen],
            [int(self.slots[i][-1]) if written else -1 for i in chosen],
            [self.tables[i].tolist() for i in chosen],
            range(len(chosen)),
        )

    def truth(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        before = self.slots[row][:-1]
        keys, values = (cache.flatten(0, 1)[before] for cache in (self.keys, self.values))
        return exact(self.layer, self.x[row], len(before), keys, values, self.window)


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("window", [None, 1, 5, 300])
def test_a_row_reads_its_own_live_blocks_and_nothing_else(window, block_size) -> None:
    """Float32: a few hundred roundings of 2⁻²⁴ on logits of size 10."""
    scene = Scene(block_size=block_size, window=window)
    logits = scene.step.logits(scene.rows())
    for row in range(len(LENGTHS)):
        expected, k, v = scene.truth(row)
        torch.testing.assert_close(logits[row].double(), expected, atol=2e-4, rtol=1e-4)
        slot = scene.slots[row][-1]
        for cache, new in ((scene.keys, k), (scene.values, v)):
            got = cache.flatten(0, 1)[slot].double()
            torch.testing.assert_close(got, new, atol=1e-5, rtol=1e-5)


def test_neighbours_at_positions_that_follow_one_another_are_not_one_request() -> None:
    """Forty decodes whose positions look like those of a prompt."""
    lengths = [*range(3, 43)]
    scene = Scene(lengths=lengths, block_size=7)
    logits = scene.step.logits(scene.rows())
    for row in range(len(lengths)):
        expected, _, _ = scene.truth(row)
        torch.testing.assert_close(logits[row].double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("kind", ["bfloat16", "wide bfloat16"])
def test_in_bfloat16_vectors_are_rounded_where_they_meet_a_matrix(kind, window) -> None:
    """Some ten roundings of 2⁻⁹ on the way, of which none is amplified."""
    scene = Scene(kind, window=window, block_size=7)
    logits = scene.step.logits(scene.rows())
    for row in range(len(LENGTHS)):
        expected, k, v = scene.truth(row)
        error = (logits[row].double() - expected).abs()
        assert float(error.mean() / expected.abs().mean()) < 0.01
        slot = scene.slots[row][-1]
        for cache, new in ((scene.keys, k), (scene.values, v)):
            got = cache.flatten(0, 1)[slot].double()
            torch.testing.assert_close(got, new, atol=0.03, rtol=0.02)


@by_kind
def test_the_number_of_threads_changes_no_bit(kind) -> None:
    """No sum is shared out, and contexts are cut by their length alone."""
    scene = Scene(kind)
    found = []
    for threads in (1, 2, 3, 5):
        with num_threads(threads):
            found.append(scene.step.logits(scene.rows()))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("rows", [[0], [13], [12, 13], [3, 2, 9, 8, 0], list(range(13, -1, -1))])
def test_neighbours_change_rounding_only(rows) -> None:
    scene = Scene()
    every = scene.step.logits(scene.rows())
    got = scene.step.logits(scene.rows(rows))
    torch.testing.assert_close(got, every[rows], atol=2e-5, rtol=1e-5)


@by_kind
def test_a_slot_below_zero_is_not_written(kind) -> None:
    scene = Scene(kind)
    scene.step.logits(scene.rows())
    kept = scene.keys.clone(), scene.values.clone()
    scene.x += 1
    logits = scene.step.logits(scene.rows(written=False))
    assert logits.isfinite().all()
    for before, after in zip(kept, (scene.keys, scene.values), strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num())
        assert torch.equal(before.isnan(), after.isnan())


@by_kind
def test_a_nan_that_is_read_fails_its_own_row_alone(kind) -> None:
    scene = Scene(kind)
    clean = scene.step.logits(scene.rows())
    for cache in (scene.keys, scene.values):
        for row in (4, 12):  # a short context and one in several stretches
            cache.flatten(0, 1)[scene.slots[row][7]] = math.nan
            logits = scene.step.logits(scene.rows())
            assert logits[row].isnan().all()
            others = [i for i in range(len(LENGTHS)) if i not in (4, 12)]
            assert torch.equal(logits[others], clean[others])
            tokens, values = scene.step.largest(scene.rows())
            assert values[row].isnan() and values[others].isfinite().all()
            assert torch.equal(tokens[others], clean[others].argmax(-1))


def test_offsets_beyond_two_to_the_31() -> None:
    """Two caches of 4 GiB, of which three blocks are ever touched."""
    blocks = 2**27 + 3
    keys, values = (torch.empty(blocks, 1, 1, 16, dtype=BF16) for _ in range(2))
    step = product_step(torch.eye(32).bfloat16(), torch.ones(32), BF16, cache=(keys, values))
    last = blocks - 1
    keys[last - 1] = values[last - 1] = 7
    rows = Rows(torch.ones(1, 32), [0], [last], [[last]], [0])
    assert step.logits(rows).isfinite().all()
    for cache in (keys, values):
        assert cache[last].eq(1).all() and cache[last - 1].eq(7).all()
        assert cache[last % 2**27].ne(1).all(), "where 31 bits would have gone"


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_scores_far_apart(scale: float) -> None:
    """One key outweighs all others by e¹⁰⁰ and more: no overflow, and nothing lost."""
    scene = Scene(lengths=[40, 700])
    scene.keys *= scale
    logits = scene.step.logits(scene.rows())
    for row in range(2):
        expected, _, _ = scene.truth(row)
        torch.testing.assert_close(logits[row].double(), expected, atol=1e-2, rtol=1e-2)
