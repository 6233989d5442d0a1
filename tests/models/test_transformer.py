"""What holds for the model alone: the paged path is the slow twin's, request by request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import PagedRun, tiny_config, tiny_model
from torch import Tensor

from minifer.execution.backend import TorchBackend
from minifer.execution.reference import DenseBackend, reference_logits, sequence_batch
from minifer.models.transformer import Transformer

PROMPT = [7, 3, 60, 12, 12, 5, 41, 30, 2, 19]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_case_131_a_window_of_3_reaches_exactly_two_tokens_back() -> None:
    """One layer, so that a row depends on exactly the tokens its mask lets through.

    Row t, column s: does changing token s change the output at t?
    """
    model = tiny_model(num_layers=1, sliding_windows=(3,))
    tokens = [1, 2, 3, 4, 5]
    before = reference_logits(model, tokens)
    table = []
    for s in range(5):
        changed = [*tokens[:s], 50, *tokens[s + 1 :]]
        after = reference_logits(model, changed)
        table.append([bool((after[t] != before[t]).any()) for t in range(5)])
    sees = torch.tensor(table).T.int().tolist()
    assert sees == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


class RecordingBackend(DenseBackend):
    """Keeps the keys and values of every slot."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        self.keys[rest[1]], self.values[rest[1]] = key, value
        return super().attend(query, key, value, *rest)


def test_case_133_after_every_step_each_layer_of_the_cache_equals_recomputation() -> None:
    model = tiny_model(num_layers=3, qk_norm=True)
    run = PagedRun(model)
    steps = [PROMPT[:1], PROMPT[1:6], *([token] for token in PROMPT[6:])]
    for new in steps:
        run.step([(0, new)])
        seen = run.computed[0]
        truth = RecordingBackend()
        with torch.inference_mode():
            model(sequence_batch(PROMPT[:seen]), None, truth)
        slots = run.slots(0, range(seen))
        for slot in range(3):
            close(run.kv.keys[slot].flatten(0, 1)[slots], truth.keys[slot])
            close(run.kv.values[slot].flatten(0, 1)[slots], truth.values[slot])
    written = {s for s in range(32) if not run.kv.keys[0].flatten(0, 1)[s].isnan().any()}
    assert written == set(run.slots(0, range(len(PROMPT))))  # and nothing else was touched


def test_case_134_three_copies_of_a_prompt_give_three_equal_rows() -> None:
    model = tiny_model()
    run = PagedRun(model, num_requests=3)
    for new in (PROMPT[:8], PROMPT[8:9], PROMPT[9:]):
        rows = run.step([(request, new) for request in range(3)])
        # Request 0 may not be the only one that is right.
        truth = reference_logits(model, PROMPT[: run.computed[0]])[-len(new) :]
        for row in rows:
            close(row, truth)


def test_case_135_requests_of_different_lengths_rotate_by_their_own_positions() -> None:
    model = tiny_model()
    prompts = [PROMPT, PROMPT[3:5], PROMPT[2:9]]
    run = PagedRun(model, num_requests=3)
    run.step([(0, prompts[0][:6])])  # request 0 is ahead before the others arrive
    mixed = run.step([(2, prompts[2][:4]), (0, prompts[0][6:7]), (1, prompts[1])])
    close(mixed[0], reference_logits(model, prompts[2][:4]))
    close(mixed[1], reference_logits(model, prompts[0][:7])[-1:])
    close(mixed[2], reference_logits(model, prompts[1]))
    decode = run.step([(0, prompts[0][7:8]), (1, [9]), (2, prompts[2][4:5])])
    close(decode[0], reference_logits(model, prompts[0][:8])[-1:])
    close(decode[1], reference_logits(model, [*prompts[1], 9])[-1:])
    close(decode[2], reference_logits(model, prompts[2][:5])[-1:])


def test_case_122_a_tied_model_has_no_head_and_uses_the_embedding() -> None:
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head is None
    assert "lm_head.weight" not in {part.name for part in model.weight_parts()}
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    close(model.logits(hidden, TorchBackend()), hidden @ model.embed_tokens.weight.T)
    untied = tiny_model()
    assert untied.num_parameters - model.num_parameters == 64 * 32  # the embedding counts once


def test_case_098_a_bfloat16_head_flips_greedy_picks_and_a_float32_one_does_not() -> None:
    """1,000 rows, V 2,048, D 64; the truth multiplies the same bfloat16 numbers in float64."""
    model = Transformer(tiny_config(hidden_size=64, vocab_size=2048), dtype=torch.bfloat16)
    model.init_weights(0)
    hidden = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    backend = TorchBackend()
    head = model.lm_head
    assert head is not None
    with torch.inference_mode():
        truth = hidden.double() @ head.weight.double().T
        rounded = model.logits(hidden, backend)
        exact = model.logits(hidden, backend, float32=True)
    assert rounded.dtype == exact.dtype == torch.float32
    torch.testing.assert_close(exact.double(), truth, atol=1e-6, rtol=1e-5)
    assert torch.equal(exact.argmax(-1), truth.argmax(-1))
    flipped = int((rounded.argmax(-1) != truth.argmax(-1)).sum())
    assert 10 < flipped < 500  # percents of all rows: why the option exists


def test_case_137_row_0_of_a_product_may_depend_on_how_many_rows_there_are(
    record_property: Any,
) -> None:
    """Libraries choose another order of summation for another number of rows.

    What is promised is the bound of float32 summation, and equal bits for equal shapes. Which of
    M = 1 … 64 differ in bits is the machine's business: it is recorded, not asserted.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator)
    weight = torch.randn(128, 256, generator=generator)
    backend = TorchBackend()
    alone = backend.linear(x[:1], weight, None)
    # |error| ≤ n · 2⁻²⁴ · Σ |xᵢ wᵢ| for each of the two (Higham, Accuracy and Stability, 3.1)
    bound = 2 * 256 * 2.0**-24 * (x[:1].abs() @ weight.abs().T)
    sizes: dict[bytes, list[int]] = {}  # the bits of row 0 → the M that give them
    for M in range(1, 65):
        row = backend.linear(x[:M], weight, None)[:1]
        assert torch.equal(row, backend.linear(x[:M], weight, None)[:1])  # same shape, same bits
        assert ((row - alone).abs() <= bound).all()
        sizes.setdefault(row.numpy().tobytes(), []).append(M)
    report = [f"{ms[0]} … {ms[-1]} ({len(ms)} sizes)" for ms in sizes.values()]
    record_property("rows_that_share_their_bits", "; ".join(report))
    print("M whose row 0 has the same bits:", "; ".join(report))


def test_every_parameter_belongs_to_exactly_one_place_of_a_checkpoint() -> None:
    flags = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True}
    model = tiny_model(**flags)
    covered = {name: 0 for name, _ in model.named_parameters()}
    for part in model.weight_parts():
        assert part.start == covered[part.parameter]  # parts follow one another without a gap
        covered[part.parameter] = part.stop
    assert covered == {name: p.shape[0] for name, p in model.named_parameters()}


def test_init_weights_is_the_same_for_the_same_seed() -> None:
    a, b, c = tiny_model(1), tiny_model(1), tiny_model(2)
    assert torch.equal(a.embed_tokens.weight, b.embed_tokens.weight)
    assert not torch.equal(a.embed_tokens.weight, c.embed_tokens.weight)
    assert torch.equal(a.norm.weight, torch.ones(32))


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_can_be_built_on_the_meta_device(tied: bool) -> None:
    """Its size is known before a byte is allocated."""
    config = tiny_config(tie_word_embeddings=tied)
    model = Transformer(config, device="meta")
    assert all(p.device.type == "meta" for p in model.parameters())
    assert model.num_parameters == Transformer(config).num_parameters
