"""Whoever knows plain transformers only says so of a loop model, instead of a wrong number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from loop_models import loop_config

from minifer.config import ModelConfig
from minifer.execution.backends.megakernel import tile_of
from minifer.kernels.mega.shapes import MODELS, decode_shape
from minifer.models.registry import ARCHITECTURES, FORMATS, build_model, by_path
from minifer.models.transformer import Transformer
from minifer.perf import costs

PLAIN = next(iter(MODELS.values()))
LOOPED = loop_config()


@pytest.mark.parametrize(
    "cost",
    [
        costs.parameter_counts,
        costs.num_parameters,
        lambda config: costs.step_cost(config, [(1, 5)]),
        lambda config: costs.prefill_cost(config, 5),
        lambda config: costs.decode_cost(config, 2, 5),
    ],
)
def test_costs_of_a_transformer(cost: Callable[[ModelConfig], object]) -> None:
    cost(PLAIN)
    with pytest.raises(ValueError, match=r"got a loop model .*use minifer.parcae.costs"):
        cost(LOOPED)


def test_the_kv_of_a_token_counts_every_slot() -> None:
    """The one cost that is right for both: 4 layers run once, 2 run 4 times; 2 KV heads of 8."""
    assert costs.kv_bytes_per_token(LOOPED, 4) == (4 + 2 * 4) * 2 * 2 * 8 * 4


@pytest.mark.parametrize("shape", [decode_shape, tile_of])
def test_the_megakernel(shape: Callable[[ModelConfig], object]) -> None:
    shape(PLAIN)
    with pytest.raises(ValueError, match="no instruction for the core of a loop model: use"):
        shape(LOOPED)
    with pytest.raises(ValueError, match="no instruction for the core"):
        shape(replace(PLAIN, num_layers=6, loop=LOOPED.loop))


def test_the_transformer() -> None:
    with pytest.raises(ValueError, match="loop must be None for LlamaForCausalLM, which runs each"):
        build_model(replace(LOOPED, architecture="LlamaForCausalLM"), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loop must be None"):
        Transformer(LOOPED, device="meta")


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_of_its_own_leads_to_functions(name: str) -> None:
    form = FORMATS[name]
    assert form.architecture in ARCHITECTURES
    for path in (form.read_config, form.write_config, form.read_tensors, form.read_tokenizer):
        assert callable(by_path(path))
