"""What wrappers refuse: a kernel would read on regardless."""

import pytest
import torch

from minifer.kernels.checks import check_product, check_same, check_tensor

X, WEIGHT = torch.ones(3, 4), torch.ones(5, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.ones(4, 3).T}, r"x must be contiguous, got strides \(1, 3\)"),
        ({"x": torch.ones(3, 8)[:, :4]}, r"x must be contiguous, got strides \(8, 1\)"),
        ({"weight": torch.ones(4, 5).T}, "weight must be contiguous"),
        ({"weight": torch.ones(5, 3)}, r"weight must have shape \[any, 4\], got \[5, 3\]"),
        ({"bias": torch.ones(10)[::2]}, "bias must be contiguous"),
        ({"bias": torch.ones(5).half()}, "dtype must be the same for all, got x torch.float32"),
        ({"residual": torch.ones(5, 3).T}, "residual must be contiguous"),
        ({"residual": torch.ones(3, 5, device="meta")}, "residual must be on cpu, got meta"),
    ],
)
def test_operands_of_a_product(changes, words):
    operands = {"x": X, "weight": WEIGHT, "bias": None, "residual": None} | changes
    with pytest.raises(ValueError, match=words):
        check_product(*operands.values())


def test_rows_that_need_not_follow_each_other_are_dense_themselves():
    check_tensor("x", torch.ones(3, 8)[:, :4], [None, 4], contiguous=False)
    check_tensor("x", torch.ones(3, 1).expand(3, 1), [3, 1], contiguous=False)
    with pytest.raises(ValueError, match="the last dimension of x must be dense"):
        check_tensor("x", torch.ones(3, 8)[:, ::2], [None, 4], contiguous=False)


def test_what_differs_is_named():
    check_same("size", {"a": 1, "b": 1})
    with pytest.raises(ValueError, match="size must be the same for all, got a 1, b 2"):
        check_same("size", {"a": 1, "b": 2})
