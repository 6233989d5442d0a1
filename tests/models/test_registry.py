from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tiny_models import tiny_config

from minifer.models.registry import ARCHITECTURES, build_model, check_architecture, model_class
from minifer.models.transformer import Transformer


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_name_in_the_table_leads_to_a_class(name: str) -> None:
    assert isinstance(model_class(name), type)


def test_a_model_is_built_in_the_dtype_asked_for() -> None:
    model = build_model(tiny_config(architecture="Qwen2ForCausalLM"), torch.bfloat16)
    assert isinstance(model, Transformer)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_an_unknown_architecture_is_refused_with_those_that_work() -> None:
    with pytest.raises(ValueError, match=r"'GPT2LMHeadModel' is not supported; minifer runs Llama"):
        build_model(tiny_config(architecture="GPT2LMHeadModel"), torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "OlmoeForCausalLM",
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",
    ],
)
def test_mixtures_of_experts_are_refused_by_name_with_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is a mixture-of-experts .* Use a dense model"):
        check_architecture(name)


def test_a_known_name_with_experts_is_a_mixture_too() -> None:
    with pytest.raises(ValueError, match="mixture-of-experts"):
        check_architecture("LlamaForCausalLM", num_experts=8)


def test_the_class_is_imported_when_it_is_asked_for() -> None:
    """A package above this one can be named in the table without an import upwards."""
    code = (
        "import sys, minifer.models.registry as r; "
        "print('minifer.models.transformer' in sys.modules, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
