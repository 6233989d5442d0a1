"""Sixteen numbers at a time: what `lanes.h` and `panels.h` compute themselves, number by number.

A small library is compiled against the headers, with this CPU's own instructions and without.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minifer.kernels.cpu import build

PROBE = """
#include "lanes.h"
#include "panels.h"
using namespace minifer;

extern "C" void lanes(int what, const void* from, void* to, int count) {
    const float* x = (const float*)from;
    for (int i = 0; i < count; i += LANES) {
        if (what == 0) store((float*)to + i, exp(load(x + i)));
        if (what == 1) store((float*)to + i, silu(load(x + i)));
        if (what == 2) store((float*)to + i, load_half((const uint16_t*)from + i));
        if (what == 3) store((bf16*)to + i, load(x + i));
        if (what == 4) store((float*)to + i, load((const bf16*)from + i));
        if (what == 5) ((float*)to)[i / LANES] = sum(load(x + i));
        if (what == 6) ((float*)to)[i / LANES] = largest(load(x + i));
    }
    if (what == 7) {
        f32x16 v[LANES];
        for (int j = 0; j < LANES; j++) v[j] = load(x + LANES * j);
        store((float*)to, sums(v));
    }
}
"""
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module", params=["intrinsics", "portable"])
def lanes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Calls the probe: what, input, output."""
    target = tmp_path_factory.mktemp("lanes") / "lanes.so"
    compiler = build.find_compiler()
    macros = ["-DMINIFER_PORTABLE"] if request.param == "portable" else []
    flags = [*build._FLAGS, *build._native(compiler), *macros, f"-I{Path(build.__file__).parent}"]
    subprocess.run(
        [*compiler, *flags, "-x", "c++", "-", "-o", target], input=PROBE, text=True, check=True
    )
    library = ctypes.CDLL(str(target))

    def call(what: int, x: Tensor, out: Tensor) -> Tensor:
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, out))
        library.lanes(what, *pointers, x.numel())
        return out

    return call


def floats(*values: float) -> Tensor:
    """Padded with zeros to whole vectors."""
    return torch.tensor([*values, *[0.0] * (-len(values) % 16)])


def test_exp_is_within_two_units_in_the_last_place(lanes) -> None:
    x = torch.cat((torch.linspace(-87, 88, 160_000), torch.linspace(-1, 1, 16_000)))
    got, truth = lanes(0, x, torch.empty_like(x)).double(), x.double().exp()
    assert float(((got - truth).abs() / truth).max()) < 2 * 2.0**-23


def test_exp_at_its_ends(lanes) -> None:
    x = floats(0.0, -87.5, -1e30, -INF, 88.0, 200.0, INF, NAN)
    got = lanes(0, x, torch.empty_like(x))[:8].tolist()
    assert got[:4] == [1.0, 0.0, 0.0, 0.0]
    assert got[4] == got[5] == got[6] == pytest.approx(1.6516363e38, rel=1e-6)
    assert got[7] != got[7]


def test_silu(lanes) -> None:
    """A quotient of sums of exp: a few units in the last place."""
    x = torch.linspace(-80, 80, 160_000)
    got, truth = lanes(1, x, torch.empty_like(x)).double(), x.double().sigmoid() * x.double()
    assert float(((got - truth).abs() / truth.abs()).max()) < 5 * 2.0**-23
    ends = lanes(1, floats(-1e4, 1e4, NAN, 0.0), torch.empty(16)).tolist()
    assert ends[0] == pytest.approx(0, abs=1e-30) and ends[1] == 1e4
    assert ends[2] != ends[2] and ends[3] == 0


def test_every_float16(lanes) -> None:
    """All 65,536: subnormal ones, infinities and NaN."""
    halves = torch.arange(-(2**15), 2**15).short().view(torch.float16)
    got = lanes(2, halves, torch.empty(2**16))
    assert torch.equal(got.nan_to_num(7.5e4), halves.float().nan_to_num(7.5e4))
    assert torch.equal(got.isnan(), halves.isnan())


def test_bfloat16_is_rounded_to_nearest_ties_to_even(lanes) -> None:
    """torch's rounding; NaN stays one. Subnormal numbers may become 0: an instruction does that."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=draw).int()
    ties = (bits & ~0xFFFF) | 0x8000
    x = torch.cat((bits, ties)).view(torch.float32)
    x = torch.where(x.abs() < 2.0**-126, 0, x)
    got = lanes(3, x, torch.empty(len(x), dtype=torch.bfloat16))
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got.nan_to_num(3), x.bfloat16().nan_to_num(3))
    assert torch.equal(lanes(4, got, torch.empty(len(x))).nan_to_num(3), got.float().nan_to_num(3))


def test_sums_across_and_along_lanes(lanes) -> None:
    x = torch.randint(-1000, 1000, (16, 16), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(lanes(5, x, torch.empty(16)), x.sum(1))
    assert torch.equal(lanes(6, x, torch.empty(16)), x.amax(1))
    assert torch.equal(lanes(7, x, torch.empty(16)), x.sum(1)), "lane i is the sum of vector i"
