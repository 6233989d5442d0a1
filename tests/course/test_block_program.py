"""The record runs block programs as Triton's interpreter does, and sees what they touch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from minifer.course.block_program import (
    ENGINE,
    AccessError,
    Kernel,
    is_kernel,
    simulate,
    tl,
    triton,
)
from minifer.course.guard_bands import GuardBands
from minifer.kernels import flash_attention as flash
from minifer.kernels import paged_decode as paged
from minifer.kernels.gemm import gemm
from minifer.kernels.gemv import gemv, gemv_cost
from minifer.kernels.products import Tiles
from minifer.kernels.rms_norm import add_rms_norm, norm_tiles, rms_norm
from minifer.kernels.rope_append import Tiles as RopeTiles
from minifer.kernels.rope_append import rope_append

needs_triton = pytest.mark.skipif(ENGINE == "record", reason="there is no Triton here")


@triton.jit
def doubled(x):
    return x * 2


@triton.jit
def double(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    tl.store(OUT + at, doubled(x), mask=at < n)


@triton.jit
def reads_all(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at), mask=at < n)


@triton.jit
def writes_all(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, mask=at < n, other=0.0))


@triton.jit
def no_other(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT, tl.sum(tl.load(X + at, mask=at < n), 0))


@triton.jit
def shifted(X, OUT, n):
    at = tl.program_id(0)
    tl.store(OUT + at, tl.load(X + (at + 1) % n))


@triton.jit
def arithmetic(X, Y, OUT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(X + i), tl.load(Y + i)
    mixed = x * y.to(tl.float32) + i // 3 - (i - 5) // 3 + i % 4 + (-i) / 7
    mixed = tl.where((i > 2) & ~(i == 5), mixed, tl.exp(-tl.abs(x).to(tl.float32)))
    mixed += tl.maximum(x, 0.5) + tl.minimum(x, y) + tl.sqrt(tl.abs(y).to(tl.float32))
    mixed -= tl.max(x, 0) + tl.sum(y.to(tl.float32), 0) + tl.min(i, 0) + tl.cdiv(BLOCK, 3)
    mixed += tl.log(1 + x.to(tl.float32) * x)
    tl.store(OUT + i, mixed)


@triton.jit
def products(X, OUT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(X + i[:, None] * BLOCK + i[None, :])
    y = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(2):
        y = tl.dot(x, tl.trans(x), y + step, input_precision="ieee")
    tl.store(OUT + i[:, None] * BLOCK + i[None, :], y)


def both(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> list[Tensor]:
    """The last tensor after the record ran the kernel, and after Triton did."""
    results = []
    for where in ("record", "Triton"):
        own = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        if where == "record":
            simulate(lambda own=own: kernel[grid](*own, **named))
        else:
            kernel[grid](*own, **named)
        results.append(next(a for a in reversed(own) if isinstance(a, Tensor)))
    return results


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_arithmetic_is_that_of_triton(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, generator=generator).to(dtype) for _ in range(2))
    ours, theirs = both(arithmetic, (1,), x, y, torch.empty(16), BLOCK=16)
    assert torch.allclose(ours, theirs, rtol=2e-3 if dtype == torch.float16 else 1e-6)


@needs_triton
def test_products_are_those_of_triton() -> None:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    ours, theirs = both(products, (1,), x, torch.empty(16, 16), BLOCK=16)
    assert torch.allclose(ours, theirs, atol=1e-5)


def cases() -> dict[str, Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """The engine's own kernels: function, arguments, tiles of several programs."""
    generator = torch.Generator().manual_seed(2)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    half = torch.bfloat16
    tables, lengths = torch.tensor([[2, 0], [1, 3]]), torch.tensor([7, 5])
    angle = rand(3, 4)
    slots = torch.tensor([3, -1, 0])
    starts = torch.tensor([0, 3, 5])
    return {
        "rms_norm": lambda: (rms_norm, (rand(5, 33), rand(33), 1e-5), {"tiles": norm_tiles(33)}),
        "rms_norm bf16": lambda: (
            rms_norm, (rand(5, 33, dtype=half), rand(33, dtype=half), 1e-5), {}
        ),
        "add_rms_norm": lambda: (add_rms_norm, (rand(4, 9), rand(4, 9), rand(9), 1e-5), {}),
        "gemv": lambda: (gemv, (rand(20), rand(10, 20)), {"tiles": Tiles(4, 8, 1, 1)}),
        "gemv bf16": lambda: (gemv, (rand(20, dtype=half), rand(10, 20, dtype=half)), {}),
        "gemm": lambda: (gemm, (rand(33, 20), rand(17, 20)), {}),
        "rope_append": lambda: (
            rope_append,
            (rand(3, 2, 8), rand(3, 1, 8), rand(3, 1, 8), angle.cos(), angle.sin(),
             torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), slots),
            {"tiles": RopeTiles(2, 1)},
        ),
        "flash_attention": lambda: (
            flash.flash_attention,
            (rand(5, 4, 16), rand(4, 4, 2, 16), rand(4, 4, 2, 16), tables, starts, lengths, 0.25),
            {"max_query": 3, "tiles": flash.Tiles(16, 16, 1, 1)},
        ),
        "paged_decode": lambda: (
            paged.paged_decode,
            (rand(2, 4, 16), rand(4, 4, 2, 16), rand(4, 4, 2, 16), tables, lengths, 0.25),
            {"num_splits": 2, "tiles": paged.Tiles(16, 16, 1, 1)},
        ),
    }  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", list(cases()))
def test_the_engines_kernels_give_in_the_record_what_they_give_in_triton(name: str) -> None:
    function, arguments, more = cases()[name]()
    mine = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    ran = simulate(function, *mine, **more)
    theirs = function(*arguments, **more)
    results = [[r] if isinstance(r, Tensor) else [*r] for r in (ran.result, theirs)]
    for ours, expected in zip(results[0] + mine, results[1] + [*arguments], strict=True):
        if isinstance(ours, Tensor):
            tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-2
            assert torch.allclose(ours, expected, atol=tolerance, rtol=tolerance)
    assert not [conflict for trace in ran.launches for conflict in trace.conflicts()]


def test_bytes_are_the_price() -> None:
    x, weight = torch.randn(20), torch.randn(10, 20)
    trace = simulate(gemv, x, weight, tiles=Tiles(4, 8, 1, 1)).trace
    assert trace.grid == (3, 1, 1)
    assert trace.unique_bytes() == gemv_cost(20, 10, 4).bytes
    assert trace.bytes("X") == 3 * 20 * 4 and bool((trace.counts("W") == 1).all())
    assert trace.owners("W")[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_masked_lanes_touch_nothing_and_others_are_counted() -> None:
    x, out = torch.arange(6.0), torch.full((6,), torch.nan)
    trace = simulate(lambda: double[(2,)](x, out, 6, BLOCK=4)).trace
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    assert (trace.bytes("X"), trace.bytes("OUT"), trace.sectors("X")) == (24, 24, 2)
    assert [access.touched.tolist() for access in trace.select("X")] == [[0, 1, 2, 3], [4, 5]]
    assert trace.accesses[0].line > 0


@pytest.mark.parametrize(("kernel", "verb"), [(reads_all, "load"), (writes_all, "store")])
def test_an_access_outside_says_where(kernel: Any, verb: str) -> None:
    memory = torch.zeros(32)
    x, out = memory[:6], memory[8:14]
    with pytest.raises(AccessError, match=rf"program 1 {verb}s \w+\[6\]: 2 of 4 lanes") as caught:
        simulate(lambda: kernel[(2,)](x, out, 6, BLOCK=4))
    assert (caught.value.kind, caught.value.element) == (verb, 6)
    simulate(lambda: kernel[(2,)](x, out, 6, BLOCK=4), strict=False)


def test_gaps_between_rows_belong_to_nobody() -> None:
    x = torch.arange(8.0)[::2]  # elements 0, 2, 4 and 6 of its storage
    with pytest.raises(AccessError, match=r"X\[1\]"):
        simulate(lambda: double[(1,)](x, torch.empty(4), 4, BLOCK=4))


def test_a_masked_lane_without_other_holds_anything() -> None:
    x, out = torch.ones(3), torch.zeros(1)
    simulate(lambda: no_other[(1,)](x, out, 3, BLOCK=4))
    assert out.isnan().all()
    simulate(lambda: no_other[(1,)](x, out, 3, BLOCK=4), strict=False)
    assert out.item() == 3


def test_a_race_is_found_whatever_the_order() -> None:
    results = []
    for order in ("forward", "backward", 5):
        x = torch.arange(4.0)
        trace = simulate(lambda x=x: shifted[(4,)](x, x, 4), order=order).trace
        results.append(x.tolist())
        assert len(trace.conflicts()) == 4
    assert results[0] != results[1]
    clean = simulate(lambda: shifted[(4,)](torch.arange(4.0), torch.empty(4), 4)).trace
    assert clean.conflicts() == []
    assert "their order is not fixed" in str(trace.conflicts()[0])


def test_what_triton_refuses_is_refused() -> None:
    for bad in (3, 0):
        with pytest.raises(ValueError, match="power of two"):
            simulate(lambda bad=bad: double[(1,)](torch.ones(4), torch.empty(4), 4, BLOCK=bad))
    with pytest.raises(ValueError, match="grid"):
        simulate(lambda: double[(1.5,)](torch.ones(4), torch.empty(4), 4, BLOCK=4))
    with pytest.raises(ValueError, match="order"):
        simulate(lambda: None, order="sideways")


@triton.jit
def short_dot(X, OUT, BLOCK: tl.constexpr):
    x = tl.zeros([BLOCK, BLOCK], tl.float32)
    tl.store(OUT, tl.sum(tl.sum(tl.dot(x, x), 0), 0))


@triton.jit
def branches(X, OUT):
    if tl.load(X + tl.arange(0, 4)) > 0:
        tl.store(OUT, 1.0)


@triton.jit
def narrow(X, OUT):
    tl.store(OUT, tl.exp(tl.load(X).to(tl.float16)))


@triton.jit
def unknown(X, OUT):
    tl.no_such_function(X)


@pytest.mark.parametrize(
    ("kernel", "named", "error", "words"),
    [
        (short_dot, {"BLOCK": 8}, ValueError, "16"),
        (branches, {}, ValueError, "truth value"),
        (narrow, {}, ValueError, "tl.exp takes float32, got fp16"),
        (unknown, {}, AttributeError, "knows no tl.no_such_function"),
    ],
)
def test_errors_say_what_to_do(
    kernel: Any, named: dict[str, int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        simulate(lambda: kernel[(1,)](torch.ones(4), torch.empty(1), **named))


@triton.jit
def rounded(X, OUT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(X + i[:, None] * BLOCK + i[None, :])
    tl.store(OUT + i[:, None] * BLOCK + i[None, :], tl.dot(x, x))


@triton.jit
def exact(X, OUT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(X + i[:, None] * BLOCK + i[None, :])
    tl.store(OUT + i[:, None] * BLOCK + i[None, :], tl.dot(x, x, allow_tf32=False))


def test_a_product_is_rounded_as_tensor_cores_do_unless_ieee() -> None:
    x = torch.eye(16) * (1 + 2.0**-12)
    out = torch.empty(16, 16)
    simulate(lambda: rounded[(1,)](x, out, BLOCK=16))
    assert out[0, 0] == 1
    simulate(lambda: rounded[(1,)](x, out, BLOCK=16), strict=False)
    assert out[0, 0] > 1
    simulate(lambda: exact[(1,)](x, out, BLOCK=16))
    assert out[0, 0] > 1


def test_kernels_in_defaults_and_in_closures_are_simulated() -> None:
    x, out = torch.ones(4), torch.empty(4)

    def around(kernel: Any) -> Callable[[], None]:
        return lambda: kernel[(1,)](x, out, 4, BLOCK=4)

    assert len(simulate(around(double)).launches) == 1
    assert len(simulate(lambda k=double: k[(1,)](x, out, 4, BLOCK=4)).launches) == 1
    assert len(simulate(lambda: None).launches) == 0
    with pytest.raises(ValueError, match="one launch"):
        _ = simulate(lambda: None).trace


def test_a_stand_in_launch_is_simulated() -> None:
    """What `triton.jit` gives where there is no Triton."""
    kernel, out = Kernel(double.fn), torch.empty(6)
    assert is_kernel(kernel) and is_kernel(double) and not is_kernel(simulate)
    kernel[(2,)](torch.arange(6.0), out, 6, BLOCK=4)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]


def test_without_triton_the_same_source_runs() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from minifer.course.block_program import ENGINE, simulate, tl, triton

@triton.jit
def double(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, 2 * tl.load(X + at, mask=at < n, other=0.0), mask=at < n)

out = torch.empty(6)
double[(triton.cdiv(6, 4),)](torch.arange(6.0), out, 6, BLOCK=4)
trace = simulate(lambda: double[(2,)](torch.arange(6.0), out, 6, BLOCK=4)).trace
print(ENGINE, out.tolist(), trace.bytes("X"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "record [0.0, 2.0, 4.0, 6.0, 8.0, 10.0] 24", done.stderr


def test_guard_bands_say_what_changed() -> None:
    bands = GuardBands()
    x, y = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(2, 4)[:, :3]
    a, b = bands.place("x", x), bands.place("y", y)
    assert torch.equal(a, x) and torch.equal(b, y) and b.stride() == (4, 1)
    assert bands.place("again", x) is a
    assert bands.written_outside() == {}
    b[0, 0] = 7
    a.as_strided((1,), (1,), a.storage_offset() + 6).fill_(0)
    assert bands.written_outside() == {"x": [6], "y": [0]}
    assert bands.written_outside(("y",)) == {"x": [6]}
    assert b.as_strided((1,), (1,), b.storage_offset() + 3).isnan().all()  # the gap
