"""Which kernel multiplies how many rows, and that all of them agree with torch."""

import pytest
import torch
from kernel_helpers import assert_rounded, random_tensor

from minifer.execution.backend import TorchBackend
from minifer.kernels import linear as products
from minifer.kernels.quantized_gemv import quantize_int8, quantized_gemv

EPS = 1e-5
CHOSEN = {
    "linear": {1: ["gemv"], 2: ["gemm_small"], 16: ["gemm_small"], 17: ["gemm"], 33: ["gemm"]},
    "norm_linear": {1: ["norm_gemv"], 16: ["norm_gemv"], 17: ["rms_norm", "gemm"]},
    "gated": {1: ["gate_up"], 16: ["gate_up"], 17: ["rms_norm", "gemm", "silu_mul"]},
}


def operands(rows, width=48, out=40):
    x, norm = random_tensor(rows, width, seed=1), random_tensor(width, seed=2)
    return x, norm, random_tensor(out, width, seed=3), random_tensor(out, seed=4)


def call(name, rows, bias=True, **more):
    x, norm, weight, b = operands(rows)
    b = b if bias else None
    if name == "linear":
        return products.linear(x, weight, b, **more)
    return getattr(products, name)(x, norm, EPS, weight, b, **more)


@pytest.mark.parametrize(
    ("name", "rows"), [(name, rows) for name, table in CHOSEN.items() for rows in table]
)
def test_rows_choose_the_kernel(name, rows, monkeypatch):
    called = []

    def watch(kernel):
        run = getattr(products, kernel)

        def watched(*args, **more):
            called.append(kernel)
            assert more["pdl"] is True
            return run(*args, **more)

        monkeypatch.setattr(products, kernel, watched)

    for kernel in ("gemv", "gemm_small", "gemm", "norm_gemv", "gate_up", "rms_norm", "silu_mul"):
        watch(kernel)
    call(name, rows, pdl=True)
    assert called == CHOSEN[name][rows]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 33])
def test_all_rows_agree_with_torch(rows, bias):
    x, norm, weight, b = (a.double() for a in operands(rows))
    b = b if bias else None
    torch_backend = TorchBackend()
    residual = random_tensor(rows, 40, seed=5)
    y = call("linear", rows, bias, residual=residual)
    exact = torch_backend.linear(x, weight, b, residual.double())
    terms = x.abs() @ weight.abs().T + 2 + residual.double().abs()
    assert_rounded(y, exact, terms)

    h = norm * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    terms = 2 * h.abs() @ weight.abs().T + 2
    exact = h @ weight.T + (0 if b is None else b)
    assert_rounded(call("norm_linear", rows, bias), exact, terms)
    gate, up = terms.chunk(2, dim=-1)
    assert_rounded(call("gated", rows, bias), torch_backend.silu_mul(exact), 4 * gate * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_give_no_rows(dtype):
    """A step of prompt chunks alone asks for the logits of nobody."""
    x, norm, weight, bias = (a.to(dtype) for a in operands(0))
    quantized = quantize_int8(random_tensor(40, 48, seed=1))
    for out, width in (
        (products.linear(x, weight, bias, x.new_empty(0, 40)), 40),
        (products.norm_linear(x, norm, EPS, weight, bias), 40),
        (products.gated(x, norm, EPS, weight, bias), 20),
        (products.gemm(x, weight, bias), 40),
        (products.silu_mul(x), 24),
        (products.rms_norm(x, norm, EPS), 48),
        (quantized_gemv(x, *quantized), 40),
    ):
        assert out.shape == (0, width) and out.dtype == dtype


@pytest.mark.parametrize("rows", [1, 2, 17])
def test_a_weight_of_no_rows_gives_nothing(rows):
    x, norm, _, _ = operands(rows)
    weight = x.new_empty(0, x.shape[1])
    assert products.linear(x, weight).shape == (rows, 0)
    assert products.norm_linear(x, norm, EPS, weight).shape == (rows, 0)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_vector_is_refused(name):
    x, norm, weight, _ = operands(1)
    arguments = (x[0], weight) if name == "linear" else (x[0], norm, EPS, weight)
    with pytest.raises(ValueError, match=r"x must have shape \[any, any\]"):
        getattr(products, name)(*arguments)
