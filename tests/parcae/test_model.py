"""The model is the published architecture: everything against `parcae_float64`.

A tolerance of 1e-5 on logits of 4 is float32's rounding over some fifteen blocks. What a wrong
piece changes is larger by a factor of thousands (`test_depth_and_start_matter`).
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from loop_models import (
    Cached,
    dense_batch,
    dense_logits,
    float64,
    loop_config,
    loop_model,
    published_weights,
    some_tokens,
)
from parcae_float64 import Float64Decode

from minifer.execution.reference import DenseBackend
from minifer.loops import INJECTIONS, LoopConfig
from minifer.parcae import create_model
from minifer.parcae.model import Parcae, turned_by

LAYOUTS = [(2, 2, 2), (1, 2, 1), (0, 1, 0), (2, 3, 2)]
TOLERANCE = 1e-5
CHUNKS = ((0, 5), (5, 6), (6, 11))


def close(ours, truth, tolerance=TOLERANCE):
    np.testing.assert_allclose(np.asarray(ours), truth, rtol=0, atol=tolerance)


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize("layers", LAYOUTS, ids=str)
def test_logits_equal_float64_with_and_without_a_cache(layers, injection):
    model, tokens = loop_model(layers, injection=injection), some_tokens(11)
    truth = float64(model).forward(tokens, 4)
    assert 2 < np.abs(truth).max() < 10  # what the tolerance is small against
    close(dense_logits(model, tokens, num_loops=4), truth)
    cached = Cached(model)
    close(torch.cat([cached.run(tokens[a:b], 4) for a, b in CHUNKS]), truth)


@pytest.mark.parametrize(
    ("prelude_norm", "value_embeddings"), [(True, False), (False, True), (False, False)]
)
@pytest.mark.parametrize("layers", [(2, 2, 2), (0, 1, 0)], ids=str)
def test_without_prelude_norm_or_value_embeddings(layers, prelude_norm, value_embeddings):
    model = loop_model(layers, prelude_norm=prelude_norm, value_embeddings=value_embeddings)
    names = published_weights(model)
    assert ("transformer.ln_prelude.weight" in names) == prelude_norm
    assert any(name.startswith("value_embeds.") for name in names) == value_embeddings
    tokens = some_tokens(9)
    close(dense_logits(model, tokens, num_loops=3), float64(model).forward(tokens, 3))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_weights_depths_and_starts(seed):
    model, tokens = loop_model((2, 2, 2), seed), some_tokens(10, seed)
    generator = torch.Generator().manual_seed(seed)
    h0 = model.initial_state(torch.zeros(10, 36), generator)
    truth = float64(model).forward(tokens, 1 + seed, h0.double().numpy())
    close(dense_logits(model, tokens, num_loops=1 + seed, h0=h0), truth)
    cached = Cached(model)
    chunks = [cached.run(tokens[a:b], 1 + seed, h0=h0[a:b]) for a, b in ((0, 4), (4, 10))]
    close(torch.cat(chunks), truth)


def test_depth_and_start_matter():
    model, tokens = loop_model(), some_tokens(11)
    by_depth = [dense_logits(model, tokens, num_loops=depth) for depth in range(1, 7)]
    for a, b in itertools.pairwise(by_depth):
        assert (a - b).abs().max() > 0.1
    noise = model.initial_state(torch.zeros(11, 36), torch.Generator().manual_seed(0))
    noisy = dense_logits(model, tokens, num_loops=2, h0=noise)
    assert (noisy - by_depth[1]).abs().max() > 0.02


# -- depth


def test_each_sequence_of_a_mixed_batch_is_as_alone():
    model = loop_model()
    sequences, depths = [some_tokens(n, n) for n in (7, 1, 4, 11)], [2, 6, 1, 3]
    mixed = dense_logits(model, *sequences, num_loops=torch.tensor(depths))
    start = 0
    for tokens, depth in zip(sequences, depths, strict=True):
        own = mixed[start : start + len(tokens)]
        close(own, float64(model).forward(tokens, depth))
        assert torch.allclose(own, dense_logits(model, tokens, num_loops=depth), atol=TOLERANCE)
        start += len(tokens)


@pytest.mark.parametrize("layers", LAYOUTS, ids=str)
def test_each_token_of_a_sequence_may_have_its_depth(layers):
    model, tokens = loop_model(layers, max_num_loops=4), some_tokens(11)
    depths = [1, 2, 2, 4, 1, 3, 4, 1, 2, 1, 1]
    truth = Float64Decode(float64(model), 4).run(tokens, depths=depths)
    close(dense_logits(model, tokens, num_loops=torch.tensor(depths)), truth)
    cached = Cached(model)
    chunks = [cached.run(tokens[a:b], torch.tensor(depths[a:b])) for a, b in CHUNKS]
    close(torch.cat(chunks), truth)


def test_a_shallow_token_shows_its_last_keys_and_values_to_deeper_ones():
    """Three ways to read what it never made differ: its last, the ones one more iteration would
    make, and none."""
    model, tokens = loop_model((0, 1, 0)), some_tokens(5)
    depths = torch.tensor([1, 1, 1, 1, 4])
    ours = dense_logits(model, tokens, num_loops=depths)[-1]
    deep = dense_logits(model, tokens, num_loops=4)[-1]
    alone = dense_logits(model, tokens[-1:], num_loops=4)[-1]
    assert (ours - deep).abs().max() > 0.1
    assert (ours - alone).abs().max() > 0.1


def test_one_depth_for_all_one_a_request_and_one_a_token_agree():
    model, tokens = loop_model(), some_tokens(6)
    batch, backend = dense_batch(tokens, tokens[:2]), DenseBackend()
    with torch.no_grad():
        by_int, by_request, by_token = (
            model(batch, None, backend, depth)
            for depth in (3, torch.tensor([3, 3]), torch.tensor([3] * 8))
        )
    assert torch.equal(by_int, by_request)
    assert torch.equal(by_int, by_token)


def test_depth_is_the_models_mean_unless_told_and_never_drawn():
    model, tokens = loop_model(mean_recurrence=3), some_tokens(6)
    for mode in (model.train(), model.eval()):
        first, second = dense_logits(mode, tokens), dense_logits(mode, tokens)
        assert torch.equal(first, second)
        close(first, float64(model).forward(tokens, 3))


@pytest.mark.parametrize(
    "num_loops",
    [
        0,
        -1,
        2.0,
        True,
        "2",
        2**70,
        [[1], 2],
        torch.tensor([1, 0]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[2, 2]]),
    ],
    ids=str,
)
def test_a_depth_that_is_none_is_refused(num_loops):
    model = loop_model()
    with pytest.raises(ValueError, match="num_loops must be an integer of at least 1"):
        dense_logits(model, some_tokens(4), some_tokens(5), num_loops=num_loops)


def test_a_depth_that_the_cache_has_no_slots_for_is_refused():
    cached = Cached(loop_model(max_num_loops=3))
    with pytest.raises(ValueError, match=r"num_loops must be at most max_num_loops \(3\).*got 4"):
        cached.run(some_tokens(3), 4)
    with pytest.raises(ValueError, match="got 5"):
        cached.run(some_tokens(3), torch.tensor([1, 5, 2]))


def test_a_start_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"h0 must be of shape \(4, 36\), got \(1, 36\)"):
        dense_logits(loop_model(), some_tokens(4), h0=torch.zeros(1, 36))


def test_a_start_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"h0 must be of torch.float32, got torch.float64"):
        dense_logits(loop_model(), some_tokens(4), h0=torch.zeros(4, 36, dtype=torch.float64))


def test_the_random_start_is_cut_noise_from_a_seed():
    model = create_model("parcae-tiny", seed=None)
    e = torch.zeros(500, model.config.hidden_size)
    h0 = model.initial_state(e, torch.Generator().manual_seed(3))
    s = (2 / (5 * model.config.hidden_size)) ** 0.5
    assert h0.std().item() == pytest.approx(0.9866 * s, rel=0.01)  # a normal cut at ±3
    assert 2.9 * s < h0.abs().max().item() <= 3 * s
    assert torch.equal(h0, model.initial_state(e, torch.Generator().manual_seed(3)))
    assert not model.initial_state(e).any()


def test_what_a_state_has_turned_by_is_exact_where_it_is_small_and_never_negative():
    state = torch.randn(200, 36, generator=torch.Generator().manual_seed(0))
    still = turned_by(state, 3 * state)
    assert ((still >= 0) & (still < 1e-14)).all()
    angle = torch.tensor([1e-5, 1e-3, 1.0, torch.pi], dtype=torch.float64)
    before = torch.tensor([[1.0, 0.0]]).double().expand(4, 2)
    after = torch.stack([angle.cos(), angle.sin()], dim=1)
    np.testing.assert_allclose(turned_by(before, after), 2 * (angle / 2).sin() ** 2, rtol=1e-5)
    assert turned_by(0 * state, state).tolist() == [1.0] * 200  # nothing has no direction


# -- pieces whose place is easy to get wrong


@pytest.mark.parametrize(
    ("layers", "with_tables"),
    [
        ((2, 2, 2), [1, 3, 5]),
        ((4, 4, 4), [1, 3, 5, 7, 9, 11]),
        ((1, 2, 1), [1, 3]),
        ((1, 1, 1), [0, 2]),
        ((2, 3, 2), [0, 2, 4, 6]),
        ((0, 1, 0), [0]),
    ],
    ids=str,
)
def test_every_second_layer_has_a_value_embedding_and_its_gate(layers, with_tables):
    """The published rule for tables; for odd layouts the released code's gates follow another."""
    model = Parcae(loop_config(layers), device="meta")
    names = [part.name for part in model.weight_parts()]
    tables = [int(name.split(".")[1]) for name in names if name.startswith("value_embeds.")]
    assert tables == with_tables
    P, R = layers[:2]
    first = {"prelude": 0, "core_block": P, "coda": P + R}
    gates = [n.split(".")[1:3] for n in names if n.endswith("ve_gate.weight")]
    assert sorted(first[stage] + int(i) for stage, i in gates) == with_tables


def test_tables_and_gates_that_disagree_are_noticed(monkeypatch):
    def released_rule(self, layer):  # for gates it is not the one for tables
        released_rule.calls += 1
        return layer % 2 == (0 if released_rule.calls <= self.num_layers else 1)

    released_rule.calls = 0
    monkeypatch.setattr(LoopConfig, "has_value_embedding", released_rule)
    with pytest.raises(AssertionError, match="gates at"):
        Parcae(loop_config((1, 1, 1)))


def test_a_model_too_narrow_for_its_gates_is_refused():
    narrow = replace(loop_config(), hidden_size=24)
    with pytest.raises(ValueError, match="hidden_size must be at least 32"):
        Parcae(narrow)
    Parcae(replace(narrow, loop=replace(narrow.loop, value_embeddings=False)))


@pytest.mark.parametrize(
    "change", [{"tie_word_embeddings": False}, {"qkv_bias": True}, {"qk_norm": True}], ids=str
)
def test_what_no_loop_model_has_is_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be .* not implemented"):
        Parcae(replace(loop_config(), **change))


def test_a_model_without_a_loop_is_refused():
    with pytest.raises(ValueError, match="loop must say"):
        Parcae(replace(loop_config(), loop=None))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("parcae-140m", 144_323_136),
        ("parcae-370m", 388_003_328),
        ("parcae-770m", 776_655_680),
        ("parcae-1.3b", 1_338_591_744),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(name, count):
    assert create_model(name, device="meta").num_parameters == count
