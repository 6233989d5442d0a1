"""The bytes that MBU counts, against the cost model and against bytes counted by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from fakes import tiny_config, tiny_model

from minifer.models.transformer import Transformer
from minifer.perf.costs import ElementBytes, step_cost
from minifer.perf.speed.traffic import Traffic, decode_bytes
from minifer.weights.quantized import quantize


def kv_read(cost) -> float:
    return cost["attention_scores"].kv_bytes + cost["attention_values"].kv_bytes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("windows", [(), (None, 8)])
def test_of_plain_weights_it_is_what_the_cost_model_says(tied, dtype, windows) -> None:
    config = tiny_config(tie_word_embeddings=tied, num_layers=2, sliding_windows=windows)
    size = dtype.itemsize
    traffic = Traffic.of(Transformer(config, dtype), config, size)
    assert traffic is not None
    contexts = [3, 40, 7]
    cost = step_cost(config, [(1, c) for c in contexts], element=ElementBytes(size, size, size))
    assert traffic.step(contexts) == cost.total().weight_bytes + kv_read(cost)


def test_quantised_matrices_count_their_codes_and_scales() -> None:
    config = tiny_config()
    model = copy.deepcopy(tiny_model(config))  # others share it
    before = Traffic.of(model, config, 4)
    projection = model.layers[0].mlp.down_proj
    plain = projection.weight
    codes = quantize(plain.data, 8, 16)
    del projection.weight
    projection.weight = codes
    after = Traffic.of(model, config, 4)
    assert before is not None and after is not None
    assert before.weights - after.weights == plain.nbytes - codes.nbytes
    # A code of 1 byte for each weight, and a scale for every 16.
    assert codes.nbytes == plain.numel() + plain.numel() // 16 * codes.scale.itemsize


def test_a_quantised_table_is_read_whole_as_head_and_by_rows_as_embedding() -> None:
    config = tiny_config(tie_word_embeddings=True)
    model = copy.deepcopy(tiny_model(config))  # others share it
    table = quantize(model.embed_tokens.weight.data, 8, 32)
    del model.embed_tokens.weight
    model.embed_tokens.weight = table
    traffic = Traffic.of(model, config, 4)
    assert traffic is not None
    assert traffic.row * config.vocab_size == table.nbytes
    assert traffic.weights == table.nbytes + sum(p.nbytes for p in model.parameters())


def test_steps_of_a_window_read_what_each_request_had() -> None:
    # 100 bytes of weights, 1 a row, 10 of KV a token in each of two layers, one of window 4.
    traffic = Traffic(100, 1.0, 10, ((None, 1), (4, 1)))
    assert traffic.kv([3, 6]) == 10 * (3 + 6) + 10 * (3 + 4)
    # Prompts of 2 and 5; a step where both had one token, a step where both had two.
    steps = [(1, 1), (2, 2)]
    first = 100 + 2 + 10 * (3 + 6) + 10 * (3 + 4)
    second = 100 + 2 + 10 * (4 + 7) + 10 * (4 + 4)
    assert decode_bytes(traffic, [2, 5], steps) == first + second
    assert Traffic.from_dict(traffic.to_dict()) == traffic


def test_a_loop_model_has_no_traffic_of_this_kind() -> None:
    from loop_fakes import loop_model, loop_model_config

    config = loop_model_config()
    assert Traffic.of(loop_model(config), config, 4) is None
