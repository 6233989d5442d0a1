"""Depth in training: drawn, split, unrolled with gradients through the last loops alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from loop_models import VOCAB, loop_model
from torch import Tensor

from minifer.execution.backends.dense import RowsBackend, row_batch
from minifer.parcae.depth import Unrolled, sample_depths, split_depths, unroll
from minifer.parcae.model import Parcae

LENGTH = 5


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_rows(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count, LENGTH + 1), generator=generator(seed))


def unrolled(model: Parcae, rows: Tensor, depths: list[int], limit: int, noise=None) -> Unrolled:
    batch = replace(row_batch(len(rows), LENGTH), token_ids=rows[:, :-1].flatten())
    return unroll(model, batch, RowsBackend(), torch.tensor(depths), limit, noise)


def loss_of(model: Parcae, rows: Tensor, depths: list[int], limit: int) -> Tensor:
    hidden = unrolled(model, rows, depths, limit).hidden
    return F.cross_entropy(model.logits(hidden, RowsBackend()), rows[:, 1:].flatten())


# -- drawing


def test_poisson_depths_have_the_mean_and_the_spread_of_a_poisson() -> None:
    depths = sample_depths("poisson", 8, 200_000, generator()).double()
    assert float(depths.mean()) == pytest.approx(8, abs=0.03)
    assert float(depths.var()) == pytest.approx(8, abs=0.15)


def test_what_would_be_no_loop_is_one() -> None:
    """P(T = 1) is that of 0 and 1 together: 2/e for a mean of 1."""
    depths = sample_depths("poisson", 1, 200_000, generator())
    assert depths.dtype == torch.int64 and int(depths.min()) == 1
    assert float((depths == 1).double().mean()) == pytest.approx(2 / math.e, abs=0.005)


def test_a_batch_shares_a_depth_or_each_has_its_own() -> None:
    assert len(set(sample_depths("poisson", 8, 64, generator()).tolist())) > 5
    shared = [sample_depths("poisson-batch", 8, 64, generator(seed)).tolist() for seed in range(9)]
    assert all(len(set(depths)) == 1 for depths in shared)
    assert len({depths[0] for depths in shared}) > 3
    assert sample_depths("constant", 8, 3, generator()).tolist() == [8, 8, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("uniform", 8, 4), "depth must be one of poisson, poisson-batch, constant, got 'unif"),
        (("poisson", 0.5, 4), "mean must be a number of at least 1, got 0.5"),
        (("poisson", math.nan, 4), "mean must be a number of at least 1, got nan"),
        (("constant", 1.5, 4), "mean must be whole for a constant depth, got 1.5"),
        (("poisson", "8", 4), "mean must be a number of at least 1, got '8'"),
        (("poisson", 8, 0), "size must be an integer of at least 1, got 0"),
        (("poisson", 8, 2.5), "size must be an integer of at least 1, got 2.5"),
    ],
)
def test_depths_that_cannot_be_drawn_are_refused(
    arguments: tuple[str, float, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample_depths(*arguments, generator())


def test_the_last_loops_carry_gradients_up_to_the_limit() -> None:
    depths = torch.tensor([1, 3, 4, 5, 20])
    free, tracked = split_depths(depths, 4)
    assert free.tolist() == [0, 0, 0, 1, 16] and tracked.tolist() == [1, 3, 4, 4, 4]
    assert torch.equal(free + tracked, depths)
    with pytest.raises(ValueError, match="max_backward must be at least 1, got 0"):
        split_depths(depths, 0)


# -- unrolling


def test_each_sequence_of_a_batch_is_as_alone() -> None:
    """To rounding: products over more rows add up in another order."""
    model, rows, depths = loop_model((1, 2, 1)), some_rows(4), [1, 7, 3, 4]
    together = unrolled(model, rows, depths, 3)
    for b, depth in enumerate(depths):
        alone = unrolled(model, rows[b : b + 1], [depth], 3)
        own = slice(b * LENGTH, (b + 1) * LENGTH)
        for name in ("hidden", "state", "previous"):
            found, expected = getattr(together, name)[own], getattr(alone, name)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_previous_state_is_one_loop_before_the_last() -> None:
    model, rows = loop_model((1, 1, 1)), some_rows(3)
    deep, one_less = unrolled(model, rows, [6, 2, 5], 4), unrolled(model, rows, [5, 1, 4], 4)
    torch.testing.assert_close(deep.previous, one_less.state)
    assert not torch.allclose(deep.previous, deep.state)


def test_noise_starts_the_state_and_is_drawn_from_the_generator() -> None:
    model, rows = loop_model((1, 1, 1)), some_rows(2)
    first, same, other = (
        unrolled(model, rows, [1, 1], 1, generator(seed)).state for seed in (1, 1, 2)
    )
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert not torch.equal(first, unrolled(model, rows, [1, 1], 1).state)


# -- the gradient, against the equations in float64


def rms_norm(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor) -> Tensor:
    """x [S, heads, C]: neighbouring dimensions as complex numbers, times e^(i · angle)."""
    S, C = x.shape[0], x.shape[-1]
    rates = 50_000.0 ** (-torch.arange(0, C, 2, dtype=torch.float64) / C)
    angles = torch.outer(torch.arange(S, dtype=torch.float64), rates)[:, None]
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


def block(w: Mapping[str, Tensor], at: str, layer: int, x: Tensor, tokens: Tensor) -> Tensor:
    """One sequence, x [S, D], with the weights of a published checkpoint."""
    n = rms_norm(x, w[f"{at}.norm_1.weight"])
    q, k, v = ((n @ w[f"{at}.attn.c_{c}.weight"].T).unflatten(-1, (-1, 8)) for c in "qkv")
    q, k = rms_norm(rotate(q), eps=2.0**-23), rms_norm(rotate(k), eps=2.0**-23)
    if f"value_embeds.{layer}.weight" in w:
        gate = 2 * torch.sigmoid(n[:, :32] @ w[f"{at}.attn.ve_gate.weight"].T)
        v = v + gate[..., None] * w[f"value_embeds.{layer}.weight"][tokens].view_as(v)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("shc,thc->hst", q, k) / math.sqrt(8)
    future = torch.ones(len(x), len(x)).triu(1).bool()
    heads = torch.einsum("hst,thc->shc", scores.masked_fill(future, -math.inf).softmax(-1), v)
    x = x + heads.flatten(1) @ w[f"{at}.attn.c_proj.weight"].T
    hidden = rms_norm(x, w[f"{at}.norm_2.weight"]) @ w[f"{at}.mlp.fc.weight"].T
    return x + 0.5 * hidden.clamp(min=0).square() @ w[f"{at}.mlp.proj.weight"].T


def float64_loss(w: Mapping[str, Tensor], rows: Tensor, depths: list[int], limit: int) -> Tensor:
    """Layers 1 / 2 / 1. The graph is cut where the last `limit` loops begin, at h and nowhere
    else."""
    losses = []
    for row, depth in zip(rows, depths, strict=True):
        tokens, t = row[:-1], "transformer."
        e = block(w, t + "prelude.0", 0, w[t + "wte.weight"][tokens], tokens)
        e = rms_norm(e, w[t + "ln_prelude.weight"])
        delta = F.softplus(w[t + "adapter.dt_bias"])
        decay = (-delta * w[t + "adapter.A_log"].exp()).exp()
        h = torch.zeros_like(e)
        for loop in range(depth):
            if loop == depth - limit:
                h = h.detach()
            h = decay * h + delta * (e @ w[t + "adapter.B"].T)
            for i in range(2):
                h = block(w, f"{t}core_block.{i}", 1 + i, h, tokens)
        z = block(w, t + "coda.0", 3, h @ w[t + "C.weight"].T, tokens)
        logits = rms_norm(z, w[t + "ln_f.weight"]) @ w[t + "wte.weight"].T
        losses.append(F.cross_entropy(logits, row[1:]))
    return torch.stack(losses).mean()


def float64_weights(model: Parcae) -> dict[str, Tensor]:
    own = dict(model.named_parameters())
    return {
        part.name: own[part.parameter][part.start : part.stop].detach().double().requires_grad_()
        for part in model.weight_parts()
    }


@pytest.mark.parametrize("limit", [1, 3])
def test_the_gradient_is_autograds_through_the_last_loops(limit: int) -> None:
    model, rows, depths = loop_model((1, 2, 1)), some_rows(4), [1, 6, 3, 4]
    weights = float64_weights(model)
    expected = float64_loss(weights, rows, depths, limit)
    expected.backward()
    loss = loss_of(model, rows, depths, limit)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    own = dict(model.named_parameters())
    for part in model.weight_parts():
        found, truth = own[part.parameter].grad, weights[part.name].grad
        assert found is not None and truth is not None, part.name
        error = (found[part.start : part.stop].double() - truth).norm() / truth.norm()
        assert float(error) < 1e-4, part.name


def test_more_tracked_loops_are_another_gradient_of_the_same_loss() -> None:
    rows, depths = some_rows(4), [1, 6, 3, 4]
    losses, gradients = [], []
    for limit in (1, 3, 6):
        model = loop_model((1, 2, 1))
        loss = loss_of(model, rows, depths, limit)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    assert losses[0] == losses[1] == losses[2]
    full = gradients[-1]
    one, three = (float((g - full).norm() / full.norm()) for g in gradients[:2])
    assert 0.01 < three < one


def test_gradients_reach_the_prelude_with_a_single_tracked_loop() -> None:
    model = loop_model((1, 1, 1))
    loss_of(model, some_rows(2), [9, 9], 1).backward()
    for name, parameter in model.prelude.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.norm()) > 0, name
