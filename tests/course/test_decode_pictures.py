"""What the pictures of decode say, against counts by hand and published formulas."""

from __future__ import annotations

import itertools

import pytest

from minifer.course.pictures.decode import (
    busy_sms,
    decode_points,
    expected_tokens,
    launches,
)
from minifer.course.shapes import LLAMA_1B, LLAMA_8B
from minifer.perf.costs import num_parameters
from minifer.perf.devices import DEVICES

H100 = DEVICES["H100-SXM"]


def test_llama_1b_has_its_published_number_of_parameters() -> None:
    assert num_parameters(LLAMA_1B) == 1_235_814_400  # the model card says 1.23 billion


def test_a_step_reads_all_weights_but_the_embedding_and_each_context_once() -> None:
    (alone, many) = decode_points(LLAMA_8B, H100, [1, 8], 1000)
    head_and_layers = num_parameters(LLAMA_8B) - 128_256 * 4096
    assert alone.weight_bytes == 2 * (head_and_layers + 4096)  # one row of the embedding
    assert many.kv_bytes == 8 * alone.kv_bytes == 8 * 1001 * 2 * 32 * 8 * 128 * 2
    assert many.tokens_per_second == 8 / many.seconds


def test_programs_run_in_waves() -> None:
    """By brute force: hand equal programs to SMs one by one, and see when the last is done."""
    for programs, sms in itertools.product((1, 7, 8, 9, 40), (1, 4, 8)):
        done = [0] * sms
        for _ in range(programs):
            done[done.index(min(done))] += 1
        assert busy_sms(programs, sms) == pytest.approx(programs / (max(done) * sms))


def test_launches_are_counted_and_what_they_leave_of_the_floor() -> None:
    step = launches(LLAMA_8B, H100, 1, 1024, per_layer=7, gap=1e-6)
    (floor,) = decode_points(LLAMA_8B, H100, [1], 1024)
    assert step.kernels == 32 * 7 + 1
    assert step.seconds == pytest.approx(floor.seconds + 225e-6)
    assert step.share == pytest.approx(floor.seconds / step.seconds)


def test_expected_tokens_are_those_of_the_closed_form() -> None:
    """(1 − a^(k+1)) / (1 − a): https://arxiv.org/abs/2211.17192, equation 1."""
    for a, k in itertools.product((0.0, 0.3, 0.9), (0, 1, 5)):
        assert expected_tokens(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))
