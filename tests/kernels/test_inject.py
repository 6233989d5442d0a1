"""The injection of a loop model against float64, and against torch's back end to the last bit."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import Poison, assert_rounded, random_tensor
from torch import Tensor

from minifer.execution.backend import TorchBackend
from minifer.kernels.inject import (
    Tiles,
    inject,
    inject_cost,
    inject_reference,
    inject_tiles,
)
from minifer.perf.costs import ElementBytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def arguments(
    rows: int, D: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """h in `dtype`, a decay in (0, 1), and a term."""
    decay = random_tensor(D, seed=seed + 1).sigmoid()
    return random_tensor(rows, D, seed=seed, dtype=dtype), decay, random_tensor(rows, D, seed=9)


def check(out: Tensor, h: Tensor, decay: Tensor, term: Tensor) -> None:
    """Against float64: one rounding to h's dtype, and those of float32 where terms cancel."""
    wide = h.double(), decay.double(), term.double()
    assert out.dtype == h.dtype
    assert_rounded(out, inject_reference(*wide), terms=inject_reference(*(x.abs() for x in wide)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (3, 257), (100, 77), (1, 768)], ids=str)
@pytest.mark.parametrize("tiles", [None, Tiles(4, 16, 1)], ids=["interpreter", "many programs"])
def test_ragged_shapes_in_poisoned_memory(shape, dtype, tiles):
    with Poison() as memory:
        h, decay, term = (memory.place(x) for x in arguments(*shape, dtype))
        out = inject(h, decay, term, tiles=tiles)
    check(out, h, decay, term)


@pytest.mark.parametrize("D", [128, 768, 1280, 1536])
def test_the_tiles_of_a_gpu(D):
    tiles = inject_tiles(D)
    h, decay, term = arguments(tiles.rows + 1, D, torch.bfloat16)
    check(inject(h, decay, term, tiles=tiles), h, decay, term)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_where_the_torch_back_end_rounds(dtype):
    """The interpreter has no fused multiply-add, so here the bits are the same."""
    h, decay, term = arguments(64, 100, dtype)
    out = inject(h, decay, term)
    assert torch.equal(out, TorchBackend().inject(h, decay, term))
    assert torch.equal(out, inject_reference(h, decay, term))


def test_a_decay_near_one_is_not_rounded_to_the_state_s_dtype():
    """0.999 is 1 in bfloat16, whose numbers around 64 are half apart."""
    state = torch.full((1, 8), 64.0, dtype=torch.bfloat16)
    decay, term = torch.full((8,), 0.999), torch.full((1, 8), 0.27)
    assert (inject(state, decay, term) == 64).all()  # 64.206
    assert (inject(state, decay.bfloat16().float(), term) == 64.5).all()  # 64.27


def test_rows_are_read_where_they_lie():
    """A slice of a wider state, and rows of a term far from each other."""
    with Poison() as memory:
        h, decay, term = arguments(5, 24, torch.bfloat16)
        out = inject(memory.place(h, gap=7), memory.place(decay), memory.place(term, gap=3))
    assert out.is_contiguous()
    check(out, h, decay, term)


def test_one_row_has_no_influence_on_another():
    h, decay, term = arguments(5, 33)
    broken = h.clone()
    broken[[0, 1, 3, 4]] = torch.nan
    assert torch.equal(inject(broken, decay, term)[2], inject(h, decay, term)[2])


def test_the_linear_system_reaches_its_closed_form():
    """T iterations from 0 without blocks are (1 − decay^T) / (1 − decay) · term."""
    _, decay, term = arguments(3, 40)
    h = torch.zeros(3, 40)
    for _ in range(12):
        h = inject(h, decay, term)
    wide = decay.double()
    truth = (1 - wide**12) / (1 - wide) * term.double()
    assert torch.allclose(h.double(), truth, rtol=1e-5, atol=1e-6)


def test_no_rows():
    assert inject(*arguments(0, 5)).shape == (0, 5)


h, decay, term = arguments(2, 3)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ((h[0], decay, term), r"h must have shape \[any, any\], got \[3\]"),
        ((h.double(), decay, term), "h must be one of float32, bfloat16"),
        ((torch.ones(3, 2).T, decay, term), "the last dimension of h must be dense"),
        ((torch.ones(2, 0), decay[:0], term), "the last dimension of h must be at least 1, got 0"),
        ((h, decay[:2], term), r"decay must have shape \[3\], got \[2\]"),
        ((h, decay.bfloat16(), term), "decay must be one of float32, got torch.bfloat16"),
        ((h, decay, term[:1]), r"term must have shape \[2, 3\], got \[1, 3\]"),
        ((h, decay, term.bfloat16()), "term must be one of float32, got torch.bfloat16"),
        ((h, decay.to("meta"), term), "decay must be on cpu, got meta"),
        (([1.0], decay, term), "h must be a tensor, got list"),
    ],
)
def test_what_does_not_fit_is_refused(given, complaint):
    with pytest.raises(ValueError, match=complaint):
        inject(*given)


def test_the_cost_counts_float32_where_it_is():
    cost = inject_cost(3, 768)
    assert cost.flops == 2 * 3 * 768 and cost.weight_bytes == 4 * 768
    assert cost.activation_bytes == 3 * 768 * (2 + 4 + 2)
    single = inject_cost(3, 768, element=ElementBytes(4, 4, 4))
    assert single.activation_bytes == 3 * 768 * (4 + 4 + 4)
