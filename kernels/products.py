"""What the kernels that multiply by a weight matrix share: tiles, masks, costs, shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import TARGETS, AotCase
from minifer.kernels.compat import INTERPRETED, num_programs_at_once, to_dtype
from minifer.perf.costs import OpCost


class Tiles(NamedTuple):
    """What a kernel is compiled for; num_stages − 1 tiles of weights are on their way at a time."""

    rows: int  # BN, of weights
    columns: int  # BK, of weights
    num_stages: int
    num_warps: int


class Gpu(NamedTuple):
    """What a choice of tiles depends on. programs: streaming multiprocessors or compute units."""

    programs: int
    hip: bool = False


TileChoice = Callable[[int, int, int, Gpu], Tiles]  # (out, in, bytes of an element, GPU)


@triton.jit
def load_tile(P, rows, columns, num_rows, num_columns, ONCE: tl.constexpr = False):
    """Elements (rows, columns) of a dense matrix [num_rows, num_columns]; what is outside is 0 and
    not read. rows and columns are tensors that broadcast against each other. ONCE: what is read
    once in a step, as a weight in decoding, is to leave L2 first.

    The offset of a row is 64 bits wide: the heads of big vocabularies pass 2³¹ weights.
    """
    inside = (rows < num_rows) & (columns < num_columns)
    pointers = P + rows.to(tl.int64) * num_columns + columns
    if ONCE:
        return tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_rows(y, n, N, BIAS, RESIDUAL, OUT):
    """OUT[n] ← y [BN] float32 (+ BIAS[n]) (+ RESIDUAL[n]), rounded once."""
    inside = n < N
    if BIAS is not None:
        y += tl.load(BIAS + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL is not None:
        y += tl.load(RESIDUAL + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + n, to_dtype(y, OUT.dtype.element_ty), mask=inside)


def interpreter_tiles(out: int, width: int) -> Tiles:
    """Few, big tiles: in the interpreter an operation costs the same whatever its size."""
    columns = min(triton.next_power_of_2(width), 4096)
    rows = min(triton.next_power_of_2(out), (1 << 20) // columns)
    return Tiles(rows, columns, 1, 1)


def gpu_of(tensor: Tensor) -> Gpu:
    """The device of a tensor, as choices of tiles ask for it."""
    return Gpu(num_programs_at_once(tensor.device), bool(torch.version.hip))


def choose_tiles(choice: TileChoice, weight: Tensor) -> Tiles:
    """The tiles for weight [out, in] on its device: `choice`, or big ones in the interpreter."""
    out, width = weight.shape
    if INTERPRETED.value:
        return interpreter_tiles(out, width)
    return choice(out, width, weight.element_size(), gpu_of(weight))


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What `tl.dot` multiplies: 16-bit operands on tensor cores, else float32. In the interpreter
    always float32, because its bfloat16 products are wrong."""
    if INTERPRETED.value or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def linear_cost(name: str, rows: int, width: int, out: int, element_bytes: float = 2.0) -> OpCost:
    """x [rows, width] · weight [out, width]: what must be read and written once."""
    return OpCost(
        name,
        flops=2 * rows * out * width,
        weight_bytes=out * width * element_bytes,
        activation_bytes=rows * (width + out) * element_bytes,
    )


# [out, in] of a layer's products and the head: Llama-3.2-1B, SmolLM2-135M.
SHAPES = {
    "qkv": ((3072, 2048), (960, 576)),
    "output": ((2048, 2048), (576, 576)),
    "intermediate": ((8192, 2048), (1536, 576)),  # F: the gate or up
    "down": ((2048, 8192), (576, 1536)),
    "head": ((128256, 2048), (49152, 576)),
}
LINEAR = ("qkv", "output", "down", "head")
# The largest member of each family: A100, H100 and H200, B200, MI300X.
GPUS = {"sm_80": Gpu(108), "sm_90": Gpu(132), "sm_100": Gpu(148), "gfx942": Gpu(304, hip=True)}
PDL_TARGETS = ("sm_90", "sm_100")
# float16 compiles to the same but for its conversions.
DTYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}
_ADDED = ("BIAS", "RESIDUAL")


def _chosen_tiles(
    choice: TileChoice, names: tuple[str, ...]
) -> Iterator[tuple[str, Tiles, tuple[str, ...]]]:
    """What a wrapper chooses for the `SHAPES` of these names: element type, tiles, targets."""
    found: dict[tuple[str, Tiles], list[str]] = {}
    shapes = [shape for name in names for shape in SHAPES[name]]
    for kind, dtype in DTYPES.items():
        for target in TARGETS:
            for out, width in shapes:
                tiles = choice(out, width, dtype.primitive_bitwidth // 8, GPUS[target])
                targets = found.setdefault((kind, tiles), [])
                if target not in targets:
                    targets.append(target)
    for (kind, tiles), targets in found.items():
        yield kind, tiles, tuple(targets)


def product_cases(
    kernel: Any, choice: TileChoice, names: tuple[str, ...], **constants: Any
) -> list[AotCase]:
    """A case for every choice of tiles; the first also with bias and residual, and as a dependent
    launch. The kernel's arguments are named as in `gemv_kernel`."""
    return [
        product_case(kernel, kind, f"{tiles.rows}x{tiles.columns}", tiles, targets, variant, {
            "BN": tiles.rows, "BK": tiles.columns, **constants,
        })
        for number, (kind, tiles, targets) in enumerate(_chosen_tiles(choice, names))
        for variant in (("plain",) if number else ("plain", "added", "pdl"))
    ]  # fmt: skip


def product_case(
    kernel: Any,
    kind: str,
    name: str,
    tiles: Any,
    targets: tuple[str, ...],
    variant: str,
    constants: dict[str, Any],
) -> AotCase:
    """One case. Pointers have the names below, numbers are N, K, T and eps; what else the kernel
    takes stands in `constants`. variant: "plain", "added" (bias and residual) or "pdl"."""
    absent = _ADDED if variant != "added" else ()
    pointers = {"X", "NORM", "W", "OUT", *_ADDED}.difference(absent)
    types = dict.fromkeys(pointers, f"*{kind}") | dict.fromkeys(("N", "K", "T"), "i32")
    types["eps"] = "fp32"
    fixed = {
        **dict.fromkeys(absent),
        "STAGES": tiles.num_stages,
        "DOT": DTYPES[kind],
        "PDL": variant == "pdl",
        **constants,
    }
    return AotCase(
        f"{kind} {name} {variant}".removesuffix(" plain"),
        kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {name: fixed[name] for name in kernel.arg_names if name in fixed},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        aligned=("N", "K"),
        targets=tuple(t for t in targets if variant != "pdl" or t in PDL_TARGETS),
    )
