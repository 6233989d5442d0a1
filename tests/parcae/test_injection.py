"""The three injections: what is kept of the state, what is added, and in which precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop_models import dense_batch, dense_logits, loop_config, loop_model, some_tokens

from minifer.execution.backend import TorchBackend
from minifer.execution.reference import DenseBackend
from minifer.parcae.injection import KINDS, DiagonalInjection
from minifer.parcae.model import Parcae

BACKEND = TorchBackend()


def diagonal(A_log: float, dt_bias: float, width=4, dtype=torch.float32) -> DiagonalInjection:
    injection = DiagonalInjection(width, dtype, "cpu")
    with torch.no_grad():
        injection.A_log.fill_(A_log)
        injection.dt_bias.fill_(dt_bias)
        torch.nn.init.eye_(injection.B)
    return injection


def slow_decay(decay: float, **kind) -> DiagonalInjection:
    """A_log = 0, so that Δ = −ln decay."""
    return diagonal(0.0, math.log(math.expm1(-math.log(decay))), **kind)


@torch.no_grad()
@given(A_log=st.floats(-6, 3), dt_bias=st.floats(-6, 3))
def test_the_decay_lies_between_0_and_1_and_is_its_formula(A_log, dt_bias):
    """In this range Δ · exp(A_log) is above 6e-6 (float32 tells it from 0) and below 62."""
    injection = diagonal(A_log, dt_bias)
    A, B = injection.discretise()
    assert ((A > 0) & (A < 1)).all()
    A_log, dt_bias = float(injection.A_log[0]), float(injection.dt_bias[0])  # as float32 has them
    delta = math.log1p(math.exp(dt_bias))
    np.testing.assert_allclose(A, math.exp(-delta * math.exp(A_log)), rtol=1e-5)
    np.testing.assert_allclose(B.diag(), delta, rtol=1e-6)
    assert injection.spectral_radius() == A.max() < 1


@torch.no_grad()
def test_float32_itself_ends_where_a_decay_is_one():
    """ "Below 1 by construction" is said of real numbers: Δ · exp(A_log) of 3e-8 is lost."""
    assert diagonal(-8.0, -8.0).spectral_radius() < 1  # 1.1e-7
    assert diagonal(-10.0, -8.0).spectral_radius() == 1.0  # 1.5e-8


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_h_plus_b_e(kind):
    injection = loop_model(injection=kind).adapter
    h, e = torch.randn(2, 7, 36, generator=torch.Generator().manual_seed(0))
    A, B = (torch.diag(x) if x.dim() == 1 else x for x in injection.discretise())
    expected = h.double() @ A.double().T + e.double() @ B.double().T
    out = injection(h, injection.input_term(e), BACKEND)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_spectral_radius_is_the_growth_of_the_bare_system(kind):
    injection = loop_model(injection=kind).adapter
    A = injection.retention().double()
    A = torch.diag(A) if A.dim() == 1 else A
    expected = max(abs(np.linalg.eigvals(A.numpy())))
    assert injection.spectral_radius() == pytest.approx(expected, rel=1e-5)
    # Gelfand: ‖Aⁿ‖^(1/n) → ρ, whatever the norm
    power = torch.linalg.matrix_power(A, 256).norm().item()
    assert power ** (1 / 256) == pytest.approx(expected, rel=0.02)


@torch.no_grad()
def test_radius_and_norm_of_a_free_map_differ():
    """At the published start a free map has radius √(2/5) and twice that norm; only the diagonal
    kind may call one the other."""
    radii, norms = [], []
    for seed in range(3):
        injection = KINDS["concat"](256, torch.float32, "cpu")
        injection.init_weights(torch.Generator().manual_seed(seed), math.sqrt(2 / (5 * 256)))
        radii.append(injection.spectral_radius())
        norms.append(torch.linalg.matrix_norm(injection.retention(), 2).item())
    assert np.mean(radii) == pytest.approx(0.63, abs=0.04)
    assert np.mean(norms) == pytest.approx(1.26, abs=0.05)


def test_the_radius_of_a_rotation_is_found():
    """A real matrix with complex eigenvalues only: 0.9 e^{±iθ}."""
    injection = KINDS["concat"](2, torch.float32, "cpu")
    c, s = 0.9 * math.cos(1.0), 0.9 * math.sin(1.0)
    with torch.no_grad():
        injection.W.copy_(torch.tensor([[c, -s, 1, 0], [s, c, 0, 1]]))
    assert injection.spectral_radius() == pytest.approx(0.9, abs=1e-6)


def test_adding_keeps_everything():
    model = loop_model(injection="add")
    assert model.adapter.spectral_radius() == 1.0
    assert not list(model.adapter.parameters())
    assert not any("adapter" in name for name in model.state_dict())


# -- precision


@torch.no_grad()
@pytest.mark.parametrize("decay", [0.9995, 0.99999])
def test_a_slow_decay_is_not_one_in_a_bfloat16_model(decay):
    assert torch.tensor(decay).bfloat16() == 1  # what must not happen to it
    injection = slow_decay(decay, dtype=torch.bfloat16)
    A, B = injection.discretise()
    assert A.dtype == B.dtype == torch.float32
    np.testing.assert_allclose(A, decay, atol=1e-7)
    assert injection.spectral_radius() < 1
    term = injection.input_term(torch.ones(3, 4, dtype=torch.bfloat16))
    assert term.dtype == torch.float32
    np.testing.assert_allclose(term, -math.log(decay), rtol=1e-4)
    h = torch.full((3, 4), 8.0)
    np.testing.assert_allclose(injection(h, 0 * term, BACKEND), 8 * decay, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("how", ["built", "converted", "bfloat16()"])
def test_a_bfloat16_model_keeps_its_linear_system_in_float32(how):
    exact = loop_model()
    if how == "built":
        model = Parcae(loop_config(), torch.bfloat16)
        model.load_state_dict(exact.state_dict())
    else:
        model = loop_model()
        model = model.to(torch.bfloat16) if how == "converted" else model.bfloat16()
    assert model.wte.weight.dtype == model.adapter.B.dtype == torch.bfloat16
    assert model.adapter.A_log.dtype == model.adapter.dt_bias.dtype == torch.float32
    assert torch.equal(model.adapter.A_log, exact.adapter.A_log)
    assert torch.equal(model.adapter.retention(), exact.adapter.retention())
    assert model.adapter.input_term(torch.ones(2, 36, dtype=torch.bfloat16)).dtype == torch.float32
    logits = dense_logits(model, some_tokens(9), num_loops=4)
    assert logits.dtype == torch.float32
    truth = dense_logits(exact, some_tokens(9), num_loops=4)
    assert (logits - truth).norm() < 0.1 * truth.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_is_trained_in_the_same_parameters(kind):
    """An optimiser made before the conversion holds what the model uses after it."""
    model = loop_model(injection=kind)
    before = list(model.parameters())
    model.to(torch.bfloat16)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    for tensor in model.adapter.discretise():
        assert tensor.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_everything_the_injection_learns(kind):
    model, tokens = loop_model((1, 2, 1), injection=kind), some_tokens(6)
    model(dense_batch(tokens), None, DenseBackend(), 3).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
