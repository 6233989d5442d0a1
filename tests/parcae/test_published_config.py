"""config.json of a published Parcae: every field that decides the model is read or refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from published import SIZES, published_config, small_config

from minifer.config import ModelConfig, RopeConfig
from minifer.loops import LoopConfig
from minifer.models.rope import RotaryEmbedding
from minifer.parcae.checkpoint import config_from_parcae, config_to_parcae
from minifer.parcae.presets import PRESETS
from minifer.weights.hf import config_from_hf, config_to_hf

DECIDED_BY_DEFAULT = {"clip_qkv", "logit_softcap"}  # null: off
BOOKKEEPING = {
    *("name", "hf_config", "padding_multiple", "init_strategy", "init_orthogonal"),
    *("skip_initialization", "sampling_scheme", "recurrent_iteration_method", "lockstep_n"),
    *("curriculum_target", "activation_checkpoint_impl", "mup_model_scaling_factor"),
    *("use_fused_head", "attn_impl", "_is_recurrent_block_config"),
}
NEEDED = sorted(set(published_config()) - BOOKKEEPING - DECIDED_BY_DEFAULT - {"_class_name"})
SMALL = config_from_parcae(small_config())  # 2 + 2 + 2 layers
ROPE = {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50000}


def refused(match: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match=match):
        config_from_parcae(published_config(**changes), "some/config.json")


@pytest.mark.parametrize("name", SIZES)
def test_a_published_file_is_the_preset(name: str) -> None:
    width, layers, _, _ = SIZES[name]
    read = config_from_parcae(published_config(width, layers))
    # The file says nothing of begin and end tokens: they are the tokenizer's.
    assert read == replace(PRESETS[name], bos_token_id=None, eos_token_ids=())


def test_every_field_reaches_its_place() -> None:
    raw = published_config(
        block_size=512,
        vocab_size=1000,
        padded_vocab_size=1024,
        n_embd=256,
        intermediate_size=640,
        num_attention_heads=4,
        num_key_value_heads=2,
        prelude_norm=False,
        norm_eps=1e-6,
        rope_settings=ROPE | {"rope_base": 10000},
        injection_type="linear",
        state_init="zero",
        recurrent_embedding_dimension=256,
        recurrent_intermediation_embedding_dimension=640,
        n_layers_in_prelude=0,
        n_layers_in_recurrent_block=3,
        n_layers_in_coda=1,
        mean_recurrence=5,
        mean_backprop_depth=3,
        torch_dtype="bfloat16",
        bos_token_id=7,
        eos_token_id=[8, 9],
        value_embeddings=False,
    )
    assert config_from_parcae(raw) == ModelConfig(
        architecture="ParcaeForCausalLM",
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=640,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=7,
        eos_token_ids=(8, 9),
        loop=LoopConfig(
            prelude=0,
            core=3,
            coda=1,
            mean_recurrence=5,
            mean_backprop_depth=3,
            injection="concat",
            prelude_norm=False,
            value_embeddings=False,
        ),
    )


def test_the_rope_base_decides_the_angles() -> None:
    read = config_from_parcae(published_config(rope_settings=ROPE | {"rope_base": 10000}))
    cos, _ = RotaryEmbedding(read.rope, read.head_dim)(torch.tensor([3]))
    turns = 10000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    assert torch.allclose(cos[0].double(), (3 * turns).cos(), atol=1e-6)


@pytest.mark.parametrize("key", NEEDED)
def test_a_key_that_is_missing_is_named(key: str) -> None:
    refused(f"some/config.json has no '{key}'", **{key: ...})


def test_what_is_off_may_be_absent_and_bookkeeping_is_passed_over() -> None:
    absent = dict.fromkeys(BOOKKEEPING | DECIDED_BY_DEFAULT, ...)
    raw = published_config(**absent, some_new_key={"a": 1})
    assert config_from_parcae(raw) == config_from_parcae(published_config())
    assert config_from_parcae(published_config(init_strategy="wild", sampling_scheme="fixed"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("injection_type", "gated"),
        ("norm_class_name", "LayerNorm"),
        ("mlp_class_name", "GatedMLP"),
        ("nonlin_name", "SiLU"),
        ("block_class_name", "SandwichBlock"),
        ("bias", True),
        ("bias", 0),
        ("qk_bias", True),
        ("qk_norm", False),
        ("clip_qkv", 8.0),
        ("logit_softcap", 15.0),
        ("tie_embeddings", False),
        ("prelude_norm", "yes"),
        ("state_init", "embed"),
        ("debias_attention", True),
        ("center_attention", True),
        ("randomize_positions_from", 4096),
        ("mup_model_scaling_factor", 2),
        ("recurrent_embedding_dimension", 512),
        ("recurrent_intermediation_embedding_dimension", 2048),
        ("recurrent_num_attention_heads", 12),
        ("value_embeddings", None),
    ],
)
def test_a_value_that_is_not_implemented_is_refused_by_name(key: str, value: Any) -> None:
    refused(rf"^{key} in some/config.json must be .*, got .*not implemented", **{key: value})


@pytest.mark.parametrize("value", ["<|bos|>", 1.5, True, -1, [0.5], {}], ids=str)
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
def test_tokens_that_are_none_are_refused(key: str, value: Any) -> None:
    refused(f"{key} in some/config.json must be a token id.*, got", **{key: value})


@pytest.mark.parametrize("value", [10**400, math.inf, math.nan, True])
def test_a_number_must_fit_a_float(value: float) -> None:
    refused("norm_eps in some/config.json must be a number above 0", norm_eps=value)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"use_rope": False}, "use_rope in rope_settings in some/config.json must be True"),
        ({"rope_condense_ratio": 2}, "rope_condense_ratio in rope_settings .* must be 1, got 2"),
        ({"rope_scaling": "yarn"}, "rope_scaling of rope_settings .* is not implemented"),
        ({"rope_base": 0}, "rope_base in rope_settings .* must be a number above 0, got 0"),
        ({"rope_base": None}, "rope_settings in some/config.json has no 'rope_base'"),
    ],
)
def test_other_rotary_embeddings_are_refused(settings: dict[str, Any], match: str) -> None:
    refused(match, rope_settings=ROPE | settings)


@pytest.mark.parametrize("settings", ["default", [1]])
def test_rope_settings_must_be_an_object(settings: Any) -> None:
    refused("rope_settings in some/config.json must be an object", rope_settings=settings)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_embd": 0}, "n_embd in some/config.json must be an integer of at least 1"),
        ({"n_embd": "768"}, "must be an integer of at least 1, got '768'"),
        ({"num_attention_heads": 5}, "multiple of num_attention_heads, got 768 and 5"),
        ({"num_key_value_heads": 4}, "num_heads must be a multiple of num_kv_heads"),
        ({"padded_vocab_size": 32000}, "padded_vocab_size .* at least vocab_size = 32768"),
        ({"n_layers_in_recurrent_block": 0}, "n_layers_in_recurrent_block .* at least 1, got 0"),
        ({"n_layers_in_prelude": -1}, "n_layers_in_prelude .* at least 1, got -1"),
        ({"n_layers_in_coda": False}, "n_layers_in_coda .* got False"),
        ({"mean_recurrence": 0}, "mean_recurrence .* at least 1, got 0"),
        ({"norm_eps": -1e-5}, "norm_eps .* must be a number above 0"),
        ({"norm_eps": math.inf}, "norm_eps .* must be a number above 0, got inf"),
        ({"norm_eps": math.nan}, "norm_eps .* must be a number above 0, got nan"),
        ({"torch_dtype": "int8"}, "dtype in some/config.json must be one of"),
        ({"_class_name": "GPTConfig"}, "_class_name .* must be 'ParcaeConfig', got 'GPTConfig'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any], match: str) -> None:
    refused(match, **changes)


# -- and back


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_read(name: str) -> None:
    raw = json.loads(json.dumps(config_to_parcae(PRESETS[name])))
    assert config_from_parcae(raw) == PRESETS[name]


@pytest.mark.parametrize("name", SIZES)
def test_what_is_written_is_what_was_published(name: str) -> None:
    published = published_config(*SIZES[name][:2])
    ours = config_to_parcae(PRESETS[name])
    own = {"torch_dtype", "bos_token_id", "eos_token_id"}
    assert set(ours) - own <= set(published)
    assert {key: published[key] for key in ours if key not in own} == {
        key: value for key, value in ours.items() if key not in own
    }


@pytest.mark.parametrize("injection", ["diagonal", "concat", "add"])
@pytest.mark.parametrize("flags", [(True, True), (False, False)])
def test_every_kind_of_loop_is_written(injection: str, flags: tuple[bool, bool]) -> None:
    norm, tables = flags
    loop = LoopConfig(2, 2, 2, injection=injection, prelude_norm=norm, value_embeddings=tables)
    config = replace(SMALL, loop=loop)
    assert config_from_parcae(config_to_parcae(config)) == config


def test_what_an_engine_chose_is_no_part_of_the_model() -> None:
    config = SMALL
    assert config.loop is not None
    chosen = replace(config, loop=replace(config.loop, max_num_loops=3, kv_policy="terminal"))
    assert config_to_parcae(chosen) == config_to_parcae(config)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 32},
        {"tie_word_embeddings": False},
        {"qk_norm": True},
        {"sliding_windows": (8,) * 6},
        {"rope": RopeConfig(kind="linear", theta=50000.0, factor=2.0)},
    ],
)
def test_what_the_format_cannot_express_is_refused(change: dict[str, Any]) -> None:
    config = replace(SMALL, **change)
    with pytest.raises(ValueError, match=f"ParcaeConfig cannot express {next(iter(change))} of"):
        config_to_parcae(config)


def test_a_model_without_a_loop_is_none_of_these() -> None:
    with pytest.raises(ValueError, match="loop must say how many layers each stack has"):
        config_to_parcae(replace(SMALL, loop=None))


def test_hugging_faces_form_is_not_theirs() -> None:
    with pytest.raises(ValueError, match='must have "_class_name": "ParcaeConfig"'):
        config_to_hf(SMALL)
    with pytest.raises(ValueError, match=r'my.json must have "_class_name": "ParcaeConfig"'):
        config_from_hf({"architectures": ["ParcaeForCausalLM"]}, "my.json")
    with pytest.raises(ValueError, match=r"_class_name in config.json must be one of Parc"):
        config_from_hf({"_class_name": "GPTConfig"})
