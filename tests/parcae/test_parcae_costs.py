"""What a loop model holds and costs, against the published sizes' numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minifer.config import ModelConfig
from minifer.loops import LoopConfig
from minifer.parcae.costs import GATE_CHANNELS, decode_cost, kv_bytes_per_token, parameters
from minifer.parcae.presets import PRESETS, create_model
from minifer.perf.costs import ElementBytes

MIB = 1024**2
SIZES = ("parcae-140m", "parcae-370m", "parcae-770m", "parcae-1.3b")


@pytest.mark.parametrize(
    ("name", "total"),
    list(zip(SIZES, (144_323_136, 388_003_328, 776_655_680, 1_338_591_744), strict=True)),
)
def test_the_published_sizes_hold_what_was_published(name: str, total: int) -> None:
    assert parameters(PRESETS[name]).total == total


def test_the_split_of_the_smallest() -> None:
    split = parameters(PRESETS["parcae-140m"])
    assert split.wte == 25_165_824
    assert split.value_embeddings == 75_497_472
    assert split.prelude == split.core == split.coda == 14_159_040
    assert split.adapter == 591_360
    assert split.readout == 589_824
    assert split.norms == 1_536
    assert split.outside_tables == 43_659_840


def odd_config(**loop: object) -> ModelConfig:
    """Grouped heads, an MLP of its own width, stacks of three sizes."""
    shape = {"prelude": 1, "core": 2, "coda": 2, **loop}
    return replace(
        PRESETS["parcae-tiny"],
        hidden_size=64,
        intermediate_size=96,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        loop=LoopConfig(**shape),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "loop",
    [
        {},
        {"injection": "concat", "prelude_norm": False},
        {"injection": "add", "value_embeddings": False},
    ],
)
def test_the_split_is_what_the_modules_hold(loop: dict[str, object]) -> None:
    from minifer.parcae.model import Parcae

    config = odd_config(**loop)
    model, split = Parcae(config, device="meta"), parameters(config)

    def held(*modules: object) -> int:
        return sum(p.numel() for m in modules if m is not None for p in m.parameters())  # type: ignore[attr-defined]

    assert split.total == model.num_parameters
    assert split.value_embeddings == held(model.value_embeds)
    assert (split.prelude, split.core, split.coda) == tuple(
        map(held, (model.prelude, model.core, model.coda))
    )
    assert split.adapter == held(model.adapter)
    assert split.readout == held(model.readout_proj)
    assert split.norms == held(model.ln_prelude, model.ln_f)


def test_the_gate_reads_what_the_layer_says() -> None:
    from minifer.parcae import layers

    assert layers.GATE_CHANNELS == GATE_CHANNELS


# GFLOP a token at T = 1 and 8, published code's count: B e once a loop, no attention.
GFLOP = {
    "parcae-140m": (0.138, 0.344),
    "parcae-370m": (0.373, 1.093),
    "parcae-770m": (0.798, 2.473),
    "parcae-1.3b": (1.469, 4.673),
}


@pytest.mark.parametrize("name", SIZES)
def test_flops_of_a_decoded_token(name: str) -> None:
    config = PRESETS[name]
    D, loop = config.hidden_size, config.loop
    assert loop is not None
    for depth, expected in zip((1, 8), GFLOP[name], strict=True):
        flops = decode_cost(config, depth, hoisted=False).total().flops
        layers = loop.prelude + loop.coda + depth * loop.core
        gates = 2 * 32 * config.num_heads * layers // 2  # which the published formula leaves out
        exactly = 2 * (12 * D * D * layers + depth * D * D + D * D + config.vocab_size * D)
        assert flops == exactly + gates
        assert round(exactly / 1e9, 3) == expected
        saved = flops - decode_cost(config, depth).total().flops
        assert saved == 2 * D * D * (depth - 1)


def test_attention_comes_with_a_context() -> None:
    config = PRESETS["parcae-140m"]
    without, with_context = decode_cost(config, 8), decode_cost(config, 8, context=100)
    assert without["attention"].flops == without["attention"].bytes == 0
    # q · k and p · v: 2 products over 768 dimensions, in 2 + 8 · 2 + 2 layers.
    assert with_context["attention"].flops == 2 * 2 * 768 * 100 * 20
    assert with_context["attention"].kv_bytes == 101 * kv_bytes_per_token(config, 8)
    assert with_context["core"] == without["core"]


# MiB of bfloat16 weights a token: each once, and the core's once a loop.
WEIGHT_MIB = {
    "parcae-140m": (131, 320),
    "parcae-370m": (356, 1028),
    "parcae-770m": (761, 2336),
    "parcae-1.3b": (1401, 4425),
}


@pytest.mark.parametrize("name", SIZES)
def test_weight_bytes_of_a_decoded_token(name: str) -> None:
    config = PRESETS[name]
    unique = decode_cost(config, core_resident=True).total().weight_bytes
    again = decode_cost(config).total().weight_bytes
    D, split, loop = config.hidden_size, parameters(config), config.loop
    assert loop is not None
    found = []
    for total, reads in ((unique, 1), (again, 8)):  # those numbers are of the large matrices alone
        layers = loop.prelude + loop.coda + reads * loop.core
        matrices = 2 * (12 * D * D * layers + 2 * D * D + config.vocab_size * D)
        small = layers * 2 * D + layers // 2 * 32 * config.num_heads  # norms and gates
        tables = loop.num_layers // 2 * D
        assert total == matrices + 2 * (small + tables + 2 * D + 2 * D)  # A, Δ; two norms
        found.append(round(matrices / MIB))
    assert tuple(found) == WEIGHT_MIB[name]
    rows = split.value_embeddings // config.vocab_size
    assert unique == 2 * (split.outside_tables + split.wte + rows)
    assert again - unique == 7 * 2 * split.core
    half = decode_cost(config, core_resident=True, element=ElementBytes(weight=1.0))
    assert half.total().weight_bytes == unique / 2


# KiB a token: 8 loops, and a model that runs every layer once.
KV_KIB = {
    "parcae-140m": (60, 18),
    "parcae-370m": (160, 48),
    "parcae-770m": (300, 90),
    "parcae-1.3b": (480, 144),
}


@pytest.mark.parametrize("name", SIZES)
def test_kv_bytes_of_a_token(name: str) -> None:
    config = PRESETS[name]
    D, loop = config.hidden_size, config.loop
    assert loop is not None
    full, once = KV_KIB[name]
    assert kv_bytes_per_token(config) == full * 1024
    assert kv_bytes_per_token(config, 1) == once * 1024
    for policy in ("terminal", "first-1", "cyclic-1"):
        assert kv_bytes_per_token(config, 8, policy) == once * 1024
    for m in (2, 4, 8, 12):
        slots = loop.prelude + min(m, 8) * loop.core + loop.coda
        for policy in (f"first-{m}", f"cyclic-{m}"):
            assert kv_bytes_per_token(config, 8, policy) == 2 * 2 * D * slots
    assert kv_bytes_per_token(config, 9) - full * 1024 == 2 * 2 * D * loop.core
    assert kv_bytes_per_token(config, 8, element_bytes=1.0) == full * 512


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parameters(replace(PRESETS["parcae-tiny"], loop=None)), "loop must say"),
        (lambda: decode_cost(PRESETS["parcae-tiny"], 0), "num_loops must be .* got 0"),
        (lambda: decode_cost(PRESETS["parcae-tiny"], context=-1), "context must be .* got -1"),
        (lambda: kv_bytes_per_token(PRESETS["parcae-tiny"], 8, "last"), "loop_kv_policy must be"),
    ],
)
def test_what_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_preset_on_the_meta_device_agrees() -> None:
    name = "parcae-140m"
    assert create_model(name, device="meta").num_parameters == parameters(PRESETS[name]).total
