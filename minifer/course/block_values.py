"""What a block program computes with: blocks of numbers, pointers, and dtypes, on torch.

The arithmetic follows Triton where the two differ: integer division rounds towards 0, two blocks
meet in the wider dtype (a Python number never widens one), and a block has no truth value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifer.course.block_trace import Memory


@dataclass(frozen=True)
class DType:
    """Stands for one of `triton.language`'s dtypes; equal to what has the same name."""

    name: str
    torch_dtype: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return self.torch_dtype.itemsize * 8

    def __eq__(self, other: object) -> bool:
        return str(other) == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


_TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int1": torch.bool,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}
DTYPES = {name: DType(name, dtype) for name, dtype in _TORCH.items()}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


def dtype_of(dtype: Any) -> DType:
    """Ours for a dtype of Triton's, by its name. Raises `TypeError` for what is none."""
    found = DTYPES.get(str(dtype))
    if found is None:
        raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return found


class Block:
    """A block of numbers, as `tl.tensor` is: any number of axes, all powers of two."""

    __slots__ = ("data",)

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> DType:
        return DTYPES[_NAMES[self.data.dtype]]

    @property
    def T(self) -> Block:  # noqa: N802  # Triton's name
        return Block(self.data.mT)

    def to(self, dtype: Any, bitcast: bool = False) -> Block:
        wanted = dtype_of(dtype).torch_dtype
        return Block(self.data.view(wanted) if bitcast else self.data.to(wanted))

    def __getitem__(self, index: Any) -> Block:
        parts = index if isinstance(index, tuple) else (index,)
        if any(part is not None and part != slice(None) for part in parts):
            raise ValueError(f"a block takes only `:` and `None` as an index, got {index!r}")
        return Block(self.data[index])

    def __bool__(self) -> bool:
        if self.data.numel() != 1:
            raise ValueError(
                f"a block of shape {list(self.shape)} has no truth value: use & | ~ instead of "
                "and, or, not, and tl.where instead of if"
            )
        return bool(self.data)

    def __index__(self) -> int:
        if self.data.numel() != 1 or self.data.is_floating_point():
            raise TypeError(f"a block of shape {list(self.shape)} of {self.dtype} is no integer")
        return int(self.data)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Block({self.data.tolist()}, {self.dtype})"

    # `_operators` below fills these in; they are named here for readers and type checkers.
    __add__: Callable[[Any, Any], Any]
    __sub__: Callable[[Any, Any], Any]
    __mul__: Callable[[Any, Any], Any]

    def __invert__(self) -> Block:
        return Block(~self.data)

    def __neg__(self) -> Block:
        return Block(-self.data)


class Pointer:
    """Where a tensor begins, plus offsets in elements: an address for each lane."""

    __slots__ = ("memory", "offsets")

    def __init__(self, memory: Memory, offsets: Tensor) -> None:
        self.memory, self.offsets = memory, offsets

    @property
    def dtype(self) -> PointerType:
        return PointerType(DTYPES[_NAMES[self.memory.tensor.dtype]])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.offsets.shape)

    def __add__(self, other: Any) -> Pointer:
        moved = data_of(other)
        if isinstance(moved, float) or (isinstance(moved, Tensor) and moved.is_floating_point()):
            raise TypeError(f"an offset must be an integer, got {other!r}")
        return Pointer(self.memory, self.offsets + moved)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self + -other

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, Block(self.offsets)[index].data)

    def __repr__(self) -> str:
        return f"{self.memory.name} + {self.offsets.tolist()}" if self.shape else self.memory.name


@dataclass(frozen=True)
class PointerType:
    """element_ty: dtype of what the pointer points to."""

    element_ty: DType


def data_of(value: Any) -> Any:
    """The tensor of a block, and a number as it is."""
    if isinstance(value, Block):
        return value.data
    if isinstance(value, int | float | Tensor):
        return value
    raise TypeError(f"a block or a number is wanted here, got {type(value).__name__}")


def meet(a: Any, b: Any) -> tuple[Any, Any]:
    """Both as data, two blocks in their wider dtype."""
    a, b = data_of(a), data_of(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype:
        wide = torch.promote_types(a.dtype, b.dtype)
        return a.to(wide), b.to(wide)
    return a, b


def _floor_divide(a: Any, b: Any) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _divide(a: Any, b: Any) -> Tensor:
    """True division; of whole numbers, in float32."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return torch.true_divide(a, b).to(_float_of(a, b))


def _float_of(a: Tensor, b: Tensor) -> torch.dtype:
    wide = torch.result_type(a, b)
    return wide if wide.is_floating_point else torch.float32


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": _divide,
    "floordiv": _floor_divide,
    "mod": lambda a, b: a - _floor_divide(a, b) * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "lshift": lambda a, b: a << b,
    "rshift": lambda a, b: a >> b,
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


def _operator(function: Callable[[Any, Any], Any], *, swapped: bool = False) -> Any:
    def method(self: Block, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = meet(other, self) if swapped else meet(self, other)
        return Block(function(a, b))

    return method


def _operators() -> None:
    for name, function in _BINARY.items():
        setattr(Block, f"__{name}__", _operator(function))
        setattr(Block, f"__r{name}__", _operator(function, swapped=True))
    for name, function in _COMPARISONS.items():
        setattr(Block, f"__{name}__", _operator(function))


_operators()
