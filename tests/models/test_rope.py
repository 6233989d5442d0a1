"""Rotary frequencies against transformers' `ROPE_INIT_FUNCTIONS`, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from minifer.config import RopeConfig
from minifer.models.rope import RotaryEmbedding, attention_factor, inverse_frequencies
from minifer.weights.hf_config import config_from_hf

LLAMA3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3_1": LLAMA3_1,
    "llama3_2": LLAMA3_1 | {"factor": 32.0},
    "yarn_qwen": YARN,
    "yarn_factor_16": YARN | {"factor": 16.0},
    "yarn_betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_betas_null": YARN | {"beta_fast": None, "beta_slow": None},
    "yarn_mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn_mscale_alone": YARN | {"mscale": 0.7},
    "yarn_attention_factor": YARN | {"attention_factor": 1.25},
    "yarn_not_truncated": YARN | {"truncate": False},
    "yarn_factor_null": YARN | {"factor": None},
    "yarn_no_original": {"rope_type": "yarn", "factor": 4.0},
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported once for the module: it takes four seconds."""
    import transformers

    return transformers


def raw_config(theta: float, scaling: dict[str, Any] | None, head_dim: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 2 * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 131072,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_case_127_frequencies_are_transformers_to_the_bit(
    transformers: Any, name: str, head_dim: int, theta: float
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = raw_config(theta, dict(SCALINGS[name]), head_dim)
    oracle = transformers.LlamaConfig(**raw_config(theta, dict(SCALINGS[name]), head_dim))
    kind = SCALINGS[name]["rope_type"]
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](oracle, device="cpu")
    rope = config_from_hf(raw).rope
    assert torch.equal(inverse_frequencies(rope, head_dim), inv_freq)
    assert attention_factor(rope) == pytest.approx(scaling, rel=1e-12)
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    assert not torch.equal(inv_freq, plain)  # the scaling did something


def test_the_default_frequencies_are_theta_to_the_minus_2i_over_c() -> None:
    inv_freq = inverse_frequencies(RopeConfig(theta=10000.0), 8)
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_case_125_yarn_attention_factor_is_a_tenth_of_ln_factor_plus_one() -> None:
    def yarn(factor: float) -> RopeConfig:
        return RopeConfig(kind="yarn", factor=factor, original_max_position_embeddings=4096)

    assert attention_factor(yarn(16.0)) == pytest.approx(1.2772588722)
    assert attention_factor(yarn(16.0)) == 0.1 * math.log(16) + 1
    assert attention_factor(yarn(1.0)) == 1.0
    assert attention_factor(RopeConfig(kind="linear", factor=16.0)) == 1.0
    cos, _ = RotaryEmbedding(yarn(16.0), 8)(torch.tensor([0]))
    torch.testing.assert_close(cos, torch.full((1, 4), 1.2772589))  # cos 0 = 1, scaled


def test_freq_factors_divide_the_frequencies_as_a_gguf_file_means_them() -> None:
    """llama.cpp writes llama3 scaling as divisors: both spellings must give the same angles."""
    llama3 = RopeConfig(
        kind="llama3", theta=500000.0, factor=8.0, original_max_position_embeddings=8192
    )
    plain = RopeConfig(theta=500000.0)
    divisors = inverse_frequencies(plain, 128) / inverse_frequencies(llama3, 128)
    assert divisors.min() == 1.0 and divisors.max() == 8.0
    spelled = RopeConfig(theta=500000.0, freq_factors=tuple(divisors.tolist()))
    torch.testing.assert_close(
        inverse_frequencies(spelled, 128), inverse_frequencies(llama3, 128), rtol=1e-6, atol=0
    )
    with pytest.raises(ValueError, match=r"freq_factors needs head_dim / 2 = 32 entries, got 64"):
        inverse_frequencies(spelled, 64)


def test_what_a_kind_needs_is_asked_for() -> None:
    for kind in ("llama3", "yarn"):
        with pytest.raises(ValueError, match=f"'{kind}' needs original_max_position_embeddings"):
            inverse_frequencies(RopeConfig(kind=kind), 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'dynamic'"):
        inverse_frequencies(RopeConfig(kind="dynamic"), 64)  # type: ignore[arg-type]


def test_angles_stay_float32_when_the_model_becomes_bfloat16() -> None:
    """In bfloat16 position 1001 is 1000: neighbours would get the same rotation."""
    rotary = RotaryEmbedding(RopeConfig(), 64)
    before = rotary(torch.tensor([1000, 1001]))
    rotary.to(torch.bfloat16)
    after = rotary(torch.tensor([1000, 1001]))
    assert after[0].dtype == torch.float32
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert not torch.equal(after[0][0], after[0][1])


def test_angles_far_out_are_those_of_float64_to_float32_rounding() -> None:
    """At position p an angle carries at most two roundings: p · 2⁻²³ radians."""
    position = 100_000
    cos, sin = RotaryEmbedding(RopeConfig(), 128)(torch.tensor([position]))
    angle = position * 10000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    bound = position * 2.0**-22
    torch.testing.assert_close(cos[0].double(), angle.cos(), atol=bound, rtol=0)
    torch.testing.assert_close(sin[0].double(), angle.sin(), atol=bound, rtol=0)
