"""Wrong attention kernels, and test suites that let them through or do not.

One kernel of tiled attention and sixteen changes of it, each of which a person made or could have
made. Four suites, each with all that the one before it asks:

    usual     the shape of a well-known public course's test: powers of two, one seed, rtol and
              atol of 1e-2
    ragged    lengths of 1, 31, 33, 100 and widths of 65 and 77, against float64, 1e-4
    large     queries 60 times as large: scores in the hundreds
    record    the same in the strict record: nothing outside of a tensor, no undefined lane

The first three run as Triton's interpreter would: what lies beside a tensor may be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from minifer.course.block_program import Kernel, simulate, tl, triton

SUITES = ("usual", "ragged", "large", "record")
_ROOM = 8192  # elements of zeros around a tensor, where what lies beside it may be touched
_USUAL, _AWKWARD = [(4, 128, 64)], [(1, 1, 16), (1, 31, 16), (1, 33, 65), (1, 100, 77)]

KERNEL = """\
def attention_kernel(Q, K, V, OUT, S, D, scale, causal,
                     BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    tile, head = tl.program_id(0), tl.program_id(1)
    t, c = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    rows = (t < S)[:, None] & (c < D)[None, :]
    at = (head * S + t)[:, None] * D + c[None, :]
    q = tl.load(Q + at, mask=rows, other=0.0)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        there = (s < S)[:, None] & (c < D)[None, :]
        key = (head * S + s)[:, None] * D + c[None, :]
        k = tl.load(K + key, mask=there, other=0.0)
        v = tl.load(V + key, mask=there, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (s < S)[None, :] & (t >= 0)[:, None]
        if causal:
            seen = seen & (s[None, :] <= t[:, None])
        x = tl.where(seen, x, -float("inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        p = tl.exp(x - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
        top = new_top
    tl.store(OUT + at, acc / total[:, None], mask=rows)
"""

# name → (what stands there, what stands there instead)
MISTAKES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "scale 1/√(D + 1)": ("* scale", "* scale * (D / (D + 1)) ** 0.5"),
        "inputs rounded to bfloat16": (
            "q = tl.load(Q + at, mask=rows, other=0.0)",
            "q = tl.load(Q + at, mask=rows, other=0.0).to(tl.bfloat16).to(tl.float32)",
        ),
        "weights · values in bfloat16": (
            "tl.dot(p, v, ",
            "tl.dot(p.to(tl.bfloat16), v.to(tl.bfloat16), ",
        ),
        "no maximum subtracted": (
            "new_top = tl.maximum(top, tl.max(x, 1))",
            "top = new_top = tl.zeros([BLOCK], tl.float32)",
        ),
        "last ragged tile dropped": ("range(0, S, ", "range(0, max(S // BLOCK, 1) * BLOCK, "),
        "hidden scores −20": ('tl.where(seen, x, -float("inf"))', "tl.where(seen, x, -20.0)"),
        "causal ignored": ("if causal:", "if False:"),
        "own key hidden": ("s[None, :] <= t[:, None]", "s[None, :] < t[:, None]"),
        "mask transposed": ("s[None, :] <= t[:, None]", "s[None, :] >= t[:, None]"),
        "no rescaling": ("tl.exp(top - new_top)", "tl.full([BLOCK], 1.0, tl.float32)"),
        "only the sum rescaled": ("acc = acc * shrink[:, None] +", "acc = acc +"),
        "denominator + 0.1": ("acc / total[:, None]", "acc / (total + 0.1)[:, None]"),
        "values not masked": ("tl.load(V + key, mask=there, other=0.0)", "tl.load(V + key)"),
        "mask without other": ("V + key, mask=there, other=0.0", "V + key, mask=there"),
        "store without a mask": ("acc / total[:, None], mask=rows)", "acc / total[:, None])"),
        "products in TF32": (', input_precision="ieee") * scale', ") * scale"),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """mistake: "" for the right kernel. found: by each of `SUITES`."""

    mistake: str
    found: tuple[bool, ...]

    @property
    def first(self) -> str:
        """The first suite that finds it, "" for none."""
        return next((name for name, found in zip(SUITES, self.found, strict=True) if found), "")


def source(mistake: str = "") -> str:
    """The kernel with a mistake in it. Raises `ValueError` for an unknown one."""
    if not mistake:
        return KERNEL
    if mistake not in MISTAKES:
        raise ValueError(f"mistake must be one of {', '.join(MISTAKES)}, got {mistake!r}")
    old, new = MISTAKES[mistake]
    if KERNEL.count(old) != 1:
        raise ValueError(f"{mistake!r} must change one place of the kernel, {old!r} is no such")
    return KERNEL.replace(old, new)


def attention(mistake: str = "", *, strict: bool) -> Callable[..., Tensor]:
    """attend(q, k, v, causal), of [H, S, D] each: the kernel in the record, one launch."""
    names: dict[str, Any] = {"tl": tl, "triton": triton}
    exec(source(mistake) + _LAUNCH, names)
    names["kernel"] = Kernel(names["attention_kernel"])

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q, k, v = (_roomy(x) for x in (q, k, v))
        out = _roomy(torch.full_like(q, torch.nan))
        simulate(names["launch"], q, k, v, out, causal, strict=strict)
        return out

    return attend


def suites_find(attend: Callable[..., Callable[..., Tensor]]) -> tuple[bool, ...]:
    """What each suite says of an implementation: True where it fails.

    attend(strict=…): the function under test, as `attention` returns it.
    """
    usual = _fails(attend(strict=False), _USUAL, 1.0, 1e-2)
    ragged = usual or _fails(attend(strict=False), _AWKWARD, 1.0, 1e-4)
    large = ragged or _fails(attend(strict=False), _AWKWARD[1:3], 60.0, 2e-4)
    record = large or _fails(attend(strict=True), _AWKWARD, 1.0, 1e-4)
    return usual, ragged, large, record


def verdicts() -> list[Verdict]:
    """The right kernel first, then all mistakes."""
    return [Verdict(name, suites_find(partial(attention, name))) for name in ("", *MISTAKES)]


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """float64 attention of [H, S, D]."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v


def _fails(
    attend: Callable[..., Tensor],
    shapes: list[tuple[int, int, int]],
    scale: float,
    near: float,
) -> bool:
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        q, k, v = (torch.randn(*shape, generator=generator) for _ in range(3))
        for causal in (False, True):
            try:
                got = attend(q * scale, k, v, causal).double()
            except (IndexError, ValueError):
                return True
            if not torch.allclose(got, exact(q * scale, k, v, causal), rtol=near, atol=near):
                return True  # a NaN is not close either
    return False


def _roomy(x: Tensor) -> Tensor:
    """A copy with zeros before and behind it in its storage."""
    memory = torch.zeros(x.numel() + 2 * _ROOM)
    view = memory[_ROOM : _ROOM + x.numel()].view(x.shape)
    view.copy_(x)
    return view


_LAUNCH = """

def launch(q, k, v, out, causal):
    H, S, D = q.shape
    width = max(triton.next_power_of_2(D), 16)
    grid = (triton.cdiv(S, 32), H)
    kernel[grid](q, k, v, out, S, D, D**-0.5, causal, BLOCK=32, WIDTH=width)
"""
