"""What every kernel wrapper checks before it launches: a kernel itself would read on regardless."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] = FLOATS,
    like: Tensor | None = None,
    contiguous: bool = True,
) -> None:
    """Raises `ValueError` unless `tensor` has this shape (None: any size), one of the dtypes, the
    device of `like`, and rows that lie one after the other (contiguous=False: only their last
    dimension must be dense)."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    right = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not right:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} must be one of {allowed}, got {tensor.dtype}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if not contiguous and tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} must be dense, got {tensor.stride()}")


def check_same(name: str, values: Mapping[str, object]) -> None:
    """Raises `ValueError` unless all named values agree: check_same("dtype", {"x": …, "y": …})."""
    if len(set(values.values())) > 1:
        got = ", ".join(f"{key} {value}" for key, value in values.items())
        raise ValueError(f"{name} must be the same for all, got {got}")


def check_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, most_rows: int = 0
) -> None:
    """x [T, in], weight [out, in], bias [out], residual [T, out]: one dtype, one device, dense.
    Raises `ValueError` for anything else, and for T of more than most_rows (0: any T)."""
    check_tensor("x", x, [None, None])
    check_tensor("weight", weight, [None, x.shape[1]], like=x)
    tensors = {"x": x, "weight": weight}
    if bias is not None:
        check_tensor("bias", bias, [weight.shape[0]], like=x)
        tensors["bias"] = bias
    if residual is not None:
        check_tensor("residual", residual, [x.shape[0], weight.shape[0]], like=x)
        tensors["residual"] = residual
    check_same("dtype", {name: tensor.dtype for name, tensor in tensors.items()})
    check_range("rows of x", x.shape[0], 0, most_rows or None)
    check_range("the last dimension of x", x.shape[1], 1)


def check_norm(norm: Tensor, x: Tensor) -> None:
    """norm [D] for x [..., D], in its dtype and on its device. Raises `ValueError` otherwise."""
    check_tensor("norm", norm, [x.shape[-1]], like=x)
    check_same("dtype", {"x": x.dtype, "norm": norm.dtype})


def check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raises `ValueError` unless least ≤ value ≤ most."""
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limit}, got {value}")
