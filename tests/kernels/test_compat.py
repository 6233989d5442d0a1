"""`kernels/compat.py`: its values in the interpreter, its instructions from the compiler."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from compat_kernels import (
    prefetch,
    round_to,
    store_then_signal,
    two_clocks,
    wait_then_read,
)
from triton import language as tl

from minifer.kernels.aot import NVIDIA, TARGETS, CompiledKernel
from minifer.kernels.aot_report import compile_kernels

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
BLOCK = 1024
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# -- in the interpreter


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_dtype_rounds_like_torch_on_every_exponent_and_tie(dtype: torch.dtype) -> None:
    """All 65,536 upper halves of a float32, NaNs and subnormals too, with the lower halves that
    matter: exact, just above, around the tie of bfloat16, just below the next; ties of float16."""
    lower = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x3000])
    bits = (torch.arange(65536)[:, None] * 65536 + lower).flatten()
    x = bits.to(torch.uint32).view(torch.float32)
    out = torch.empty(len(x), dtype=dtype)
    round_to[(1,)](x, out, DTYPES[dtype], len(x))
    assert torch.equal(out.isnan(), x.isnan())
    expected = x.to(dtype)
    kind = {2: torch.int16, 4: torch.int32}[out.element_size()]
    same = (out.view(kind) == expected.view(kind)) | x.isnan()
    assert same.all(), x[~same][:8].tolist()


@pytest.mark.parametrize(
    ("count", "patience", "left"), [(5, 3, 3), (6, 3, 3), (4, 3, 0), (4, 0, 0), (5, 0, 0)]
)
def test_a_wait_returns_the_patience_that_is_left(count: int, patience: int, left: int) -> None:
    counter = torch.tensor([count], dtype=torch.int32)
    data, out = torch.arange(4.0), torch.full((5,), -1.0)
    wait_then_read[(1,)](counter, data, out, 5, patience, 4)
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0, left]
    assert counter.item() == count


def test_a_signal_adds_its_amount() -> None:
    counter, data = torch.tensor([40], dtype=torch.int32), torch.zeros(4)
    store_then_signal[(1,)](counter, data, 4)
    assert counter.item() == 42 and data.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_where_there_is_no_clock_and_no_cache_nothing_happens() -> None:
    times, weights = torch.full((2,), -1, dtype=torch.int64), torch.ones(4, dtype=torch.bfloat16)
    two_clocks[(1,)](times)
    prefetch[(1,)](weights, 1 << 10)  # reads nothing: these addresses are not all ours
    assert times.tolist() == [0, 0] and weights.tolist() == [1.0] * 4


# -- compiled


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], CompiledKernel]:
    report = compile_kernels(
        TARGETS,
        modules={"compat": "compat_kernels"},
        keep=("ptx", "sass", "amdgcn"),
        cache_dir=str(tmp_path_factory.mktemp("triton")),
    )
    assert not report.errors
    return {(row.case, row.target): row for row in report.kernels}


def code_lines(ptx: str) -> list[str]:
    """The instructions and labels of PTX or of AMD's assembly, without comments."""
    lines = (re.sub(r"(//|;).*$", "", line).strip() for line in ptx.splitlines())
    return [line for line in lines if line and not re.match(r"\.(?!LBB)", line)]


def loops(lines: list[str]) -> list[list[str]]:
    """The lines between each label and a jump back to it."""
    at = {line.rstrip(":"): i for i, line in enumerate(lines) if line.endswith(":")}
    found = []
    for i, line in enumerate(lines):
        jump = re.search(r"\b(?:bra(?:\.uni)?|s_c?branch\w*)\s+(\S+)$", line)
        if jump and at.get(jump[1], i) < i:
            found.append(lines[at[jump[1]] : i])
    return found


def first(pattern: str, lines: list[str]) -> int:
    return next(i for i, line in enumerate(lines) if re.search(pattern, line))


ACQUIRE = r"\b(ld|atom)\.(\w+\.)*acquire"
DATA_LOAD = r"ld\.global\.(v\d\.)?b32"


@pytest.mark.parametrize("target", NVIDIA)
def test_a_wait_polls_with_acquire_in_a_loop_and_a_barrier_follows(compiled, target: str) -> None:
    lines = code_lines(compiled["wait_then_read", target].asm["ptx"])
    (loop,) = loops(lines)
    assert first(ACQUIRE, loop) < len(loop) - 1 - first(r"bar\.sync", loop[::-1])
    assert not any("ld.volatile" in line for line in lines)


@pytest.mark.parametrize("target", NVIDIA)
def test_a_wait_that_need_not_spin_has_its_acquire_and_barrier_too(compiled, target: str) -> None:
    """Between the beginning and the first jump forward past the loop."""
    lines = code_lines(compiled["wait_then_read", target].asm["ptx"])
    before = lines[: first(r"\bbra\b", lines)]
    assert first(ACQUIRE, before) < first(r"bar\.sync", before)
    assert first(r"bar\.sync", before) < first(DATA_LOAD, lines)


@pytest.mark.parametrize("target", NVIDIA)
def test_an_acquire_empties_the_first_level_cache(compiled, target: str) -> None:
    assert "CCTL.IVALL" in compiled["wait_then_read", target].asm["sass"]


@pytest.mark.parametrize("target", NVIDIA)
def test_a_barrier_stands_between_the_stores_and_the_release(compiled, target: str) -> None:
    lines = code_lines(compiled["store_then_signal", target].asm["ptx"])
    store, release = first(r"st\.global", lines), first(r"\b(red|atom)\..*release", lines)
    assert any("bar.sync" in line for line in lines[store:release])
    assert not any("st.global" in line for line in lines[release:])


@pytest.mark.parametrize("target", NVIDIA)
def test_triton_itself_puts_a_barrier_before_a_release_from_3_9_on(compiled, target: str) -> None:
    lines = code_lines(compiled["release_without_barrier", target].asm["ptx"])
    between = lines[first(r"st\.global", lines) : first(r"\b(red|atom)\..*release", lines)]
    assert any("bar.sync" in line for line in between) == (VERSION >= (3, 9))


@pytest.mark.parametrize("target", NVIDIA)
def test_a_spin_on_a_plain_load_is_deleted(compiled, target: str) -> None:
    """The lesson: nothing tells the compiler that another program changes the counter."""
    lines = code_lines(compiled["spin_on_plain_load", target].asm["ptx"])
    assert not loops(lines)
    assert sum(bool(re.search(r"\bld\.global", line)) for line in lines) == 1  # of the data


@pytest.mark.parametrize("target", NVIDIA)
def test_a_spin_on_a_volatile_load_stays_but_acquires_nothing(compiled, target: str) -> None:
    row = compiled["spin_on_volatile_load", target]
    (loop,) = loops(code_lines(row.asm["ptx"]))
    assert any("ld.volatile" in line for line in loop)
    assert "acquire" not in row.asm["ptx"] and "CCTL.IVALL" not in row.asm["sass"]


@pytest.mark.parametrize("target", NVIDIA)
def test_a_prefetch_asks_the_second_level_cache_for_every_line(compiled, target: str) -> None:
    row = compiled["prefetch", target]
    each_thread = BLOCK // (32 * row.num_warps)
    assert row.asm["ptx"].count("prefetch.global.L2") == each_thread
    assert row.instructions["CCTL"] == each_thread
    assert row.loads() == 0


@pytest.mark.parametrize("target", NVIDIA)
def test_the_clock_is_read_each_time(compiled, target: str) -> None:
    assert compiled["two_clocks", target].asm["ptx"].count("%globaltimer") == 2


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_a_dependent_launch_lets_go_and_then_waits_before_it_reads(compiled, target: str) -> None:
    lines = code_lines(compiled["dependent", target].asm["ptx"])
    let_go, wait, read = (
        first(pattern, lines)
        for pattern in (r"griddepcontrol\.launch_dep", r"griddepcontrol\.wait", r"\bld\.global")
    )
    assert let_go < wait < read


def test_on_gfx942_a_wait_acquires_in_its_loop_and_a_signal_releases(compiled) -> None:
    lines = code_lines(compiled["wait_then_read", "gfx942"].asm["amdgcn"])
    inside = [line for loop in loops(lines) for line in loop]
    assert any(line.startswith("buffer_inv sc1") for line in inside)
    lines = code_lines(compiled["store_then_signal", "gfx942"].asm["amdgcn"])
    store, barrier = first(r"buffer_store|global_store", lines), first(r"s_barrier", lines)
    assert store < barrier < first(r"buffer_wbl2 sc1", lines) < first(r"global_atomic", lines)


def test_on_gfx942_no_wave_waits_for_its_stores_before_the_barrier(compiled) -> None:
    """Why we claim that kernels with signals compile for AMD, and not that they run: the wave that
    releases waits for its own stores (vmcnt), nobody for those of the others."""
    lines = code_lines(compiled["store_then_signal", "gfx942"].asm["amdgcn"])
    between = lines[first(r"buffer_store|global_store", lines) : first(r"s_barrier", lines)]
    assert not any("vmcnt" in line for line in between)


def test_rounding_in_hardware_is_one_instruction(compiled) -> None:
    for target in ("sm_80", "sm_90", "sm_100"):
        assert "cvt.rn.bf16" in compiled["round_to", target].asm["ptx"]
