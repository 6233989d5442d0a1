"""What the cost model says of weights and KV is what a running engine touches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minifer import ModelConfig
from minifer.perf.costs import ElementBytes, decode_cost, step_cost
from minifer.perf.counted import CountingRunner, count_bytes, padded_kv_read
from minifer.perf.steps import element_bytes, engine_for, random_model
from minifer.weights.quantized import weight_bytes
from minifer.weights.resolve import load_model

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=80,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
FLOAT32 = ElementBytes(4, 4, 4)


def counted_run(model, requests: dict[str, list[int]], **options):
    """Serve prompts for three tokens each; the counted steps."""
    engine = engine_for(model, **options)
    engine.runner = counting = CountingRunner(engine.runner)
    for name, prompt in requests.items():
        engine.add_request(name, prompt, engine.default_params.with_(max_tokens=3))
    while engine.has_unfinished_requests:
        engine.step()
    return counting.steps


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, tie_word_embeddings=True),
        replace(TINY, architecture="Qwen2ForCausalLM", qkv_bias=True),
        replace(TINY, architecture="Qwen3ForCausalLM", qk_norm=True),
    ],
    ids=["llama", "tied", "biases", "qk_norm"],
)
@pytest.mark.parametrize("budget", [64, 5])
def test_weights_and_kv_are_exact_where_contexts_are_equal(config: ModelConfig, budget: int):
    prompts = {name: list(range(start, start + 12)) for name, start in (("A", 0), ("B", 20))}
    model = random_model(config)
    rows = set()
    for step in counted_run(model, prompts, max_num_batched_tokens=budget):
        batch, seen = step.batch, step.seen
        cost = step_cost(config, batch, num_logits=step.num_logits, element=FLOAT32)
        total = cost.total()
        rows.add(step.num_logits)
        assert seen.weights == total.weight_bytes, batch
        assert seen.kv_written == cost["kv_write"].kv_bytes, batch
        if len({context for query, context in batch if query == 1}) <= 1:
            assert seen.kv == total.kv_bytes, batch
    assert rows == ({2} if budget == 64 else {0, 1})  # chunks that end no prompt have none


def test_padding_is_the_whole_difference_where_contexts_differ():
    config = replace(TINY, tie_word_embeddings=True)
    prompts = {"A": list(range(20)), "B": list(range(30, 33)), "C": list(range(40, 49))}
    ragged = 0
    for step in counted_run(random_model(config), prompts):
        batch, seen = step.batch, step.seen
        predicted = step_cost(config, batch, element=FLOAT32).total().kv_bytes - seen.kv_written
        assert seen.kv_read == padded_kv_read(config, batch, 4), batch
        ragged += seen.kv_read > predicted
        assert seen.kv_read >= predicted
    assert ragged == 2  # the two steps that decode all three


def test_a_view_moves_nothing_and_a_gather_moves_what_it_takes():
    weight, cache = torch.ones(6, 4), torch.ones(10, 2)
    _, seen = count_bytes(lambda: weight[1:].t().unsqueeze(0), [weight], [cache])
    assert (seen.weights, seen.kv, seen.activations) == (0, 0, 0)
    _, seen = count_bytes(lambda: cache[torch.tensor([1, 1, 3])], [weight], [cache])
    assert (seen.weights, seen.kv_read, seen.kv_written) == (0, 3 * 2 * 4, 0)
    _, seen = count_bytes(lambda: torch.ones(3, 4) @ weight.t(), [weight], [cache])
    assert (seen.weights, seen.kv) == (weight.nbytes, 0)
    row = torch.tensor([[2], [0]])
    _, seen = count_bytes(lambda: weight[:2].gather(1, row), [weight], [cache])
    assert (seen.weights, seen.activations) == (2 * 4, row.nbytes + 2 * 4)


def test_what_numpy_is_handed_is_read():
    weight, cache = torch.ones(6, 4), torch.ones(10, 2)
    _, seen = count_bytes(lambda: weight.numpy().argmax(-1), [weight], [cache])
    assert (seen.weights, seen.kv, seen.activations) == (weight.nbytes, 0, 0)


def test_a_write_into_the_cache_is_counted_as_one():
    cache = torch.zeros(10, 2)

    def write() -> None:
        cache[torch.tensor([4, 7])] = torch.ones(2, 2)

    _, seen = count_bytes(write, [], [cache])
    assert (seen.kv_read, seen.kv_written) == (0, 2 * 2 * 4)


def test_activations_are_more_than_operations_must_exchange():
    """Torch's operations are smaller than the model's: the count is a ceiling, not a prediction."""
    steps = counted_run(random_model(TINY), {"A": list(range(12))})
    for step in steps:
        predicted = step_cost(TINY, step.batch, element=FLOAT32).total().activation_bytes
        assert step.seen.activations > predicted
    assert steps[1].batch == ((1, 13),)
    assert steps[1].seen.weights == decode_cost(TINY, 1, 13, element=FLOAT32).total().weight_bytes


def test_codes_count_as_weights_and_cost_their_fraction_of_a_byte(text_model):
    """int8: a byte a weight, two for a row's scale, and the embedding's row of the token."""
    loaded = load_model(text_model, quantize="int8")
    element = element_bytes(loaded)
    assert element.weight * loaded.model.num_parameters == weight_bytes(loaded.model)
    assert 1 < element.weight < 1.3 and element.activation == 2
    last = counted_run(loaded, {"A": list(range(5))})[-1]  # all is packed by then
    assert last.batch == ((1, 7),)
    assert last.seen.weights == weight_bytes(loaded.model) + loaded.config.hidden_size + 2
