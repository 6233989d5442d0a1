"""The words of a block program: what `block_program` offers in place of `triton.language`.

Each function does what Triton's does, on `Block`s, and refuses what Triton's compiler refuses:
shapes that are no powers of two, and products of less than 16. Two things are stricter than in
Triton's own interpreter, because a GPU is: a lane that is masked out and has no `other` holds NaN
(or a wild integer), and `tl.dot` rounds its float32 operands to TF32 unless
`input_precision="ieee"` (or `allow_tf32=False`, the older spelling).
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from minifer.course.block_trace import Access, Kind, Trace, short
from minifer.course.block_values import DTYPES, Block, Pointer, data_of, dtype_of, meet

WILD = -77  # what an undefined integer is
_LEAST_DOT = 16  # sides of a product: what tensor cores take


class AccessError(IndexError):
    """A program touched memory that is not its tensor's; the message says which, and where.

    element: counted from the tensor's first one.
    """

    def __init__(self, message: str, kind: Kind, tensor: str, element: int) -> None:
        super().__init__(message)
        self.kind, self.tensor, self.element = kind, tensor, element


@dataclass
class Launch:
    """What runs now. program: its place in the grid."""

    trace: Trace
    program: tuple[int, int, int] = (0, 0, 0)


class Language:
    """The functions; `tl` in a simulated kernel. launch: set by whoever runs the programs.

    strict: as a GPU may be; without it, as Triton's interpreter: what lies beside a tensor in its
    storage may be touched, undefined lanes are 0, products exact.
    """

    launch: Launch | None = None
    strict: bool = True
    constexpr: Any = type("constexpr", (), {})

    def __init__(self) -> None:
        names = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
        for name, dtype in DTYPES.items():
            setattr(self, name, dtype)
        for name, ours in names.items():
            setattr(self, name, DTYPES[ours])

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(n for n in dir(type(self)) if not n.startswith("_")))
        raise AttributeError(f"the block program knows no tl.{name}; it knows {known}")

    # -- where am I?

    def program_id(self, axis: int) -> Block:
        return Block(torch.tensor(self._now().program[axis], dtype=torch.int32))

    def num_programs(self, axis: int) -> Block:
        return Block(torch.tensor(self._now().trace.grid[axis], dtype=torch.int32))

    def range(self, *bounds: Any, **_: Any) -> Any:
        return range(*(int(bound) for bound in bounds))

    def static_range(self, *bounds: Any, **_: Any) -> Any:
        return self.range(*bounds)

    def cdiv(self, a: Any, b: Any) -> Any:
        return cdiv(a, b)

    # -- blocks

    def arange(self, start: int, end: int) -> Block:
        _check_constant("arange", start, end)
        _check_power("the length of an arange", end - start)
        return Block(torch.arange(start, end, dtype=torch.int32))

    def full(self, shape: Any, value: Any, dtype: Any) -> Block:
        for side in shape:
            _check_constant("a shape", side)
            _check_power("a side of a block", side)
        given = data_of(value)
        block = torch.zeros(tuple(shape), dtype=dtype_of(dtype).torch_dtype)
        return Block(block + given.to(block.dtype) if isinstance(given, Tensor) else block + given)

    def zeros(self, shape: Any, dtype: Any) -> Block:
        return self.full(shape, 0, dtype)

    def cast(self, block: Block, dtype: Any) -> Block:
        return block.to(dtype)

    def where(self, condition: Block, a: Any, b: Any) -> Block:
        a, b = meet(a, b)
        like = next((x for x in (a, b) if isinstance(x, Tensor)), None)
        dtype = like.dtype if like is not None else torch.float32
        a, b = (torch.as_tensor(x, dtype=dtype) for x in (a, b))
        return Block(torch.where(data_of(condition).bool(), a, b))

    def maximum(self, a: Any, b: Any) -> Block:
        return Block(torch.maximum(*map(torch.as_tensor, meet(a, b))))

    def minimum(self, a: Any, b: Any) -> Block:
        return Block(torch.minimum(*map(torch.as_tensor, meet(a, b))))

    def max(self, block: Block, axis: int | None = None) -> Block:
        return Block(block.data.max() if axis is None else block.data.amax(axis))

    def min(self, block: Block, axis: int | None = None) -> Block:
        return Block(block.data.min() if axis is None else block.data.amin(axis))

    def sum(self, block: Block, axis: int | None = None) -> Block:
        data = block.data.int() if block.data.dtype == torch.bool else block.data
        return Block((data.sum() if axis is None else data.sum(axis)).to(data.dtype))

    def trans(self, block: Block) -> Block:
        return block.T

    def dot(self, a: Block, b: Block, acc: Block | None = None, input_precision: str | None = None,
            allow_tf32: bool | None = None, **_: Any) -> Block:  # fmt: skip
        for side in (*a.shape, b.shape[-1]):
            if side < _LEAST_DOT:
                raise ValueError(f"tl.dot takes sides of {_LEAST_DOT} and more, got {side}: "
                                 "pad, or multiply and tl.sum")  # fmt: skip
        left, right = a.data, b.data
        if left.dtype != right.dtype:
            raise ValueError(f"tl.dot takes two blocks of one dtype, got {a.dtype} and {b.dtype}")
        exact = input_precision == "ieee" or (input_precision is None and allow_tf32 is False)
        if self.strict and left.dtype == torch.float32 and not exact:
            left, right = _tf32(left), _tf32(right)
        product = left.float() @ right.float()
        return Block(product if acc is None else acc.data + product)

    # -- memory

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Block:
        offsets, active = self._touch("load", pointer, mask)
        tensor = pointer.memory.tensor
        if other is None:
            other = torch.nan if tensor.is_floating_point() else WILD
            other = other if self.strict else 0
        filled = torch.as_tensor(data_of(other)).to(tensor.dtype).expand(offsets.shape).clone()
        filled[active] = pointer.memory.flat[offsets[active]]
        return Block(filled)

    def store(self, pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
        offsets, active = self._touch("store", pointer, mask)
        given = torch.as_tensor(data_of(value)).to(pointer.memory.tensor.dtype)
        pointer.memory.flat[offsets[active]] = given.expand(offsets.shape)[active]

    def _touch(self, kind: Kind, pointer: Any, mask: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(pointer, Pointer):
            raise TypeError(f"tl.{kind} takes a pointer (X + offsets), got {pointer!r}")
        now, frame = self._now(), _caller()
        let = torch.tensor(True) if mask is None else torch.as_tensor(data_of(mask)).bool()
        offsets, active = torch.broadcast_tensors(pointer.offsets.long(), let)
        access = Access(
            now.program, kind, pointer.memory, offsets.clone(), active.clone(), frame.f_lineno
        )
        _check_inside(access, frame, strict=self.strict)
        now.trace.accesses.append(access)
        return offsets, active

    def _now(self) -> Launch:
        if self.launch is None:
            raise RuntimeError("this belongs inside a kernel: launch it with kernel[grid](…)")
        return self.launch


def _elementwise(name: str, function: Callable[[Tensor], Tensor]) -> None:
    def apply(self: Language, block: Block) -> Block:
        data = torch.as_tensor(data_of(block))
        if name != "abs" and data.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"tl.{name} takes float32, got {Block(data).dtype}: .to(tl.float32) first"
            )
        return Block(function(data))

    setattr(Language, name, apply)


for _name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "abs", "sin", "cos", "sigmoid"):
    _elementwise(_name, getattr(torch, _name))


def cdiv(a: Any, b: Any) -> Any:
    """a / b rounded up, of numbers and of blocks."""
    return (a + (b - 1)) // b


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0


def _tf32(x: Tensor) -> Tensor:
    """Rounded to the 10 bits of mantissa that a GPU's tensor cores keep of a float32."""
    bits = x.view(torch.int32)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def _check_inside(access: Access, frame: FrameType, *, strict: bool) -> None:
    owned, touched = access.memory.owned, access.touched
    fine = (touched >= 0) & (touched < owned.numel())
    if strict:
        fine[fine.clone()] = owned[touched[fine]]
    if bool(fine.all()):
        return
    memory, wrong = access.memory, touched[~fine]
    element = int(wrong[0]) - int(memory.tensor.storage_offset())
    line = linecache.getline(frame.f_code.co_filename, access.line).strip()
    raise AccessError(
        f"program {short(access.program)} {access.kind}s {memory.name}[{element}]: "
        f"{wrong.numel()} of {touched.numel()} lanes lie outside {memory.name}, which has "
        f"{memory.tensor.numel()} elements" + (f"\n    {line}" if line else ""),
        access.kind,
        memory.name,
        element,
    )


def _caller() -> FrameType:
    """The frame of the kernel."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    return frame


def _check_constant(what: str, *values: Any) -> None:
    for value in values:
        if isinstance(value, Block):
            raise ValueError(f"{what} must be known when the kernel is compiled: a tl.constexpr")


def _check_power(what: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError(f"{what} must be a power of two, got {value}")
