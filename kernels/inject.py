"""The start of a loop model's iteration: the state decays and the input is added.

    out[t] = h[t] · decay + term[t]          h [T, D], decay float32 [D], term float32 [T, D]

In float32, rounded once: in bfloat16 a decay above 0.998 would be 1, and the term would be lost
beside a large state (https://arxiv.org/abs/2604.12946, section 4.1; `minifer.parcae.injection`).
torch writes a cast, a product, a sum and a cast: four launches, of which the middle ones hand two
float32 matrices to each other through memory. Here it is one launch that reads h and the term and
writes the result. The term, Δ · (B e), is the same in every iteration, so its product with B is
made once a token and is not this kernel's work.

Price: a launch an iteration for about 9 KB a token (D = 768), which takes less time than the launch
itself. The norm that the first block applies to the result stays with the product after it
(`norm_gemv`), which reads the row anyway; the row itself is needed for the residual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import NVIDIA, TARGETS, AotCase
from minifer.kernels.checks import check_range, check_tensor
from minifer.kernels.compat import (
    INTERPRETED,
    launch_dependents,
    launch_options,
    to_dtype,
    wait_for_launcher,
)
from minifer.perf.costs import ElementBytes, OpCost


def inject_reference(h: Tensor, decay: Tensor, term: Tensor) -> Tensor:
    """The definition: h, term [T, D], decay [D] → [T, D] of h's dtype, computed in the widest."""
    return (h * decay + term).to(h.dtype)


@triton.jit
def inject_kernel(
    H, DECAY, TERM, OUT, rows, h_stride, term_stride,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows × WIDTH columns a program. *_stride: between rows; OUT is dense."""
    if PDL:  # nothing may be read before: the decay, too, is computed anew in every iteration
        launch_dependents()
        wait_for_launcher()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    row = row.to(tl.int64)[:, None]
    decay = tl.load(DECAY + column, mask=column < D, other=0.0)
    h = tl.load(H + row * h_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    term = tl.load(TERM + row * term_stride + column[None, :], mask=inside, other=0.0)
    x = h * decay[None, :] + term
    tl.store(OUT + row * D + column[None, :], to_dtype(x, OUT.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """What the kernel is compiled for."""

    rows: int  # of one program
    width: int  # columns of one program, a power of two
    num_warps: int


def inject_tiles(D: int) -> Tiles:
    """About 1,024 numbers a program, a multiple of 256 columns wide as all published models are.
    Not measured on a GPU yet."""
    width = min(triton.next_power_of_2(D), 256)
    return Tiles(1024 // width, width, 4)


def interpreter_tiles(D: int, rows: int) -> Tiles:
    """All rows at once, up to a million numbers."""
    width = min(triton.next_power_of_2(D), 2**20)
    return Tiles(min(2**20 // width, triton.next_power_of_2(rows)), width, 1)


def inject(
    h: Tensor, decay: Tensor, term: Tensor, *, pdl: bool = False, tiles: Tiles | None = None
) -> Tensor:
    """h [T, D] · decay [D] + term [T, D] → [T, D], contiguous, of h's dtype.

    decay and term are float32. The last dimensions of h and term must be dense. pdl: programmatic
    dependent launch, compute capability 9.0 and newer (see the package's words). Raises
    `ValueError` for shapes, dtypes or devices that do not fit.
    """
    check_tensor("h", h, [None, None], contiguous=False)
    T, D = h.shape
    check_range("the last dimension of h", D, 1)
    check_tensor("decay", decay, [D], [torch.float32], like=h)
    check_tensor("term", term, [T, D], [torch.float32], like=h, contiguous=False)
    out = torch.empty((T, D), dtype=h.dtype, device=h.device)
    if T == 0:
        return out
    if tiles is None:
        tiles = interpreter_tiles(D, T) if INTERPRETED.value else inject_tiles(D)
    grid = (triton.cdiv(T, tiles.rows), triton.cdiv(D, tiles.width))
    inject_kernel[grid](
        h, decay, term, out, T, h.stride(0), term.stride(0),
        D=D, ROWS=tiles.rows, WIDTH=tiles.width, PDL=pdl,
        **launch_options(tiles.num_warps, 1, pdl),
    )  # fmt: skip
    return out


def inject_cost(rows: int, D: int, *, element: ElementBytes | None = None) -> OpCost:
    """Of one iteration over rows × D numbers. The decay counts as a weight, the term as an
    activation; both are float32 whatever the model is."""
    e = element if element is not None else ElementBytes()
    return OpCost("inject", 2 * rows * D, 4 * D, 0, rows * D * (2 * e.activation + 4))


def aot_cases() -> list[AotCase]:
    """The narrowest, an odd and the widest of the published models, and the bundled one."""
    cases = []
    for D, dtype, pdl in (
        (768, "bf16", False),
        (1280, "bf16", False),
        (1536, "bf16", False),
        (128, "bf16", False),
        (768, "fp32", False),
        (768, "bf16", True),
    ):
        signature = {"H": f"*{dtype}", "DECAY": "*fp32", "TERM": "*fp32", "OUT": f"*{dtype}"}
        signature |= dict.fromkeys(("rows", "h_stride", "term_stride"), "i32")
        rows, width, warps = inject_tiles(D)
        cases.append(
            AotCase(
                f"{dtype} D={D}{' pdl' if pdl else ''}",
                inject_kernel,
                signature,
                {"D": D, "ROWS": rows, "WIDTH": width, "PDL": pdl},
                num_warps=warps,
                num_stages=1,
                aligned=("h_stride", "term_stride"),
                targets=NVIDIA[1:] if pdl else TARGETS,
                options={"launch_pdl": True} if pdl else {},
            )
        )
    return cases
