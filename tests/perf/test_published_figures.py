"""Figures others have published, worked out again from shapes and data sheets."""

from __future__ import annotations

import random

import pytest

from minifer import ModelConfig
from minifer.kernels.mega.shapes import MODELS
from minifer.perf.costs import kv_bytes_per_token, num_parameters
from minifer.perf.devices import DEVICES
from minifer.perf.step_model import fit_step_model

LLAMA = {
    "architecture": "LlamaForCausalLM",
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "vocab_size": 128_256,
}
LLAMA_8B = ModelConfig(
    hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, **LLAMA
)
LLAMA_70B = ModelConfig(
    hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64, **LLAMA
)
H100 = DEVICES["H100-SXM"]


@pytest.mark.parametrize(
    ("chip", "ridge", "floor_ms", "joules"),
    [
        ("A100-80GB-SXM", 153, 7.88, 3.15),
        ("H100-SXM", 295, 4.79, 3.36),
        ("H200-SXM", 206, 3.35, 2.34),
        ("B200", 292, 2.09, 2.09),
    ],
)
def test_ridge_floor_and_joules_of_llama_8b(
    chip: str, ridge: float, floor_ms: float, joules: float
) -> None:
    """All of 16.06 GB read once a token, at the chip's full power."""
    device, size = DEVICES[chip], 2 * num_parameters(LLAMA_8B)
    seconds = size / device.memory_bandwidth
    assert device.ridge_point == pytest.approx(ridge, rel=0.005)
    assert seconds * 1e3 == pytest.approx(floor_ms, rel=0.005)
    assert seconds * device.power_watts == pytest.approx(joules, rel=0.005)


@pytest.mark.parametrize(("share", "microseconds"), [(1.0, 738), (0.72, 1025), (0.78, 946)])
def test_a_llama_1b_step_at_a_share_of_an_h100s_bandwidth(share: float, microseconds: int) -> None:
    """2.47 GB; 72 % and 78 % are both reported for one megakernel."""
    size = 2 * num_parameters(MODELS["llama-1b"])
    assert size == pytest.approx(2.47e9, rel=0.002)
    assert size / (share * H100.memory_bandwidth) * 1e6 == pytest.approx(microseconds, rel=0.002)


def test_eight_gpus_in_2023_reached_a_sixth_of_the_floor() -> None:
    """Splitwise's table (https://arxiv.org/abs/2311.18677): 29.9 ms for Llama-2-70B, 8 × H100."""
    size = 2 * num_parameters(LLAMA_70B)
    assert size == pytest.approx(141e9, rel=0.002)
    floor = size / (8 * H100.memory_bandwidth)
    assert floor * 1e3 == pytest.approx(5.3, rel=0.01)
    assert floor / 29.9e-3 == pytest.approx(0.176, abs=0.001)


def test_launching_seven_kernels_a_layer_costs_145_microseconds() -> None:
    """16 layers of Llama-3.2-1B, 1.3 µs a launch in a CUDA graph
    (https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles): a fifth of the floor."""
    launches = MODELS["llama-1b"].num_layers * 7
    seconds = launches * 1.3e-6
    assert seconds * 1e6 == pytest.approx(145.6)
    floor = 2 * num_parameters(MODELS["llama-1b"]) / H100.memory_bandwidth
    assert seconds / floor == pytest.approx(0.197, abs=0.002)


def test_kv_of_a_70b_token_is_320_kib_in_16_bits() -> None:
    assert kv_bytes_per_token(LLAMA_70B) == 327_680


@pytest.mark.parametrize(
    "prices",
    [
        {"fixed": 29.91, "batch": 0.2229, "context": 1.62e-4},
        {"fixed": 44.24, "batch": 0.237, "context": 3.0e-4},
        {"fixed": 5.7, "tokens": 0.0899, "squares": 1.46e-6},
    ],
    ids=["decode, 70B on 8 H100", "decode, 70B on 8 A100", "prefill, 70B on 8 H100"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_refit_recovers_the_prices_behind_a_log(prices: dict[str, float], seed: int) -> None:
    """Prices of published tables; a log made with them, half a per cent of noise."""
    draw = random.Random(seed)
    log: dict[str, list[float]] = {name: [] for name in prices if name != "fixed"}
    seconds = []
    for _ in range(2000):
        scale = 2 ** draw.uniform(0, 8)
        if "batch" in prices:
            step = {"batch": scale, "context": scale * 2 ** draw.uniform(7, 13)}
        else:
            prompt = 2 ** draw.uniform(5, 13)
            step = {"tokens": scale / 8 * prompt, "squares": scale / 8 * prompt**2}
        for name, value in step.items():
            log[name].append(value)
        exact = prices["fixed"] + sum(prices[name] * value for name, value in step.items())
        seconds.append(exact * draw.gauss(1, 0.005))
    fitted = fit_step_model(log, seconds)
    assert fitted.prices == pytest.approx(prices, rel=0.01)
    assert fitted.error < 0.006
    assert fitted.seconds(step) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    ("features", "seconds", "message"),
    [
        ({"bytes": [1, 2]}, [1.0], "bytes must have one value for each of 1 steps, got 2"),
        ({"bytes": [1, 2]}, [1.0, 0.0], "seconds must be above 0"),
        ({}, [], "seconds must be above 0"),
        ({"bytes": [2, 2, 2]}, [1.0, 2.0, 3.0], "cannot tell fixed, bytes apart"),
        ({"a": [1, 2, 3], "b": [2, 4, 6]}, [1.0, 2.0, 3.0], "cannot tell fixed, a, b apart"),
    ],
)
def test_a_log_that_cannot_be_fitted_is_refused(
    features: dict[str, list[float]], seconds: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_step_model(features, seconds)
