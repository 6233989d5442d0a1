"""What a `config.json` asks for is done or refused by name, never read over."""

from __future__ import annotations

from typing import Any

import pytest

from minifer.config import ModelConfig, RopeConfig
from minifer.weights.hf import config_from_hf, config_to_hf


def raw(**changes: Any) -> dict[str, Any]:
    """A small Llama's file; a change of `...` removes the key."""
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {key: value for key, value in (values | changes).items() if value is not ...}


def refused(match: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match=match):
        config_from_hf(raw(**changes), "some/config.json")


def test_a_plain_llama() -> None:
    assert config_from_hf(raw()) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5000.0),
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named_with_its_file(key: str) -> None:
    refused(f"some/config.json has no '{key}'", **{key: ...})


def test_a_size_that_is_no_size_is_refused() -> None:
    refused("hidden_size in some/config.json must be an integer of at least 1, got '32'",
            hidden_size="32")  # fmt: skip
    refused("hidden_size .* multiple of num_attention_heads .* got 30 and 4", hidden_size=30)


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4"]
)
def test_quantised_weights_are_refused_by_method_with_what_to_do(method: str) -> None:
    refused(
        f"'{method}'.* use the unquantised checkpoint of this model or a GGUF",
        quantization_config={"quant_method": method, "bits": 4},
    )


def test_old_bitsandbytes_files_name_no_method() -> None:
    refused("'bitsandbytes'", quantization_config={"load_in_8bit": True})


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_rope_kinds_are_refused_by_name(kind: str, name: str, key: str) -> None:
    refused(f"rope_type '{kind}' .* default, linear, llama3, yarn. Run this model with",
            **{name: {key: kind, "factor": 2.0}})  # fmt: skip


def test_rope_scaling_that_lacks_a_number_is_refused() -> None:
    refused("rope scaling in some/config.json has no 'factor'", rope_scaling={"type": "linear"})
    refused("has no 'low_freq_factor'", rope_scaling={"rope_type": "llama3", "factor": 8.0})


def test_rope_by_layer_type_is_refused() -> None:
    refused("by layer type", rope_parameters={"full_attention": {"rope_type": "default"}})


def test_the_rope_base_stands_inside_or_outside_the_dictionary() -> None:
    assert config_from_hf(raw()).rope.theta == 5000.0
    inside = raw(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 7000.0})
    assert config_from_hf(inside).rope == RopeConfig(theta=7000.0)
    assert config_from_hf(raw(rope_theta=...)).rope.theta == 10000.0


def test_other_activations_and_partial_rotation_are_refused() -> None:
    refused("hidden_act .* must be 'silu', got 'gelu'", hidden_act="gelu")
    refused("partial_rotary_factor .* must be 1, got 0.5", partial_rotary_factor=0.5)
    refused("must be 1, got 0.25", rope_parameters={"partial_rotary_factor": 0.25})
    assert config_from_hf(raw(partial_rotary_factor=1.0))


def test_mixtures_of_experts_and_unknown_families_are_refused() -> None:
    refused("MixtralForCausalLM is a mixture-of-experts", architectures=["MixtralForCausalLM"])
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        refused("mixture-of-experts", **{key: 8})
    assert config_from_hf(raw(num_local_experts=0))
    refused("'FalconForCausalLM' is not supported", architectures=["FalconForCausalLM"])
    refused("must be a list of one name", architectures=[])


def test_the_dtype_stands_under_either_name() -> None:
    assert config_from_hf(raw(torch_dtype="bfloat16")).dtype == "bfloat16"
    assert config_from_hf(raw(dtype="float16")).dtype == "float16"
    assert config_from_hf(raw(dtype="torch.bfloat16")).dtype == "bfloat16"
    refused("dtype .* got 'float8_e4m3fn'", dtype="float8_e4m3fn")


@pytest.mark.parametrize(("value", "ids"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
def test_end_tokens_are_one_or_many_or_none(value: Any, ids: tuple[int, ...]) -> None:
    assert config_from_hf(raw(eos_token_id=value)).eos_token_ids == ids


def test_flags_of_the_families() -> None:
    llama = config_from_hf(raw(attention_bias=True, mlp_bias=True))
    assert llama.qkv_bias and llama.output_bias and llama.mlp_bias and not llama.qk_norm
    qwen2 = config_from_hf(raw(architectures=["Qwen2ForCausalLM"]))
    assert qwen2.qkv_bias and not qwen2.output_bias and not qwen2.qk_norm
    qwen3 = config_from_hf(raw(architectures=["Qwen3ForCausalLM"]))
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128
    assert config_from_hf(raw(num_key_value_heads=...)).num_kv_heads == 4
    refused("no 'num_key_value_heads'", architectures=["Qwen2ForCausalLM"],
            num_key_value_heads=...)  # fmt: skip


def test_sliding_windows_of_the_families() -> None:
    def windows(family: str, **changes: Any) -> tuple[int | None, ...]:
        return config_from_hf(
            raw(architectures=[f"{family}ForCausalLM"], **changes)
        ).sliding_windows

    assert windows("Llama", sliding_window=8) == ()
    assert windows("Mistral", sliding_window=8) == (8, 8, 8)
    assert windows("Mistral", sliding_window=None) == ()
    assert windows("Mistral") == (4096, 4096, 4096)
    for family in ("Qwen2", "Qwen3"):
        assert windows(family, sliding_window=8) == ()
        used = {"use_sliding_window": True, "sliding_window": 8}
        assert windows(family, **used, max_window_layers=1) == (None, 8, 8)
        assert windows(family, **used, max_window_layers=3) == ()
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        assert windows(family, **used, layer_types=kinds) == (8, None, None)


def test_layer_types_that_do_not_fit_are_refused() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    refused("sliding_window is None", architectures=["Qwen2ForCausalLM"], layer_types=kinds)
    refused("must be 3 entries", architectures=["Qwen3ForCausalLM"], layer_types=kinds[1:])
    refused("got .*chunked_attention", architectures=["Qwen3ForCausalLM"],
            layer_types=["chunked_attention"] * 3)  # fmt: skip
    refused("sliding_window .* at least 1, got 0", architectures=["MistralForCausalLM"],
            sliding_window=0)  # fmt: skip


ROPES = [
    RopeConfig(theta=123.0),
    RopeConfig(kind="linear", factor=2.0),
    RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=16),
    RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
    RopeConfig(
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.5,
        mscale=0.5,
        mscale_all_dim=0.7,
    ),
    RopeConfig(freq_factors=(1.0, 2.0, 4.0, 8.0)),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_what_is_written_is_what_was_read(rope: RopeConfig) -> None:
    values = vars(config_from_hf(raw(eos_token_id=[2, 7]))) | {"rope": rope}
    config = ModelConfig(**values)
    assert config_from_hf(config_to_hf(config)) == config


def test_what_an_architecture_cannot_say_is_not_written() -> None:
    values = vars(config_from_hf(raw())) | {"qk_norm": True}
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot express qk_norm"):
        config_to_hf(ModelConfig(**values))
