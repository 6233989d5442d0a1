"""The cost model against what torch counts and what tensors weigh."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minifer.config import ModelConfig
from minifer.execution.backend import TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.models.transformer import Transformer
from minifer.perf.costs import (
    ElementBytes,
    attended_pairs,
    decode_cost,
    kv_bytes_per_token,
    num_parameters,
    parameter_counts,
    prefill_cost,
    step_cost,
)
from minifer.perf.devices import DEVICES

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=80,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,  # H · C is not D
    max_position_embeddings=64,
)
FAMILIES = {
    "llama": TINY,
    "llama_tied": replace(TINY, tie_word_embeddings=True),
    "llama_all_biases": replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen2": replace(TINY, architecture="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": replace(TINY, architecture="Qwen3ForCausalLM", qk_norm=True),
    "sliding": replace(TINY, sliding_windows=(None, 5, 3)),
}
# A prompt, the second chunk of one, a decode: (query, context).
MIXED = [(7, 7), (5, 9), (1, 12)]
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
)


class CountingBackend(TorchBackend):
    """Records the bytes of the tensors each operation is given and returns.

    Attention is the definition: one small matrix product a query and KV head, over exactly the
    keys it may see, so that torch's counter sees no masked work.
    """

    def __init__(self, model: Transformer) -> None:
        self.names = {
            id(p): name.removesuffix(".weight").split(".")[-1]
            for name, p in model.named_parameters()
        }
        self.moved: Counter[tuple[str, str]] = Counter()

    def _record(self, op: str, weights: Sequence[Tensor | None], *activations: Tensor) -> None:
        self.moved[op, "weight"] += sum(w.nbytes for w in weights if w is not None)
        self.moved[op, "activation"] += sum(a.nbytes for a in activations)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        out = super().linear(x, weight, bias)
        self._record(self.names[id(weight)], [weight, bias], x, out)
        return out if residual is None else residual + out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = super().rms_norm(x, weight, eps)
        self._record("norms", [weight], x, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = super().silu_mul(gate_up)
        self._record("silu_mul", [], gate_up, out)
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = super().rope(x, cos, sin)
        self._record("rope", [], x, out)
        return out

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: KVStorage,
        slot: int,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        keys, values = kv.keys[slot].flatten(0, 1), kv.values[slot].flatten(0, 1)
        keys[batch.slot_mapping], values[batch.slot_mapping] = key, value
        self._record("kv_write", [], key, value)
        self.moved["kv_write", "kv"] += key.nbytes + value.nbytes
        out = torch.empty_like(query)
        self._record("attention_scores", [], query)
        self._record("attention_values", [], out)
        K = keys.shape[1]
        for b, length in enumerate(batch.seq_lens_host):
            rows = range(batch.query_start_host[b], batch.query_start_host[b + 1])
            position = torch.arange(length)
            table = batch.block_tables[b][position // batch.block_size]
            slots = table * batch.block_size + position % batch.block_size
            touched: set[int] = set()
            for i, t in enumerate(rows):
                end = length - len(rows) + i + 1
                first = 0 if window is None else max(0, end - window)
                touched.update(range(first, end))
                k, v = keys[slots[first:end]], values[slots[first:end]]  # [S, K, C]
                q = query[t].unflatten(0, (K, -1))  # [K, H/K, C]
                weights = torch.bmm(q, k.permute(1, 2, 0)).mul(scale).softmax(-1)
                out[t] = torch.bmm(weights, v.transpose(0, 1)).flatten(0, 1)
            self.moved["attention_scores", "kv"] += len(touched) * keys[0].nbytes
            self.moved["attention_values", "kv"] += len(touched) * values[0].nbytes
        return out


def run(config: ModelConfig, work: Sequence[tuple[int, int]]) -> tuple[int, Counter[Any]]:
    """One real step; returns torch's count of FLOPs and the bytes of every operation."""
    model = Transformer(config)
    model.init_weights(0)
    block_size = 4
    tables, token_ids, positions, slots, starts = [], [], [], [], [0]
    for b, (query, context) in enumerate(work):
        tables.append(list(range(b * 8, b * 8 + 8)))
        at = range(context - query, context)
        token_ids += [p % config.vocab_size for p in at]
        positions += at
        slots += [tables[b][p // block_size] * block_size + p % block_size for p in at]
        starts.append(len(positions))
    last = [end - 1 for end in starts[1:]]
    batch = ForwardBatch.build(
        token_ids, positions, slots, starts, [c for _, c in work], tables, last, block_size
    )
    kv = KVStorage(
        config.num_kv_slots,
        8 * len(work),
        block_size,
        config.num_kv_heads,
        config.head_dim,
        torch.float32,
    )
    for cache in (*kv.keys, *kv.values):
        cache.zero_()
    backend = CountingBackend(model)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        hidden = model(batch, kv, backend)
        model.logits(hidden[batch.logits_rows], backend)
    return counter.get_total_flops(), backend.moved


FLOAT32 = ElementBytes(weight=4, kv=4, activation=4)
MATRIX_PRODUCTS = {
    "qkv": "qkv_proj",
    "output": "o_proj",
    "gate_up": "gate_up_proj",
    "down": "down_proj",
    "attention_scores": "",
    "attention_values": "",
    "head": "lm_head",
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "work", [[(6, 6)], [(1, 9), (1, 4)], MIXED], ids=["prompt", "decode", "mix"]
)
def test_flops_are_what_torch_counts(name: str, work: list[tuple[int, int]]) -> None:
    config = FAMILIES[name]
    counted, _ = run(config, work)
    cost = step_cost(config, work)
    products = sum(cost[op].flops for op in MATRIX_PRODUCTS)
    # torch counts no additions of a bias.
    plain = replace(config, qkv_bias=False, output_bias=False, mlp_bias=False)
    biases = {
        op: parameter_counts(config)[op] - parameter_counts(plain)[op]
        for op in ("qkv", "output", "gate_up", "down")
    }
    T = sum(query for query, _ in work)
    assert counted == products - T * sum(biases.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_are_the_sizes_of_the_tensors(name: str) -> None:
    config = FAMILIES[name]
    _, moved = run(config, MIXED)
    cost = step_cost(config, MIXED, element=FLOAT32)
    names = {op.name: op.name for op in cost.ops} | {k: v for k, v in MATRIX_PRODUCTS.items() if v}
    if config.tie_word_embeddings:
        names["head"] = "embed_tokens"
    # Not calls of the back end: the look-up and the sums of the residual stream.
    for op in cost.ops:
        if op.name in ("embedding", "residual"):
            continue
        recorded = tuple(moved[names[op.name], kind] for kind in ("weight", "kv", "activation"))
        assert (op.weight_bytes, op.kv_bytes, op.activation_bytes) == recorded, op.name


def test_embedding_reads_one_row_a_token_and_the_residual_reads_two_and_writes_one() -> None:
    cost = step_cost(TINY, [(3, 3)], element=FLOAT32)
    row = torch.zeros(3, TINY.hidden_size)
    assert (cost["embedding"].weight_bytes, cost["embedding"].flops) == (row.nbytes, 0)
    additions = 2 * TINY.num_layers
    assert cost["residual"].activation_bytes == additions * 3 * row.nbytes
    assert cost["residual"].flops == additions * row.numel()


@pytest.mark.parametrize("name", FAMILIES)
def test_parameter_count_is_the_models(name: str) -> None:
    model = Transformer(FAMILIES[name])
    assert num_parameters(FAMILIES[name]) == sum(p.numel() for p in model.parameters())


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors of any size that hold nothing."""
    with torch.device("meta"):
        yield


def published_configs() -> dict[str, tuple[Any, int]]:
    """transformers configurations of known models, and the parameters their cards state."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    return {
        "Llama-3.1-8B": (
            LlamaConfig(
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=32,
                num_key_value_heads=8,
                vocab_size=128256,
            ),
            8_030_261_248,
        ),
        "SmolLM2-135M": (
            LlamaConfig(
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                vocab_size=49152,
                tie_word_embeddings=True,
            ),
            134_515_008,
        ),
        "Qwen2.5-0.5B": (
            Qwen2Config(
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=24,
                num_attention_heads=14,
                num_key_value_heads=2,
                vocab_size=151936,
                tie_word_embeddings=True,
            ),
            494_032_768,
        ),
        "Qwen3-0.6B": (
            Qwen3Config(
                hidden_size=1024,
                intermediate_size=3072,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                vocab_size=151936,
                tie_word_embeddings=True,
            ),
            596_049_920,
        ),
    }


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "SmolLM2-135M", "Qwen2.5-0.5B", "Qwen3-0.6B"])
def test_parameter_count_of_published_models_is_that_of_transformers(name: str) -> None:
    from transformers import AutoModelForCausalLM

    from minifer.weights.hf_config import config_from_hf

    theirs, published = published_configs()[name]
    with without_memory():
        model = AutoModelForCausalLM.from_config(theirs)
    raw = theirs.to_dict() | {"architectures": [type(model).__name__]}
    assert sum(p.numel() for p in model.parameters()) == published
    assert num_parameters(config_from_hf(raw)) == published


@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
def test_attended_pairs_is_the_number_of_ones_in_the_mask(window: int | None) -> None:
    from minifer.execution.attention import causal_mask

    for context in range(1, 10):
        for query in range(1, context + 1):
            mask = causal_mask(query, context, window)
            assert attended_pairs(query, context, window) == int(mask.sum()), (query, context)


def test_chunks_of_a_prompt_attend_to_as_many_pairs_as_the_whole() -> None:
    """Chunking costs no arithmetic; what it costs is reading the KV of earlier chunks again."""
    whole = prefill_cost(TINY, 12)
    chunks = [step_cost(TINY, [(4, end)]) for end in (4, 8, 12)]
    assert sum(c["attention_scores"].flops for c in chunks) == whole["attention_scores"].flops
    read = [c["attention_scores"].kv_bytes for c in chunks]
    assert sum(read) == 2 * whole["attention_scores"].kv_bytes  # 4 + 8 + 12 tokens, not 12


def test_a_cached_prefix_saves_its_products_but_is_still_read() -> None:
    cold, warm = prefill_cost(TINY, 10), prefill_cost(TINY, 10, cached=8)
    assert warm["qkv"].flops == cold["qkv"].flops / 5
    assert warm["attention_scores"].kv_bytes == cold["attention_scores"].kv_bytes


def test_kv_bytes_of_llama_8b_are_128_kib_a_token() -> None:
    """2 · 32 layers · 8 heads · 128 · 2 bytes."""
    assert kv_bytes_per_token(LLAMA_8B) == 128 * 1024
    written = decode_cost(LLAMA_8B, 1, 1)["kv_write"].kv_bytes
    assert written == kv_bytes_per_token(LLAMA_8B)


def test_decode_reads_all_weights_once_whatever_the_batch() -> None:
    """All but the embedding, of which a token reads one row."""
    one, many = decode_cost(LLAMA_8B, 1, 1000).total(), decode_cost(LLAMA_8B, 64, 1000).total()
    row = 2 * LLAMA_8B.hidden_size
    table = 2 * parameter_counts(LLAMA_8B)["embedding"]
    assert one.weight_bytes == 2 * num_parameters(LLAMA_8B) - table + row
    assert many.weight_bytes == one.weight_bytes + 63 * row
    assert many.kv_bytes == 64 * one.kv_bytes


def test_batching_raises_intensity_towards_the_ridge_and_context_lowers_it() -> None:
    ridge = DEVICES["H200-SXM"].ridge_point
    intensity = [decode_cost(LLAMA_8B, b, 1).total().intensity for b in (1, 16, 256)]
    assert intensity[0] == pytest.approx(1, rel=0.01)  # two FLOPs for two bytes
    assert intensity[0] < intensity[1] < ridge / 4
    assert prefill_cost(LLAMA_8B, 4096).total().intensity > ridge
    assert decode_cost(LLAMA_8B, 256, 8192).total().intensity < intensity[2] / 4


def test_grouped_queries_raise_the_intensity_of_decode_attention_to_the_group_size() -> None:
    cost = decode_cost(LLAMA_8B, 1, 100_000)
    scores = cost["attention_scores"]
    assert scores.intensity == pytest.approx(LLAMA_8B.num_heads / LLAMA_8B.num_kv_heads, rel=0.01)


def test_the_head_is_computed_for_one_row_a_request_unless_more_are_asked_for() -> None:
    last, every = step_cost(TINY, [(8, 8)]), step_cost(TINY, [(8, 8)], num_logits=8)
    assert every["head"].flops == 8 * last["head"].flops
    assert every["head"].weight_bytes == last["head"].weight_bytes


def test_a_step_without_logits_does_not_read_the_head() -> None:
    none, last = step_cost(TINY, [(8, 8)], num_logits=0), step_cost(TINY, [(8, 8)])
    assert (none["head"].flops, none["head"].bytes) == (0, 0)
    head = 2 * TINY.vocab_size * TINY.hidden_size
    assert last.total().weight_bytes - none.total().weight_bytes == head


def test_quantised_weights_shrink_only_weights() -> None:
    q4 = decode_cost(LLAMA_8B, 4, 100, element=ElementBytes(weight=0.625)).total()
    bf16 = decode_cost(LLAMA_8B, 4, 100).total()
    assert q4.weight_bytes == bf16.weight_bytes * 0.625 / 2
    assert (q4.kv_bytes, q4.activation_bytes) == (bf16.kv_bytes, bf16.activation_bytes)


@pytest.mark.parametrize("pair", [(0, 4), (5, 4), (-1, 2)])
def test_impossible_work_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 <= query <= context"):
        step_cost(TINY, [pair])


def test_asking_what_it_costs_loads_no_torch() -> None:
    code = (
        "import sys; import minifer.perf.costs, minifer.perf.devices, minifer.trace; "
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
