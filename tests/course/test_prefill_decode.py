"""The values behind lecture 02's figures, the float64 truth, and the model that takes parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minifer.config import ModelConfig
from minifer.course import example
from minifer.course.exact import exact_logits
from minifer.course.own_model import generate, try_yours
from minifer.course.pictures import prefill_decode as pictures
from minifer.course.pictures import prefill_decode_data as data
from minifer.course.shapes import LLAMA_8B
from minifer.execution.reference import reference_logits
from minifer.models.transformer import Transformer
from minifer.perf.costs import step_cost


def test_passes_of_both_ways_to_generate():
    assert data.generation_passes(4, 3, cached=False) == [(4, 4), (5, 5), (6, 6)]
    assert data.generation_passes(4, 3, cached=True) == [(4, 4), (1, 5), (1, 6)]
    assert data.generation_passes(4, 1, cached=True) == [(4, 4)]


def test_cells_tell_first_computed_again_and_read():
    cells = data.computed_cells([(2, 2), (3, 3), (1, 4)], prompt=2)
    kinds = {(c.step, c.position): c.kind for c in cells}
    assert [kinds[1, p] for p in range(2)] == ["first", "first"]
    assert [kinds[2, p] for p in range(3)] == ["again", "again", "first"]
    assert [kinds[3, p] for p in range(4)] == ["read", "read", "read", "first"]
    assert {c.position for c in cells if c.given} == {0, 1}
    with pytest.raises(ValueError, match="query"):
        data.computed_cells([(3, 2)], prompt=2)


def test_rows_of_chunks_see_the_same_keys_however_they_are_cut():
    for chunks in ([4], [3, 1], [1, 1, 1, 1]):
        rows = data.chunk_rows(chunks)
        seen = [[kind in ("cached", "new") for kind in row] for row in rows]
        assert seen == [[key <= query for key in range(4)] for query in range(4)]
    assert data.chunk_rows([2, 1])[1] == ["new", "new", "absent"]
    assert data.chunk_rows([1, 2])[1] == ["cached", "new", "hidden"]


def test_pairs_of_both_layouts():
    assert data.rope_pairs(6, "half") == [(0, 3), (1, 4), (2, 5)]
    assert data.rope_pairs(6, "interleaved") == [(0, 1), (2, 3), (4, 5)]


def test_steps_and_token_times_are_those_of_the_engine():
    run = example.run()
    steps = data.step_passes(run.events)
    for (step, _), entries in zip(run.steps, steps, strict=True):
        assert sum(query for _, _, query, _ in entries) == len(step.token_ids)
        assert [context for *_, context in entries] == list(step.seq_lens)
    assert steps[0] == [("A", "prefill", 16, 16)]
    assert steps[-1] == [("A", "decode", 1, 31)]
    for name, (arrival, times) in data.token_times(run.events).items():
        metrics = run.outputs[name].metrics
        assert len(times) == metrics.num_output_tokens
        assert (arrival, times[0], times[-1]) == (
            metrics.arrival_time,
            metrics.first_token_time,
            metrics.last_token_time,
        )


def test_totals_add_the_first_passes_up():
    series = data.Series("naive", range(3), [1, 2, 4], [2, 3, 5], [3, 5, 7])
    totals = series.totals([1, 3])
    assert (totals.floor, totals.predicted, totals.measured) == ([1, 7], [2, 10], [3, 15])
    assert series.every(1).measured == [5, 7]


def test_the_widget_shows_that_one_token_saves_nothing():
    svg = pictures.saved_view(prompt=100, output=1)
    assert "saves 1.0×" in svg and "keeps 13 MB" in svg
    naive = step_cost(LLAMA_8B, [(10, 10)]).total().flops
    cached = naive + step_cost(LLAMA_8B, [(1, 11)]).total().flops
    naive += step_cost(LLAMA_8B, [(11, 11)]).total().flops
    assert f"saves {naive / cached:.1f}×" in pictures.saved_view(prompt=10, output=2)


@pytest.mark.parametrize("tied", [True, False])
def test_exact_logits_are_the_reference_but_for_rounding(tied):
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=11,
        hidden_size=12,
        intermediate_size=20,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = Transformer(config)
    model.init_weights(seed=1, std=0.5)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    exact = exact_logits(model, tokens)
    assert exact.dtype == torch.float64 and exact.shape == (8, 11)
    torch.testing.assert_close(reference_logits(model, tokens).double(), exact, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="token_ids"):
        exact_logits(model, [])


def test_exact_logits_refuse_what_they_would_get_wrong():
    config = example.tiny().config
    model = Transformer(
        ModelConfig(**{**config.__dict__, "architecture": "Qwen2ForCausalLM", "qkv_bias": True})
    )
    with pytest.raises(ValueError, match="plain Llama"):
        exact_logits(model, [1, 2])


def rotation(x, positions, theta, layout):
    """The engine's, called as a learner's."""
    assert layout == "half"
    cos, sin = example.tiny().model.rotary(positions)
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def library_attention(query, key, value, past):
    keys, values = (
        (key, value) if past is None else map(torch.cat, zip(past, (key, value), strict=True))
    )
    T, S = len(query), len(keys)
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1), (keys, values)


def test_the_model_with_right_parts_writes_what_the_engine_writes(capsys):
    ids = example.tiny().tokenizer.encode(example.TRIO["A"][0])
    assert generate(rotation, library_attention, ids, 12) == example.run().tokens("A")
    try_yours(rotation, library_attention)
    assert capsys.readouterr().out.startswith("✔ the same text")


def test_the_model_with_wrong_or_missing_parts_says_so(capsys):
    def from_zero(x, positions, theta, layout):
        return rotation(x, positions - positions[0], theta, layout)

    def missing(*_):
        raise NotImplementedError("ex02.3")

    try_yours(from_zero, library_attention)
    assert capsys.readouterr().out.startswith("✘ another text")
    try_yours(rotation, missing)
    assert "needs exercises" in capsys.readouterr().out
    try_yours(rotation, lambda *_: None)
    assert "stopped: TypeError" in capsys.readouterr().out
