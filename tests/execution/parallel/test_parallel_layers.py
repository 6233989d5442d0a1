"""The two ideas of tensor parallelism, and a model cut in parts, against truths of their own."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import tiny_config, tiny_model
from oracles import TOKENS, build_oracle, oracle_logits
from torch import Tensor

from minifer.config import ModelConfig
from minifer.execution.backend import TorchBackend
from minifer.execution.parallel.group import Group, in_threads
from minifer.execution.parallel.layers import (
    ParallelTransformer,
    all_reduce_bytes,
    column_parallel,
    row_parallel,
)
from minifer.execution.parallel.loading import fill_rank
from minifer.execution.reference import reference_logits
from minifer.models.transformer import Transformer
from minifer.weights.hf import load_hf


def rank_of(model: Transformer, group: Group) -> ParallelTransformer:
    """A rank's part of a model in memory."""
    named = [
        (part.name, model.get_parameter(part.parameter).detach()[part.start : part.stop])
        for part in model.weight_parts()
    ]
    return fill_rank(model.config, group, torch.float32, "cpu", named)


def test_an_mlp_in_parts_is_one_sum_away_from_the_whole() -> None:
    """By the definition, in float64: silu works on each place alone, so it may stay cut."""
    generator = torch.Generator().manual_seed(0)
    x, first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((5, 8), (12, 8), (8, 12))
    )
    truth = F.silu(x @ first.T) @ second.T
    for size in (1, 2, 3, 4):
        inner = [F.silu(part) for part in column_parallel(x, first, size)]
        assert [part.shape for part in inner] == [(5, 12 // size)] * size
        summands = row_parallel(inner, second)
        torch.testing.assert_close(sum(summands), truth, atol=1e-12, rtol=0)
        assert size == 1 or not torch.allclose(summands[0], truth)


def test_a_norm_between_the_two_would_have_to_see_everything() -> None:
    """What may stay cut is what looks at one place at a time."""
    x, first, second = torch.randn(2, 4), torch.randn(6, 4), torch.randn(4, 6)
    inner = [F.rms_norm(part, part.shape[-1:]) for part in column_parallel(x, first, 2)]
    whole = F.rms_norm(x @ first.T, (6,)) @ second.T
    assert not torch.allclose(sum(row_parallel(inner, second)), whole, atol=1e-3)


def test_parts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"size must divide the 12 places .* got 5"):
        column_parallel(torch.zeros(1, 8), torch.zeros(12, 8), 5)
    with pytest.raises(ValueError, match=r"size must divide the 8 places .* got 3"):
        row_parallel([torch.zeros(1, 4)] * 3, torch.zeros(12, 8))


def test_bytes_of_an_all_reduce_by_hand() -> None:
    """Llama-3 70B in bfloat16: 2 · 7/8 · 8192 · 2 = 28,672 bytes for each of 2 · 80 + 1 sums."""
    sizes = {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8}
    config = tiny_config(**sizes, head_dim=128)
    assert all_reduce_bytes(config, size=8, element=2) == 28_672 * 161 == 4_616_192
    assert all_reduce_bytes(config, size=8, element=2, tokens=10) == 46_161_920
    assert all_reduce_bytes(config, size=1, element=2) == 0


@pytest.fixture(scope="module")
def transformers() -> Any:
    import transformers

    return transformers


# Head dimension, biases of every kind, norms of heads, windows, a head of its own or the embedding;
# 2 ranks have a KV head each, 4 share them.
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        "llama_attention_bias",
        "llama_mlp_bias",
        "llama_one_kv_head_a_query_head",
        "qwen2_tied",
        "qwen3_attention_bias_tied",
        "mistral_head_dim",
    ],
)
def test_logits_of_a_model_in_parts_are_transformers_logits(
    transformers: Any, tmp_path: Any, case: str, size: int
) -> None:
    oracle = build_oracle(transformers, case)
    oracle.save_pretrained(tmp_path)

    def work(group: Group) -> Tensor:
        part, _ = load_hf(
            tmp_path,
            torch.float32,
            fill=lambda config, dtype, device, named: fill_rank(
                config, group, dtype, device, named
            ),
        )
        return reference_logits(part, TOKENS)

    logits = in_threads(size, work)[0]
    torch.testing.assert_close(logits, oracle_logits(oracle, TOKENS), atol=1e-4, rtol=1e-4)


SIX_HEADS = {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 24}


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_does_not_divide_is_whole_again_on_rank_0(tied: bool) -> None:
    model = tiny_model(tiny_config(**SIX_HEADS, vocab_size=40, tie_word_embeddings=tied))
    tokens = [0, 13, 14, 27, 28, 39]  # both sides of every border of 14 + 14 + 12
    truth = reference_logits(model, tokens)

    def work(group: Group) -> Tensor:
        return reference_logits(rank_of(model, group), tokens)

    parts = in_threads(3, work)
    assert [part.shape[1] for part in parts] == [40, 14, 12]
    torch.testing.assert_close(parts[0], truth, atol=1e-5, rtol=1e-5)


def test_every_rank_has_the_same_hidden_states_to_the_bit() -> None:
    """Else their key and value caches would drift apart."""
    model = tiny_model(tiny_config(**SIX_HEADS))
    batch_tokens = list(range(20))

    @torch.inference_mode()
    def work(group: Group) -> Tensor:
        from minifer.execution.reference import DenseBackend, sequence_batch

        return rank_of(model, group)(sequence_batch(batch_tokens), None, DenseBackend())

    first, *others = in_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


def test_a_part_has_its_share_of_the_weights() -> None:
    model = tiny_model(tiny_config(**SIX_HEADS, num_layers=1))
    counts = in_threads(3, lambda group: rank_of(model, group).num_parameters)
    norms = 3 * 24  # are whole on each
    vocabulary = [14 * 24, 14 * 24, 12 * 24]
    matrices = (model.num_parameters - norms - 40 * 24) // 3
    assert counts == [norms + rows + matrices for rows in vocabulary]


def head_config() -> ModelConfig:
    return tiny_config(**SIX_HEADS, vocab_size=7, num_layers=1)


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([0.0, 1.0, 2.0, 9.0, 3.0, 4.0, 5.0], 3),  # in the middle part
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0], 6),  # in the last one, which is shorter
        ([0.0, 9.0, 2.0, 9.0, 4.0, 5.0, 9.0], 1),  # among equals the lowest id
        ([0.0, 1.0, 2.0, 3.0, 9.0, 9.0, 5.0], 4),
        ([-math.inf] * 7, 0),
        ([0.0, 1.0, 2.0, math.nan, 9.0, math.inf, 5.0], 3),  # NaN is the largest
        ([0.0, 1.0, 2.0, 3.0, 9.0, math.inf, 5.0], 5),
    ],
)
def test_the_largest_of_all_parts_is_the_largest_of_the_whole(row: list[float], token: int) -> None:
    wanted = torch.tensor(row)

    @torch.inference_mode()
    def work(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        part = ParallelTransformer(head_config(), group)
        part.embed_tokens.weight.zero_()
        part.embed_tokens.weight[:, 0] = wanted[part.ids.start : part.ids.stop]
        hidden = torch.zeros(2, 24)
        hidden[:, 0] = 1.0
        backend = _FirstPlace()
        return (*part.largest(hidden, backend), part.logits(hidden, backend))

    tokens, logits, whole = in_threads(3, work)[0]
    assert torch.equal(whole[0].nan_to_num(99.0), wanted.nan_to_num(99.0))
    assert tokens.tolist() == [token, token]
    assert torch.equal(logits.nan_to_num(99.0), wanted[[token, token]].nan_to_num(99.0))


class _FirstPlace(TorchBackend):
    """A head that reads the first column: products would turn infinity into NaN."""

    def linear(self, x: Tensor, weight: Any, bias: Any, residual: Any = None) -> Tensor:
        return x[:, :1] * weight[:, 0]


def test_a_step_that_needs_no_logits_gathers_none() -> None:
    @torch.inference_mode()
    def work(group: Group) -> tuple[int, ...]:
        part = ParallelTransformer(head_config(), group)
        before = group.seconds
        nothing = part.logits(torch.zeros(0, 24), TorchBackend())
        tokens, _ = part.largest(torch.zeros(0, 24), TorchBackend())
        assert group.seconds == before
        return (*nothing.shape, *tokens.shape)

    assert in_threads(3, work) == [(0, 7, 0)] * 3


def test_a_group_that_is_not_connected_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .* tensor_parallel_size=2"):
        Group(1, 2).all_reduce(torch.zeros(1))


def test_a_rank_that_leaves_is_an_error_for_whoever_waits_for_it() -> None:
    def work(group: Group) -> str:
        if group.rank == 1:
            return "left"
        with pytest.raises(RuntimeError) as error:
            group.all_reduce(torch.zeros(1))
        return str(error.value)

    said = in_threads(2, work)[0]
    assert said.startswith("the other ranks do not answer: ")
    assert "closed by peer" in said or "reset by peer" in said
    assert ".cc" not in said and len(said) < 100


def test_a_rank_that_does_not_come_is_given_up() -> None:
    done = threading.Event()

    def work(group: Group) -> bool:
        if group.rank == 1:
            return done.wait(30)
        try:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                group.all_reduce(torch.zeros(1))
        finally:
            done.set()
        return True

    assert in_threads(2, work, timeout=0.5) == [True, True]
