"""Load or recompute: the published numbers, and decisions from measured ones."""

from __future__ import annotations

import pytest
from fakes import tiny_config

from minifer.kv.tiers.break_even import (
    PRIOR_BANDWIDTH,
    BreakEven,
    Rate,
    break_even_bandwidth,
    mooncake_break_even,
)
from minifer.perf.costs import kv_bytes_per_token, prefill_cost


def test_k01_mooncakes_break_even_of_a_70b_model():
    """FAST 2025, section 5.1: about 6 GB/s on 8 A800, 19 GB/s on 8 H800 for 8,192 tokens."""
    a800 = mooncake_break_even(8 * 312e12, 8192, 8, 8192)
    h800 = mooncake_break_even(8 * 989e12, 8192, 8, 8192)
    assert (round(a800 / 1e9, 2), round(h800 / 1e9, 2)) == (5.86, 18.57)


@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_dim", "expected"),
    [
        ("SmolLM2-135M", 30, 3, 64, 23_040),
        ("Llama-3.2-1B", 16, 8, 64, 32_768),
        ("GPT-2 124M", 12, 12, 64, 36_864),
        ("Qwen3-0.6B", 28, 8, 128, 114_688),
        ("Llama-3.1-8B", 32, 8, 128, 131_072),
        ("Qwen3-8B", 36, 8, 128, 147_456),
        ("Llama-3.1-70B", 80, 8, 128, 327_680),
        ("Llama-3.1-405B", 126, 8, 128, 516_096),
        ("OPT-13B", 40, 40, 128, 819_200),
    ],
)
def test_k02_bytes_of_a_token(name, layers, kv_heads, head_dim, expected):
    config = tiny_config(
        num_layers=layers, num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim
    )
    assert kv_bytes_per_token(config) == expected


def test_a_cpu_needs_almost_no_bandwidth():
    """SmolLM2 at 100 GFLOP/s computes 1,024 tokens in seconds: any disk is faster."""
    config = tiny_config(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, max_position_embeddings=8192,
    )  # fmt: skip
    seconds = prefill_cost(config, 1024).total().flops / 100e9
    needed = break_even_bandwidth(kv_bytes_per_token(config) * 1024, seconds)
    assert 0.005e9 < needed < 0.02e9


def test_the_break_even_points_that_the_module_names():
    llama = mooncake_break_even(989e12 / 2, 4096, 4, 8000)
    smollm2 = mooncake_break_even(100e9, 576, 3, 1000, element_bytes=4)
    assert (round(llama / 1e9), round(smollm2 / 1e9, 2)) == (4, 0.02)


def test_a_rate_weighs_by_duration_and_forgets():
    rate = Rate()
    assert rate.value is None
    rate.observe(100, 0)  # says nothing
    rate.observe(0, 1)
    assert rate.value is None
    rate.observe(1000, 10)
    for _ in range(3):
        rate.observe(10, 0.001)
    assert rate.value == pytest.approx(100, rel=0.1)
    for _ in range(100):
        rate.observe(10, 1)
    assert rate.value == pytest.approx(10, rel=0.01)


def test_it_loads_until_a_prefill_was_timed():
    decide = BreakEven(1000)
    assert decide.min_bandwidth is None
    assert decide.wins("disk", 10)


def test_it_loads_where_the_bandwidth_is_above_the_break_even():
    decide = BreakEven(kv_bytes_per_token=1000)
    decide.prefill.observe(5000, 1.0)
    assert decide.min_bandwidth == pytest.approx(5e6)
    for tier in PRIOR_BANDWIDTH:
        decide.bandwidth[tier].observe(5.1e6, 1.0)
        assert decide.wins(tier, 64)
    slow = BreakEven(kv_bytes_per_token=1000)
    slow.prefill.observe(5000, 1.0)
    slow.bandwidth["disk"].observe(4.9e6, 1.0)
    assert not slow.wins("disk", 64)
    assert slow.wins("dram", 64)  # 1 GB/s are assumed


def test_what_is_to_be_read_before_counts():
    decide = BreakEven(1000)
    decide.prefill.observe(1000, 1.0)  # B_min is 1 MB/s
    decide.bandwidth["disk"].observe(2e6, 1.0)
    assert decide.wins("disk", 100, backlog_bytes=99_000)
    assert not decide.wins("disk", 100, backlog_bytes=101_000)


def test_an_unmeasured_tier_is_assumed_slow_and_tried_now_and_then():
    decide = BreakEven(1000)
    decide.prefill.observe(1e6, 1.0)  # B_min is 1 GB/s, ten times what is assumed of a disk
    refused = 0
    while not decide.wins("disk", 16):
        decide.admitted("disk", loaded=False)
        refused += 1
    assert refused == BreakEven.RETRY
    decide.admitted("disk", loaded=True)
    assert not decide.wins("disk", 16)
    decide.bandwidth["disk"].observe(2e9, 1.0)
    assert decide.wins("disk", 16)
