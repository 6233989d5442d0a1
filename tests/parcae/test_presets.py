"""The published sizes by name, and the split of their parameters on the meta device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from published import SIZES

from minifer.loops import LoopConfig
from minifer.parcae import PRESETS, Parcae, create_model
from minifer.parcae.model import Parcae as SameParcae

# wte, value embeddings, each stack, injection, readout, the two norms between them.
SPLIT = {
    "parcae-140m": (25_165_824, 75_497_472, 14_159_040, 591_360, 589_824, 1_536),
    "parcae-370m": (33_554_432, 201_326_592, 50_340_352, 1_050_624, 1_048_576, 2_048),
    "parcae-770m": (41_943_040, 377_487_360, 117_981_120, 1_640_960, 1_638_400, 2_560),
    "parcae-1.3b": (50_331_648, 603_979_776, 226_518_528, 2_362_368, 2_359_296, 3_072),
}


def numbers(*modules: torch.nn.Module | None) -> int:
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_the_parameters_lie_where_they_were_published(name: str) -> None:
    model = create_model(name, device="meta")
    wte, tables, stack, injection, readout, norms = SPLIT[name]
    assert numbers(model.wte) == wte
    assert numbers(model.value_embeds) == tables
    for blocks in (model.prelude, model.core, model.coda):
        assert numbers(blocks) == stack
    assert numbers(model.adapter) == injection
    assert numbers(model.readout_proj) == readout
    assert numbers(model.ln_prelude, model.ln_f) == norms
    whole = wte + tables + 3 * stack + injection + readout + norms
    assert model.num_parameters == whole == SIZES[name][3]


@pytest.mark.parametrize("name", SIZES)
def test_a_stack_is_twelve_squares_a_layer_two_norms_and_gates(name: str) -> None:
    """The table above, from the formula: n (12 D² + 2 D) and n / 2 gates of heads · 32."""
    D, n, _, _ = SIZES[name]
    assert SPLIT[name][2] == n * (12 * D**2 + 2 * D) + n // 2 * (D // 128) * 32
    assert SPLIT[name][1] == 3 * n // 2 * 32768 * D
    assert SPLIT[name][3] == D**2 + 2 * D


@pytest.mark.parametrize("name", SIZES)
def test_odd_layers_of_every_stack_have_value_embeddings(name: str) -> None:
    model = create_model(name, device="meta")
    for blocks in (model.prelude, model.core, model.coda):
        gated = [block.attn.ve_gate is not None for block in blocks]  # type: ignore[union-attr]
        assert gated == [i % 2 == 1 for i in range(len(blocks))]
    assert list(model.value_embeds) == [str(k) for k in range(1, 3 * SIZES[name][1], 2)]


def test_a_model_is_made_from_its_seed() -> None:
    a, b, c = (create_model("parcae-tiny", seed=seed) for seed in (1, 1, 2))
    assert isinstance(a, Parcae) and Parcae is SameParcae
    assert torch.equal(a.wte.weight, b.wte.weight)
    assert not torch.equal(a.wte.weight, c.wte.weight)
    assert a.adapter.spectral_radius() == pytest.approx(0.2**0.5, rel=1e-6)


def test_dtype_and_device_are_those_asked_for() -> None:
    model = create_model("parcae-tiny", dtype=torch.bfloat16, seed=None)
    assert model.wte.weight.dtype == torch.bfloat16
    meta = create_model("parcae-1.3b", dtype=torch.bfloat16, device="meta")
    assert {p.device.type for p in meta.parameters()} == {"meta"}


def test_a_configuration_does_not_change_under_a_model() -> None:
    """What follows from the mean depth is asked for, not stored beside it."""
    config = PRESETS["parcae-tiny"]
    assert config.loop is not None
    with pytest.raises(AttributeError):
        config.loop.mean_recurrence = 16  # type: ignore[misc]
    deeper = replace(config, loop=replace(config.loop, mean_recurrence=16))
    assert deeper.loop is not None and deeper.loop.deepest == 16
    assert deeper.num_kv_slots == config.num_kv_slots + 8 * config.loop.core
    capped = LoopConfig(2, 2, 2, mean_recurrence=8, max_num_loops=4)
    assert replace(capped, mean_recurrence=16).deepest == 4  # that one was chosen
