"""Which part of a model a rank holds, and which sizes a model can be cut for."""

from __future__ import annotations

import pytest
import torch
from fakes import tiny_config, tiny_model

from minifer.config import ModelConfig
from minifer.execution.parallel.shard import Shard, check_size, shard_config, valid_sizes
from minifer.weights.resolve import read_config

SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}
LLAMA_70B = {"num_heads": 64, "num_kv_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}


def wide(**changes: int) -> ModelConfig:
    """Six query heads that read two KV heads."""
    sizes = {"num_heads": 6, "num_kv_heads": 2, "intermediate_size": 48, "hidden_size": 24}
    return tiny_config(**(sizes | {"vocab_size": 96} | changes))


@pytest.mark.parametrize(
    ("sizes", "valid"),
    [
        (SMOLLM2, [1, 3]),  # 9 would do for the heads, and does not divide 1536
        (LLAMA_70B, [1, 2, 4, 8, 16, 32, 64]),
        ({"num_heads": 12, "num_kv_heads": 6, "intermediate_size": 384}, [1, 2, 3, 6, 12]),
        ({"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 12}, [1, 2, 4, 12]),
    ],
)
def test_sizes_divide_heads_and_mlp_and_fit_the_kv_heads(
    sizes: dict[str, int], valid: list[int]
) -> None:
    assert valid_sizes(wide(**sizes)) == valid


def test_minifer_tiny_can_be_cut_for_two_and_three() -> None:
    assert valid_sizes(read_config("minifer-tiny")) == [1, 2, 3, 6, 12]


def test_a_size_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size .* 1, 2, 3, 6, 12 .* got 5"):
        check_size(read_config("minifer-tiny"), 5)
    with pytest.raises(ValueError, match="loop model"):
        check_size(read_config("parcae-tiny"), 2)


def test_a_rank_without_any_token_of_the_vocabulary_is_not_made() -> None:
    assert valid_sizes(wide(vocab_size=12)) == [1, 2, 6]
    assert valid_sizes(wide(vocab_size=7)) == [1, 2]  # 6 ranks: 2, 2, 2 and 1 tokens, then none


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        Shard(2, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_parts_of_all_ranks_are_the_whole_and_nothing_twice(size: int) -> None:
    config = wide(num_kv_heads=6)
    for name in (
        "self_attn.q_proj.weight",
        "self_attn.v_proj.bias",
        "mlp.up_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
        "embed_tokens.weight",
    ):
        shape = [6 * 8 if "attn" in name else 96 if "embed" in name else 48, 24]
        columns = name.startswith(("self_attn.o_proj", "mlp.down_proj"))
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        whole = whole.T if columns else whole
        whole = whole[:, 0] if name.endswith("bias") else whole
        parts = [
            Shard(rank, size).part(config, f"model.layers.0.{name}", whole) for rank in range(size)
        ]
        assert torch.equal(torch.cat(parts, dim=1 if columns else 0), whole), name


def test_with_fewer_kv_heads_than_ranks_each_rank_has_the_one_its_query_heads_read() -> None:
    config = wide()  # query heads 0, 1, 2 read KV head 0; 3, 4, 5 read KV head 1
    keys = torch.arange(2).repeat_interleave(8)[:, None]
    queries = torch.arange(6).repeat_interleave(8)[:, None]
    for rank in range(6):
        shard = Shard(rank, 6)
        assert shard_config(config, shard).num_kv_heads == 1
        (query,) = shard.part(config, "self_attn.q_proj.weight", queries).unique().tolist()
        (key,) = shard.part(config, "self_attn.k_proj.weight", keys).unique().tolist()
        assert (query, key) == (rank, rank // 3)


def test_norms_and_biases_after_a_sum_are_whole_on_every_rank() -> None:
    vector = torch.arange(24)
    for name in ("input_layernorm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias"):
        assert torch.equal(Shard(1, 2).part(wide(), f"layers.0.{name}", vector), vector)


def test_every_tensor_of_a_checkpoint_is_cut_to_the_shape_of_the_thin_model() -> None:
    whole = tiny_model(wide(vocab_size=41, num_kv_heads=6))  # 41 = 14 + 14 + 13
    for rank in range(3):
        shard = Shard(rank, 3)
        thin = tiny_model(shard_config(whole.config, shard))
        wanted = {part.name: part for part in thin.weight_parts()}
        for part in whole.weight_parts():
            tensor = whole.get_parameter(part.parameter)[part.start : part.stop]
            place = wanted[part.name]
            expected = thin.get_parameter(place.parameter)[place.start : place.stop].shape
            cut = shard.part(whole.config, part.name, tensor)
            assert cut.shape == expected, part.name
