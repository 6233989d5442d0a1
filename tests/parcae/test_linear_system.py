"""At the start of training every block is the identity, so the whole model is its linear system:

h_T = Ā^T h_0 + (1 − Ā^T) / (1 − Ā) · B̄ e
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_models import dense_batch, loop_config, loop_model, some_tokens

from minifer.execution.reference import DenseBackend
from minifer.parcae.model import Parcae

DECAY, INPUT = 0.4472136, 0.8047190  # √(1/5) and −ln √(1/5)


def initialised(layers=(2, 2, 2), **loop) -> Parcae:
    model = Parcae(loop_config(layers, **loop))
    model.init_weights(0)
    return model


@torch.no_grad()
def states(model, tokens, num_loops, h0=None):
    """e [T, D] and the state after 0 … num_loops iterations, of the model's own stages."""
    batch, backend = dense_batch(tokens), DenseBackend()
    e, p = model.encode(batch, None, backend)
    h = model.initial_state(e) if h0 is None else h0
    term, trace = model.input_term(e), [h]
    for t in range(num_loops):
        trace.append(model.step(trace[-1], term, model.core_pass(p, batch, t)))
    return e, trace


def closed_form(A, B, e, h0, num_loops):
    A, B, e, h0 = A.double(), B.double(), e.double(), h0.double()
    power = A**num_loops
    return power * h0 + (1 - power) / (1 - A) * (e @ B.T)


@pytest.mark.parametrize("layers", [(2, 2, 2), (1, 2, 1), (0, 1, 0), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("num_loops", [1, 2, 8, 40])
def test_the_whole_loop_is_the_closed_form(layers, num_loops):
    model = initialised(layers)
    torch.nn.init.normal_(model.adapter.A_log, generator=torch.Generator().manual_seed(1))
    torch.nn.init.normal_(model.adapter.B, generator=torch.Generator().manual_seed(2))
    h0 = torch.randn(9, 36, generator=torch.Generator().manual_seed(3))
    e, trace = states(model, some_tokens(9), num_loops, h0)
    A, B = model.adapter.discretise()
    expected = closed_form(A, B, e, h0, num_loops)
    torch.testing.assert_close(trace[-1].double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_forward_at_the_start_of_training_reads_out_the_closed_form():
    model, tokens = initialised(), some_tokens(9)
    h0 = model.initial_state(torch.zeros(9, 36), torch.Generator().manual_seed(0))
    e, _ = states(model, tokens, 1)
    h = closed_form(*model.adapter.discretise(), e, h0, 8)
    z = h @ model.readout_proj.weight.double().T
    expected = z * torch.rsqrt((z * z).mean(-1, keepdim=True) + 1e-5)  # norms begin at 1
    hidden = model(dense_batch(tokens), None, DenseBackend(), 8, h0=h0)
    torch.testing.assert_close(hidden.double(), expected, rtol=0, atol=1e-5)


def test_training_starts_at_the_published_decay():
    model = initialised()
    A, B = model.adapter.discretise()
    torch.testing.assert_close(A, torch.full((36,), DECAY), rtol=0, atol=1e-7)
    torch.testing.assert_close(B, INPUT * torch.eye(36), rtol=0, atol=1e-6)
    assert not model.adapter.A_log.any()
    assert model.adapter.dt_bias[0].item() == pytest.approx(math.log(math.sqrt(5) - 1), abs=1e-6)
    assert model.adapter.spectral_radius() == pytest.approx(DECAY, abs=1e-7)


def test_the_state_settles_at_1_456_times_its_input():
    """Euler's B: with the exact hold of B it would be the input itself."""
    model = initialised()
    e, trace = states(model, some_tokens(9), 40)
    torch.testing.assert_close(trace[-1], 1.45578 * e, rtol=1e-4, atol=1e-5)
    A, B = (x.double() for x in model.adapter.discretise())
    assert (B.diag() / (1 - A))[0].item() == pytest.approx(INPUT / (1 - DECAY), abs=1e-6)
    exact_hold = 1 - A  # (1 − exp(−Δ a)) / a · B with a = 1
    assert exact_hold[0].item() == pytest.approx(0.5527864, abs=1e-6)
    assert (exact_hold / (1 - A)).allclose(torch.ones(36, dtype=torch.float64))


@torch.no_grad()
def test_matrices_begin_orthogonal_and_those_that_write_the_stream_at_zero():
    model = initialised()
    s = model.state_std
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not parameter.any(), name
        elif parameter.dim() == 1 or name.startswith("adapter."):
            continue
        elif name.startswith("value_embeds."):
            assert parameter.std().item() == pytest.approx(1, rel=0.06), name
        elif name.endswith("ve_gate.weight"):
            assert parameter.abs().max().item() <= 1 / math.sqrt(32), name
        else:
            parts = model._split_qkv(parameter) if "qkv" in name else (parameter,)
            for part in parts:
                small, large = sorted(part.shape)
                gram = part @ part.T if part.shape[0] == small else part.T @ part
                torch.testing.assert_close(
                    gram, large * s * s * torch.eye(small), rtol=0, atol=1e-5, msg=name
                )


@pytest.mark.parametrize("injection", ["diagonal", "concat", "add"])
def test_the_input_term_computed_once_is_the_one_of_every_iteration(injection):
    model, tokens = loop_model(injection=injection), some_tokens(9)
    batch, backend = dense_batch(tokens), DenseBackend()
    with torch.no_grad():
        e, p = model.encode(batch, None, backend)
        h = model.initial_state(e)
        for t in range(5):
            h = model.step(h, model.input_term(e), model.core_pass(p, batch, t))
    _, trace = states(model, tokens, 5)
    assert torch.equal(h, trace[-1])


# -- with blocks: bounded input, bounded state


def residual_bound(model, e, trace):
    """The largest ‖core(x) − x‖ of any iteration, a token."""
    term = model.input_term(e)
    pairs = itertools.pairwise(trace)
    injected = [(model.adapter(h, term, DenseBackend()), after) for h, after in pairs]
    return torch.stack([(after - x).norm(dim=-1) for x, after in injected]).amax(0)


@torch.no_grad()
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**20),
    shift=st.floats(-3, 1),
    scale=st.sampled_from([0.1, 1.0, 100.0]),
)
def test_the_state_stays_inside_its_bound(seed, shift, scale):
    """‖h_t‖ ≤ ρ^t ‖h_0‖ + (‖B̄ e‖ + M) (1 − ρ^t) / (1 − ρ) for every t, whatever the weights."""
    model = loop_model((0, 2, 0), seed)
    model.adapter.A_log.add_(shift)  # −3: decays near 1
    h0 = scale * torch.randn(5, 36, generator=torch.Generator().manual_seed(seed))
    e, trace = states(model, some_tokens(5, seed), 12, h0)
    rho, M = model.adapter.spectral_radius(), residual_bound(model, e, trace)
    assert rho < 1
    pushed = model.input_term(e).norm(dim=-1) + M
    for t, h in enumerate(trace):
        tight = rho**t * h0.norm(dim=-1) + pushed * (1 - rho**t) / (1 - rho)
        assert (h.norm(dim=-1) <= tight * (1 + 1e-5)).all()
        assert (tight <= rho**t * h0.norm(dim=-1) + pushed / (1 - rho) + 1e-4).all()


@torch.no_grad()
def forced(rho: float) -> Parcae:
    """Ā = ρ · 1 and B̄ = 0.8 · 1, blocks at random."""
    model = loop_model((0, 2, 0), injection="concat")
    model.adapter.W.copy_(torch.cat([rho * torch.eye(36), 0.8 * torch.eye(36)], dim=1))
    return model


@pytest.mark.parametrize(("rho", "num_loops"), [(1.05, 160), (1.2, 64), (1.5, 32)])
def test_above_one_the_state_grows_by_rho_an_iteration(rho, num_loops):
    _, trace = states(forced(rho), some_tokens(5), num_loops)
    norms = torch.stack([h.norm() for h in trace[1:]])
    assert (norms[-1] / norms[-2]).item() == pytest.approx(rho, rel=2e-3)
    assert norms[-1] > 100 * norms[0]


def test_at_one_the_state_grows_at_most_linearly():
    e, trace = states(forced(1.0), some_tokens(5), 64)
    M = residual_bound(forced(1.0), e, trace)
    pushed = (0.8 * e).norm(dim=-1) + M
    for t, h in enumerate(trace):
        assert (h.norm(dim=-1) <= t * pushed * (1 + 1e-5)).all()
    assert trace[-1].norm() > 10 * trace[1].norm()


def test_what_the_blocks_add_does_not_grow_with_the_state():
    added = {}
    for rho in (0.447, 0.9, 1.0, 1.2):
        e, trace = states(forced(rho), some_tokens(5), 64)
        added[rho] = residual_bound(forced(rho), e, trace).max().item()
    assert max(added.values()) < 1.5 * min(added.values())
